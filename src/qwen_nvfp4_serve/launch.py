"""Settings and facts -> the exact `vllm serve` command and its environment. Pure: nothing here touches the world."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qwen_nvfp4_serve.chat_template import TEMPLATE_PATH
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.planner import Plan
from qwen_nvfp4_serve.settings import Settings

PLUGIN = "qwen_nvfp4"  # our name in the entry-point group vllm.general_plugins
MASK = "********"
SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW", re.IGNORECASE)
SHIMS = Path(__file__).parent / "shims"
DRAIN_MIDDLEWARE = "qwen_nvfp4_patches.drain.DrainMiddleware"  # ends the server's last requests properly
DRAIN_VARIABLE = "QWEN_NVFP4_DRAIN_S"

# `vllm serve` flags that a knob owns; EXTRA_ARGS may not set them a second time, least of all around a safety check.
OWNED_FLAGS = {
    "--model": "MODEL",
    "--revision": "REVISION",
    "--served-model-name": "SERVED_MODEL_NAME",
    "--host": "BIND_HOST",
    "--uds": "BIND_HOST",
    "--port": "PORT",
    "--api-key": "VLLM_API_KEY",
    "--max-model-len": "MAX_MODEL_LEN",
    "--max-num-seqs": "MAX_NUM_SEQS",
    "--max-num-batched-tokens": "MAX_NUM_BATCHED_TOKENS",
    "--kv-cache-dtype": "KV_CACHE_DTYPE",
    "--kv-cache-memory-bytes": "CPU_KV_CACHE_GIB",
    "--enable-prefix-caching": "PREFIX_CACHING",
    "--gpu-memory-utilization": "GPU_MEMORY_UTILIZATION",
    "--tensor-parallel-size": "TENSOR_PARALLEL",
    "--gdn-prefill-backend": "GDN_PREFILL",
    "--speculative-config": "SPECULATIVE_TOKENS",
    "--enforce-eager": "ENFORCE_EAGER",
    "--language-model-only": "VISION",
    "--chat-template": "CHAT_TEMPLATE",
    "--chat-template-content-format": "CHAT_TEMPLATE",
    "--default-chat-template-kwargs": "KEEP_THINKING",
    "--shutdown-timeout": "SHUTDOWN_TIMEOUT_S",
    "--hf-token": "HF_TOKEN",
}
SHORT_FLAGS = {"-tp": "TENSOR_PARALLEL", "-sc": "SPECULATIVE_TOKENS"}
REFUSED_FLAGS = {
    "--config": "would set flags past the checks of the knobs",
    "--headless": "starts no HTTP server",
    "--grpc": "starts no HTTP server",
    "--help": "starts no server",
    "-h": "starts no server",
}
GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What to serve. source: folder or hub id for vLLM; ids: names that clients may send, the first is shown.
    own_format: it was trained on the chat template in its folder, which is not the family's.
    """

    source: str
    ids: tuple[str, ...]
    revision: str | None
    local: bool
    own_format: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the plan decided, in tokens and requests; None leaves it to vLLM. notices: one sentence each.

    The numbers already start from the user's settings. plan: where they come from, None without one.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_bytes: int | None = None
    notices: tuple[str, ...] = ()
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the launch needs to know of the machine."""

    device: Literal["cuda", "cpu"]
    python: str
    has_cxx: bool
    in_container: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command, what its environment adds to ours, and what to tell the user. `argv` never holds a secret."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    url: str
    model_id: str
    notices: tuple[str, ...]


def build_launch(
    settings: Settings, *, model: Model, capacity: Capacity, host: Host, passthrough: Mapping[str, str] | None = None
) -> Launch:
    """The launch for these settings. Raises UsageError when EXTRA_ARGS sets a flag that a knob owns."""
    extra = extra_words(settings.extra_args)
    argv = [host.python, "-m", "vllm.entrypoints.cli.main", "serve", model.source]
    argv += (
        _identity(settings, model)
        + _network(settings, host)
        + _capacity(settings, capacity, host)
        + _kernels(settings, host)
        + _api(settings)
        + _template(settings, model)
    )
    notices = list(capacity.notices)
    eager = settings.enforce_eager or (host.device == "cpu" and not host.has_cxx)
    environment = _environment(settings, model, host, dict(passthrough or {}))
    if eager:
        argv.append("--enforce-eager")
    if eager and host.device == "cpu":
        # vLLM's sampler and embedding still call torch.compile when eager, and that needs a C++ compiler on a CPU.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if host.device == "cpu" and not host.has_cxx and not settings.enforce_eager:
        notices.append(
            "WARNING: no C++ compiler (g++ or clang++): serving without compilation (--enforce-eager), slower"
        )
    return Launch(
        argv=(*argv, *extra),
        environment=environment,
        url=f"http://{_client_host(settings.bind_host)}:{settings.port}/v1",
        model_id=_names(settings, model)[0],
        notices=tuple(notices),
    )


def _names(settings: Settings, model: Model) -> list[str]:
    """What clients may call the model, and what readiness asks for: the first."""
    return [settings.served_model_name] if settings.served_model_name else list(model.ids)


def _identity(settings: Settings, model: Model) -> list[str]:
    revision = settings.revision or model.revision
    return ["--served-model-name", *_names(settings, model)] + (
        ["--revision", revision] if revision and not model.local else []
    )


def _network(settings: Settings, host: Host) -> list[str]:
    # Inside a container the engine publishes BIND_HOST; the server itself must listen on the container's own address.
    address = "0.0.0.0" if host.in_container else settings.bind_host
    return ["--host", address, "--port", str(settings.port), "--shutdown-timeout", str(settings.shutdown_timeout_s)]


def _capacity(settings: Settings, capacity: Capacity, host: Host) -> list[str]:
    kv_bytes = int(settings.cpu_kv_cache_gib * GIB) if host.device == "cpu" else capacity.kv_cache_bytes
    utilization = capacity.gpu_memory_utilization or settings.gpu_memory_utilization
    flags: list[tuple[str, object]] = [
        ("--max-model-len", capacity.max_model_len or settings.max_model_len or "auto"),
        ("--max-num-seqs", capacity.max_num_seqs or settings.max_num_seqs),
        ("--max-num-batched-tokens", capacity.max_num_batched_tokens or settings.max_num_batched_tokens),
        ("--kv-cache-dtype", settings.kv_cache_dtype),
        ("--kv-cache-memory-bytes", kv_bytes),
        ("--block-size", capacity.block_size_tokens),
        ("--gpu-memory-utilization", utilization if host.device == "cuda" else None),
        ("--tensor-parallel-size", settings.tensor_parallel if settings.tensor_parallel > 1 else None),
    ]
    caching = "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching"
    return [word for name, value in flags if value is not None for word in (name, str(value))] + [caching]


def _kernels(settings: Settings, host: Host) -> list[str]:
    words = [] if settings.vision else ["--language-model-only"]
    if settings.gdn_prefill != "auto":
        words += ["--gdn-prefill-backend", settings.gdn_prefill]
    if settings.speculative_tokens:
        words += ["--speculative-config", f'{{"method":"mtp","num_speculative_tokens":{settings.speculative_tokens}}}']
    if host.device == "cpu":
        words += ["--dtype", "bfloat16"]
    return words + {
        "marlin": ["--linear-backend", "marlin", "--moe-backend", "marlin"],
        "flashinfer-cutlass": ["--linear-backend", "flashinfer_cutlass", "--moe-backend", "flashinfer_cutlass"],
        "flashinfer-b12x": ["--linear-backend", "flashinfer_b12x"],
    }.get(settings.nvfp4_backend, [])


def _api(settings: Settings) -> list[str]:
    drain = ["--middleware", DRAIN_MIDDLEWARE] if settings.patches == "on" else []
    # usage.prompt_tokens_details.cached_tokens lets a client see that prefix caching works.
    return [
        "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder", "--enable-auto-tool-choice",
        "--enable-prompt-tokens-details", "--disable-access-log-for-endpoints", "/health,/metrics", *drain,
    ]  # fmt: skip


def _template(settings: Settings, model: Model) -> list[str]:
    if settings.chat_template == "checkpoint" or (settings.chat_template == "auto" and model.own_format):
        return []
    # Content has to come in parts: in a string, an image's placeholder cannot be told from what a client wrote.
    return [
        "--chat-template", str(TEMPLATE_PATH), "--chat-template-content-format", "openai",
        "--default-chat-template-kwargs", json.dumps({"keep_thinking": settings.keep_thinking}),
    ]  # fmt: skip


def _environment(settings: Settings, model: Model, host: Host, passthrough: dict[str, str]) -> dict[str, str]:
    added = {
        **passthrough,
        "VLLM_PLUGINS": ",".join(
            dict.fromkeys([PLUGIN, *filter(None, passthrough.get("VLLM_PLUGINS", "").split(","))])
        ),
        "VLLM_NO_USAGE_STATS": passthrough.get("VLLM_NO_USAGE_STATS", "1"),  # no telemetry unless the user asks for it
        "QWEN_NVFP4_PATCHES": settings.patches,
        "QWEN_NVFP4_BACKEND": settings.nvfp4_backend,
        DRAIN_VARIABLE: str(settings.shutdown_timeout_s),
        "PYTHONUNBUFFERED": "1",
    }
    if host.device == "cpu":
        added |= {"QWEN_NVFP4_CPU_ACTIVATIONS": settings.cpu_activations, "PYTHONPATH": str(SHIMS)}
    if settings.vllm_api_key:
        added["VLLM_API_KEY"] = settings.vllm_api_key.get_secret_value()
    if settings.hf_token:
        added["HF_TOKEN"] = settings.hf_token.get_secret_value()
    if settings.cuda_visible_devices is not None:
        added["CUDA_VISIBLE_DEVICES"] = settings.cuda_visible_devices
    if settings.cache_dir:
        added["QWEN_NVFP4_CACHE_DIR"] = str(Path(settings.cache_dir).expanduser())
    if settings.hf_home:
        added["HF_HOME"] = settings.hf_home
    if settings.hf_hub_offline or model.local:
        added["HF_HUB_OFFLINE"] = "1"
    return added


def extra_words(text: str) -> list[str]:
    """EXTRA_ARGS as words. Raises UsageError for a flag that a knob owns, or that starts no server."""
    words = shlex.split(text)
    if words and (not words[0].startswith("-") or any(word.startswith("@") for word in words)):
        raise UsageError("EXTRA_ARGS", seen=repr(words[0])[:60], expected="flags of `vllm serve`, such as --seed 7")
    for word in words:
        # vLLM reads `--flag.key value` as one key of a JSON flag, and `_` as `-`.
        flag = re.split(r"[=.]", word, maxsplit=1)[0].replace("_", "-")
        positive = flag.replace("--no-", "--", 1)
        if reason := REFUSED_FLAGS.get(flag):
            raise UsageError(f"EXTRA_ARGS sets {flag}, which {reason}", do="Remove it.")
        if owner := _owner(flag) or _owner(positive):
            raise UsageError(f"EXTRA_ARGS sets {flag}, which the knob {owner} owns", do=f"Set {owner} instead.")
    return words


def _owner(flag: str) -> str | None:
    short = next((knob for owned, knob in SHORT_FLAGS.items() if re.fullmatch(rf"{owned}\d*", flag)), None)
    return short or next(
        (knob for owned, knob in OWNED_FLAGS.items() if flag == owned or _abbreviates(flag, owned)), None
    )


def _abbreviates(flag: str, owned: str) -> bool:
    """argparse accepts any unambiguous beginning of a long flag."""
    return len(flag) > len("--h") and flag.startswith("--") and owned.startswith(flag)


def _client_host(bind_host: str) -> str:
    if bind_host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{bind_host}]" if ":" in bind_host else bind_host


def shown_environment(launch: Launch) -> dict[str, str]:
    """The added environment with secrets masked, for printing."""
    return {
        name: MASK if SECRET_NAME.search(name) else _without_password(value)
        for name, value in sorted(launch.environment.items())
    }


def shown_command(launch: Launch) -> str:
    """The command as a shell would take it, passwords inside URLs masked."""
    return shlex.join(_without_password(word) for word in launch.argv)


def _without_password(text: str) -> str:
    return re.sub(r"(\w+://)[^/@\s]+@", rf"\1{MASK}@", text)
