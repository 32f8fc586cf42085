"""What the doctor judges: facts about a host, each of which may be unknown."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from qwen_nvfp4_serve.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A host. None is "nobody looked" everywhere; sizes carry their unit.

    driver: NVIDIA's version. cuda_image: CUDA version of the image or runtime to be used. gpu: name of the card, ""
    for a host without one. device: auto, cpu or cuda, as DEVICE says. cards: how many are visible. compat_libs: CUDA
    forward-compatibility libraries are on the library path. torch_arch_list: what the installed torch was built for.
    gpu_processes: who holds the card's memory. env: text of the .env file; env_fault: why the settings cannot be
    read, the environment's counted in. cache_uid, cache_gid, mode: owner, group and octal mode of the hub cache;
    cache_fault: why nobody can write there; run_uid, run_gids: who will serve. gated: the repository asks for access;
    hf_token: a token is set; hf_status: what the hub answered to it. port_holder: what listens on the port, "" for
    nothing; port_own: it is a server of ours. compile_cache_stale: written by another vLLM. vllm_version: "" where it
    is not installed. plugins: how many of our entry points vLLM would find. kernels: architectures that our kernels
    are built for.
    """

    driver: str | None = None
    cuda_image: str | None = None
    gpu: str | None = None
    device: str | None = None
    cards: int | None = None
    capability: tuple[int, int] | None = None
    compat_libs: bool | None = None
    torch_arch_list: tuple[str, ...] | None = None
    memory_total_mib: int | None = None
    memory_free_mib: int | None = None
    mem_available_mib: int | None = None
    gpu_processes: tuple[str, ...] | None = None
    wsl: bool | None = None
    unified_memory: bool | None = None
    docker_version: str | None = None
    compose_version: str | None = None
    nvidia_runtime: bool | None = None
    shm_mib: int | None = None
    tensor_parallel: int | None = None
    env: str | None = None
    env_fault: str | None = None
    model: str | None = None
    disk_free_gib: float | None = None
    download_gib: float | None = None
    cache_path: str | None = None
    cache_fault: str | None = None
    cache_uid: int | None = None
    cache_gid: int | None = None
    mode: str | None = None
    run_uid: int | None = None
    run_gids: tuple[int, ...] | None = None
    gated: bool | None = None
    hf_token: bool | None = None
    hf_status: int | None = None
    port: int | None = None
    port_holder: str | None = None
    port_own: bool | None = None
    host_memory_gib: float | None = None
    cpu_count: int | None = None
    max_jobs: int | None = None
    compile_cache_stale: bool | None = None
    vllm_version: str | None = None
    vllm_for_gpu: bool | None = None
    plugins: int | None = None
    patches: int | None = None
    kernels: tuple[str, ...] | None = None
    unused: tuple[str, ...] = field(default=())

    @property
    def card(self) -> str | None:
        """The card's name, None when there is none or nobody looked."""
        return self.gpu or None


def facts_from(given: Mapping[str, Any]) -> Facts:
    """Facts from parsed JSON. Keys that no check reads are kept in `unused`. Raises UsageError for a wrong type."""
    hints = get_type_hints(Facts)
    known = {entry.name for entry in fields(Facts)} - {"unused"}
    values = {key: _typed(key, value, hints[key]) for key, value in given.items() if key in known}
    return Facts(**values, unused=tuple(key for key in given if key not in known))


def _typed(key: str, value: Any, hint: Any) -> Any:
    if value is None:
        return "" if key == "gpu" else None
    option = next((kind for kind in get_args(hint) if kind is not types.NoneType), hint)
    if get_origin(option) is tuple:
        return _typed_tuple(key, value, get_args(option))
    if not isinstance(value, bool) and isinstance(value, int | float) and option in (int, float):
        # What counts or measures: nothing of a host is below 0 or without end (and NaN is no number).
        if 0 <= value <= _LARGEST and (option is float or value == int(value)):
            return option(value)
    elif type(value) is option:
        return value
    raise UsageError(f"fact {key}", seen=repr(value)[:80], expected=_KINDS[option])


_LARGEST = 2**62
_KINDS = {int: "a whole number, at least 0", float: "a number, at least 0", str: "a text", bool: "true or false"}


def _typed_tuple(key: str, value: Any, options: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, repeated = options[0], options[-1] is Ellipsis
    right = isinstance(value, list | tuple) and all(type(item) is kind for item in value)
    if right and (repeated or len(value) == len(options)):
        return tuple(value)
    words = "texts" if kind is str else "whole numbers"
    expected = f"a list of {words}" if repeated else f"a list of {len(options)} {words}"
    raise UsageError(f"fact {key}", seen=repr(value)[:80], expected=expected)
