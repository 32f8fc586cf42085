"""What a command takes where none is named: the model that `serve` would take on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen_nvfp4_serve.settings import Settings


def default_model(settings: Settings, *, for_card: bool = False) -> str:
    """MODEL, else the default for a card if there is one here, DEVICE says so, or `for_card`; else the embedded one."""
    from qwen_nvfp4_serve.host import detect_gpus
    from qwen_nvfp4_serve.models import DEFAULT_ON_CARD, DEFAULT_WITHOUT_CARD

    if settings.model:
        return settings.model
    if not for_card and settings.device == "auto":
        for_card = bool(detect_gpus(settings.cuda_visible_devices))
    return DEFAULT_ON_CARD if for_card or settings.device == "cuda" else DEFAULT_WITHOUT_CARD
