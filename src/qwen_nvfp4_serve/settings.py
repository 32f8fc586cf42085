"""Every knob of the server: one field, one default. The only reader of the environment and of `.env`.

The environment wins over `.env`. A name that is misspelt, obsolete or unknown and a value that is out of range each
stop the start with one sentence. `.env.example` and the README's table are generated from the fields below.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.secret_files import read_secret_files
from qwen_nvfp4_serve.settings_faults import explain
from qwen_nvfp4_serve.settings_names import check_names, read_env_file

ENV_FILE = Path(".env")
SECRETS_DIR = Path("/run/secrets")  # where container engines mount file secrets


def knob(default: Any, group: str, description: str, *, unit: str = "", **limits: Any) -> Any:
    """A settings field with the columns of the generated table: its group, unit and description."""
    return Field(default, description=description, json_schema_extra={"group": group, "unit": unit}, **limits)


def _tidy(value: object) -> object:
    return value.strip() if isinstance(value, str) else value


def _parses(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"words quoted as in a shell, but there is {str(error).lower()}") from None
    return text


def _names(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w./:@+-]{0,255}", text, re.ASCII):
        raise ValueError("expected letters, digits and . / : @ + - _ only, a letter or digit first")
    return text


def _can_be_sent(key: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[\x21-\x7e]+", key.get_secret_value().strip()):
        raise ValueError("expected printable ASCII without spaces: no client can send another key")
    return key


Text = Annotated[str, BeforeValidator(_tidy)]
Name = Annotated[str, BeforeValidator(_tidy), AfterValidator(_names)]
Key = Annotated[SecretStr, AfterValidator(_can_be_sent)]
Flag = Annotated[bool, BeforeValidator(_tidy)]
Int = Annotated[int, BeforeValidator(_tidy)]
Number = Annotated[float, BeforeValidator(_tidy)]


class Settings(BaseSettings):
    """The validated knobs. Field `max_model_len` is set by `MAX_MODEL_LEN`, and so on; None means "decide for me"."""

    model_config = SettingsConfigDict(
        case_sensitive=True,
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        alias_generator=str.upper,
        populate_by_name=True,
        protected_namespaces=(),
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`load_settings` merges the environment and `.env` itself, to name every fault; then come file secrets."""
        return init_settings, file_secret_settings

    model: Text | None = knob(
        None,
        "model",
        "Catalogue name (`qwen-nvfp4 models` lists them), hub id or local path. Unset: `qwen3.5-35b-a3b` on a GPU, "
        "`embedded` without one.",
    )
    revision: Name | None = knob(None, "model", "Hub revision (40 hex digits recommended). Unset: the catalogue's.")
    served_model_name: Name | None = knob(
        None, "model", "Model id that clients send. Unset: the alias and the full id."
    )
    vision: Flag = knob(False, "model", "Load the vision tower and accept images.")

    bind_host: Text = knob("127.0.0.1", "network", "Address to listen on. Anything but loopback needs VLLM_API_KEY.")
    port: Int = knob(8000, "network", "TCP port.", ge=1, le=65535)
    vllm_api_key: Key | None = knob(None, "network", "Key that clients must send (guards /v1 only).")
    vllm_api_key_file: Text | None = knob(None, "network", "File that holds the key, instead of VLLM_API_KEY.")
    allow_no_key: Flag = knob(False, "network", "Allow a non-loopback BIND_HOST without a key.")

    max_model_len: Int | None = knob(
        None, "capacity", "Context length. Unset: the largest that fits.", unit="tokens", ge=16
    )
    max_num_seqs: Int | None = knob(
        None, "capacity", "Requests decoded at once. Unset: planned.", unit="requests", ge=1
    )
    max_num_batched_tokens: Int | None = knob(
        None, "capacity", "Prefill chunk. Unset: planned; at least one cache block.", unit="tokens", ge=16
    )
    kv_cache_dtype: Literal["fp8", "bfloat16"] = knob(
        "fp8", "capacity", "Precision of the KV cache: `fp8` or `bfloat16`."
    )
    prefix_caching: Flag = knob(True, "capacity", "Reuse the cache of equal prompt prefixes.")
    gpu_memory_utilization: Number | None = knob(
        None,
        "capacity",
        "Share of the card's memory to use. Unset: planned from free memory.",
        unit="fraction",
        gt=0,
        lt=1,
    )
    cpu_kv_cache_gib: Number = knob(1.0, "capacity", "KV cache of the CPU backend.", unit="GiB", gt=0, le=1024)
    tensor_parallel: Int = knob(1, "capacity", "Cards to split the model over.", unit="cards", ge=1, le=8)

    device: Literal["auto", "cuda", "cpu"] = knob(
        "auto", "kernels", "`cuda`, `cpu`, or `auto`: a card if there is one."
    )
    cuda_visible_devices: Text | None = knob(None, "kernels", "Cards to use, by index: `0` or `0,1`. Unset: all.")
    patches: Literal["on", "off"] = knob("on", "kernels", "`off` runs vLLM as it is, to compare.")
    nvfp4_backend: Literal["auto", "hybrid", "marlin", "flashinfer-cutlass", "flashinfer-b12x", "stock"] = knob(
        "auto",
        "kernels",
        "Who computes NVFP4 layers on a card: `auto` and `stock` leave it to vLLM, `hybrid` (an engine "
        "of it ran on an H200, none on Blackwell) takes our kernels where this card admits them.",
    )
    cpu_activations: Literal["weights-only", "w4a4"] = knob(
        "weights-only", "kernels", "CPU backend: keep BF16 activations, or emulate the rounding of W4A4 checkpoints."
    )
    gdn_prefill: Literal["auto", "triton", "flashinfer"] = knob("auto", "kernels", "Backend of the GDN prefill.")
    speculative_tokens: Int = knob(
        0, "kernels", "Draft tokens a step from the MTP layer; 0 is off.", unit="tokens", ge=0, le=8
    )
    enforce_eager: Flag = knob(False, "kernels", "Skip compilation and CUDA graphs: quicker start, slower decode.")

    chat_template: Literal["auto", "ours", "checkpoint"] = knob(
        "auto", "api", "`ours` (docs/api.md), the `checkpoint`'s own, or `auto`: ours, but the embedded model's own."
    )
    keep_thinking: Literal["all", "turn", "none"] = knob(
        "all",
        "api",
        "Thinking that our template shows again: `all`, `turn` (since the last user message, which recomputes that "
        "turn once it is over), or `none`.",
    )

    hf_token: SecretStr | None = knob(None, "downloads", "Hub token for gated models.")
    hf_token_file: Text | None = knob(None, "downloads", "File that holds the token, instead of HF_TOKEN.")
    hf_home: Text | None = knob(None, "downloads", "Hub cache folder.")
    hf_hub_offline: Flag = knob(False, "downloads", "Never ask the hub.")
    cache_dir: Text | None = knob(
        None, "downloads", "Our cache: compiled kernels, what earlier starts learned. Unset: the user cache folder."
    )

    start_timeout_s: Int = knob(1800, "process", "Give up when not READY after this long.", unit="s", ge=10, le=604_800)
    shutdown_timeout_s: Int = knob(
        20, "process", "How long running requests may finish after a stop.", unit="s", ge=0, le=3600
    )
    hang_timeout_s: Int = knob(
        600, "process", "End a server that does nothing for this long although it is asked; 0: never.", unit="s",
        ge=0, le=604_800,
    )  # fmt: skip
    log_format: Literal["text", "json"] = knob("text", "process", "Stage lines for people or one JSON object each.")
    extra_args: Annotated[str, BeforeValidator(_tidy), AfterValidator(_parses)] = knob(
        "", "process", "More `vllm serve` flags, quoted as in a shell. Flags that a knob sets are refused."
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """Validated settings, what to tell the user about them, and variables of `.env` that are vLLM's own."""

    settings: Settings
    notices: tuple[str, ...]
    passthrough: Mapping[str, str]


def knobs() -> Mapping[str, FieldInfo]:
    """Environment name -> field, in the order of the table."""
    return {name.upper(): field for name, field in Settings.model_fields.items()}


def default_of(name: str) -> str:
    """The default of a knob as it would be written in `.env`; empty when unset."""
    value = knobs()[name].default
    if value is None:
        return ""
    return ("1" if value else "0") if isinstance(value, bool) else str(value)


def load_settings(
    env_file: Path | None = None, environ: Mapping[str, str] = os.environ, *, required: bool = False
) -> Loaded:
    """Settings from `environ` over `env_file` (missing is empty unless `required`) over file secrets over defaults.

    Raises UsageError naming the key, the value seen and the right spelling or range. Secrets are never echoed.
    """
    if required and env_file is not None and not env_file.exists():
        raise UsageError(f"{env_file} is not there", do="Name a file with KEY=value lines.")
    from_file, notices = read_env_file(env_file) if env_file else ({}, [])
    names = frozenset(knobs())
    passthrough = check_names(from_file, environ, names)
    given = {**from_file, **{k: v for k, v in environ.items() if k in names}}
    returns = [key for key, value in given.items() if value.endswith("\r")]
    if env_file and env_file.exists() and b"\r\n" in env_file.read_bytes():
        returns += [key for key in from_file if key not in returns]
    if returns:
        notices.append(f"{', '.join(returns)}: stripped trailing carriage returns (saved on Windows?)")
    given = {key: value.strip() for key, value in given.items() if key in names and value.strip()}
    given |= read_secret_files(given)
    values: dict[str, Any] = {"_secrets_dir": SECRETS_DIR if SECRETS_DIR.is_dir() else None, **given}
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise explain(error, knobs(), environ) from None
    _check_together(settings)
    return Loaded(settings, tuple(notices), passthrough)


def _check_together(settings: Settings) -> None:
    if (
        settings.max_num_seqs
        and settings.max_num_batched_tokens
        and settings.max_num_batched_tokens < settings.max_num_seqs
    ):
        raise UsageError(
            "MAX_NUM_BATCHED_TOKENS",
            seen=str(settings.max_num_batched_tokens),
            expected=f"at least MAX_NUM_SEQS ({settings.max_num_seqs})",
            do="Raise the one or lower the other.",
        )
