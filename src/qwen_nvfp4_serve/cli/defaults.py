"""What a command takes where none is named: the model that `serve` would take on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from qwen_nvfp4_serve.settings import Settings


def settings_of(env_file: Path | None) -> Settings:
    """The settings of `env_file`, which has to be there; None: of `.env`, which need not. Raises UsageError."""
    from qwen_nvfp4_serve.settings import ENV_FILE, load_settings

    return load_settings(env_file or ENV_FILE, required=env_file is not None).settings


def hub_token() -> str | None:
    """HF_TOKEN as `serve` would read it; None leaves the library its own saved one."""
    token = settings_of(None).hf_token
    return token.get_secret_value() if token else None


def is_cpu_run(settings: Settings) -> bool:
    """Whether `serve` would use the CPU here: DEVICE says so, or there is no card."""
    from qwen_nvfp4_serve.host import detect_gpus

    return settings.device == "cpu" or (settings.device == "auto" and not detect_gpus(settings.cuda_visible_devices))


def default_model(settings: Settings, *, for_card: bool = False) -> str:
    """MODEL, else the default for a card if there is one here, DEVICE says so, or `for_card`; else the embedded one."""
    from qwen_nvfp4_serve.models import DEFAULT_ON_CARD, DEFAULT_WITHOUT_CARD

    if settings.model:
        return settings.model
    return DEFAULT_ON_CARD if for_card or not is_cpu_run(settings) else DEFAULT_WITHOUT_CARD
