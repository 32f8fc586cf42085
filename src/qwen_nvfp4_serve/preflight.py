"""Checks before a start: each passes, or raises one sentence that says what to do. No torch, no vLLM import."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Literal

import psutil

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UnsupportedHostError, UsageError
from qwen_nvfp4_serve.host import claim_name
from qwen_nvfp4_serve.launch import PLUGIN
from qwen_nvfp4_serve.settings import Settings
from qwen_nvfp4_serve.units import GIB
from qwen_nvfp4_serve.versions import GPU_WINDOW, VLLM_CPU, VLLM_GPU, check_vllm, installed_vllm

# Routes that answer without a key even when one is set (vLLM 0.33: --api-key guards /v1, /v2, /inference and /cohere).
OPEN_ROUTES = (
    "/invocations (full inference), /tokenize, /detokenize, /pooling, /score, /pause, /update_weights, /metrics, /docs"
)
PLUGIN_GROUP = "vllm.general_plugins"
CHECKS_GROUP = "qwen_nvfp4.patch_checks"  # how we ask our patches without importing them


def installed_kind() -> Literal["cuda", "cpu"] | None:
    """Which backend the installed vLLM was built for."""
    for name, kind in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        with contextlib.suppress(PackageNotFoundError):
            found = version(name)
            return "cpu" if kind == "cpu" or "cpu" in found else "cuda"
    return None


def check_version(device: Literal["cuda", "cpu"]) -> str:
    """The installed vLLM's version. Raises UnsupportedHostError naming it and the window when it is outside."""
    found = installed_vllm()
    verdict = check_vllm(found, gpu=device == "cuda")
    if not verdict.ok:
        raise UnsupportedHostError(verdict.sentence)
    assert found is not None  # a missing vLLM is never ok
    return found


def check_build(device: Literal["cuda", "cpu"], built_for: Literal["cuda", "cpu"] | None) -> None:
    """Raises UnsupportedHostError when the installed vLLM was built for the other kind of machine."""
    if built_for in (None, device):
        return
    if device == "cuda":
        do = f"Install vllm=={VLLM_GPU} (rm -r .venv; scripts/serve does it), or set DEVICE=cpu."
        raise UnsupportedHostError("the installed vLLM is its CPU build and DEVICE=cuda", do=do)
    do = f"Install vllm-cpu=={VLLM_CPU} (rm -r .venv; DEVICE=cpu scripts/serve does it)."
    raise UnsupportedHostError("the installed vLLM is its GPU build and this run is on the CPU", do=do)


def check_exposure(settings: Settings, device: Literal["cuda", "cpu"], vllm_version: str) -> None:
    """Raises UsageError when BIND_HOST would show an unguarded server, or an old CPU build, to other machines."""
    if is_loopback(settings.bind_host):
        return
    if not settings.vllm_api_key and not settings.allow_no_key:
        raise UsageError(
            f"BIND_HOST={settings.bind_host} shows the server to other machines and VLLM_API_KEY is not set",
            do=f"Set VLLM_API_KEY (ALLOW_NO_KEY=1 overrides). Even with a key vLLM leaves open: {OPEN_ROUTES}. "
            "Put a proxy that passes only /v1 in front.",
        )
    if device == "cpu" and not GPU_WINDOW.holds(vllm_version):
        raise UsageError(
            f"BIND_HOST={settings.bind_host} with vLLM {vllm_version} (CPU): served on loopback only",
            do=f"Set BIND_HOST=127.0.0.1: {GPU_WINDOW.reason}. A tunnel (ssh -L) reaches it from elsewhere.",
        )


def check_device_knobs(settings: Settings, device: Literal["cuda", "cpu"]) -> None:
    """Raises UsageError for a knob that this device would ignore or cannot honour; a card honours all of them."""
    if device == "cuda":
        return
    set_for_a_card = {
        "TENSOR_PARALLEL": settings.tensor_parallel if settings.tensor_parallel > 1 else None,
        "NVFP4_BACKEND": settings.nvfp4_backend if settings.nvfp4_backend not in ("auto", "stock") else None,
        "GDN_PREFILL": settings.gdn_prefill if settings.gdn_prefill == "flashinfer" else None,
        "GPU_MEMORY_UTILIZATION": settings.gpu_memory_utilization,
    }
    for name, value in set_for_a_card.items():
        if value is not None:
            raise UsageError(f"{name}={value} needs a card and this run is on the CPU", do=f"Unset {name}.")
    memory_gib = psutil.virtual_memory().total / GIB
    if settings.cpu_kv_cache_gib > memory_gib:
        raise UsageError(
            "CPU_KV_CACHE_GIB",
            seen=f"{settings.cpu_kv_cache_gib:g}",
            expected=f"less than this machine's memory, {memory_gib:.1f} GiB",
            do="Lower it; the weights need room too.",
        )


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses. Raises UsageError for what is neither a name nor an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise UsageError("BIND_HOST", seen=host, expected="an IP address or localhost", do="Use 127.0.0.1.") from None


@contextlib.contextmanager
def claimed_port(host: str, port: int) -> Iterator[None]:
    """Holds `port` against other starts of ours, from long before vLLM listens there until it has ended.

    Of two starts at once, both would find the port free, and one would learn minutes later, from vLLM, that it is not.
    The claim is a name in the kernel, dropped with this process however that ends. Raises QwenNvfp4Error when the port
    is claimed or taken.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0{claim_name(port)}")
        except OSError:
            raise _port_error(host, port, "another start of this server has it") from None
        check_port(host, port)
        yield


def check_port(host: str, port: int) -> None:
    """Raises QwenNvfp4Error when nothing can listen on host:port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        raise _port_error(host, port, error.strerror or str(error)) from None


def _port_error(host: str, port: int, reason: str) -> QwenNvfp4Error:
    do = f"Stop what uses it, or set PORT (now {port}) to a free one."
    return QwenNvfp4Error(f"port {port} on {host} cannot be used ({reason})", do=do)


def check_plugin() -> None:
    """Raises QwenNvfp4Error unless vLLM will find our plugin exactly once."""
    found = sum(point.name == PLUGIN for point in entry_points(group=PLUGIN_GROUP))
    if found != 1:
        raise QwenNvfp4Error(
            f"vLLM plugin {PLUGIN!r}", seen=f"{found} installed copies", expected="exactly one",
            do="Reinstall this package into the environment that holds vLLM.",
        )  # fmt: skip


def read_config(folder: Path, do: str = "Point MODEL at a complete checkpoint folder.") -> dict[str, Any]:
    """config.json of a checkpoint. Raises UsageError, ending with `do`, when it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error})", do=do) from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}", seen=type(config).__name__, expected="a JSON object", do=do)
    return config


def is_nvfp4(config: dict[str, Any]) -> bool:
    """True when a checkpoint's config.json declares NVFP4 layers, in any of the forms that exporters write."""
    text = json.dumps(config.get("quantization_config") or {}).lower()
    return "nvfp4" in text or ('"num_bits": 4' in text and '"float"' in text)


def check_patches(
    settings: Settings, device: Literal["cuda", "cpu"], config: dict[str, Any] | None, vllm_version: str
) -> None:
    """Raises UsageError when PATCHES=off and the model cannot run without them; the patches themselves say so."""
    nvfp4, enabled = config is not None and is_nvfp4(config), settings.patches == "on"
    for point in entry_points(group=CHECKS_GROUP):
        checks = point.load()(vllm_version=vllm_version, gpu=device == "cuda", nvfp4=nvfp4, enabled=enabled)
        for check in checks:
            if not check.ok:
                raise UsageError(check.sentence)
