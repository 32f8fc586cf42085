"""A compiled model is loaded from the cache on CPU, instead of being compiled again at every start.

vLLM's loader ends with `finalize_loading`, a method of the artifact of its own backend. On a CPU the backend is plain
inductor, whose artifact is a function without that method and with nothing to finalize: the load fails and the model is
compiled anew, 23 s of a start on two cores.
"""

from __future__ import annotations

from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch, Platform


def tolerating(load: Any) -> Any:
    """torch.compiler.load_compiled_function whose result always has something to finalize."""

    def load_compiled_function(*arguments: Any, **named: Any) -> Any:
        loaded = load(*arguments, **named)
        compiled = loaded._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda _vllm_config: None
        return loaded

    return load_compiled_function


def with_tolerant_load(original: Any) -> Any:
    """_try_load_aot_compiled_fn that loads through `tolerating`."""

    def _try_load_aot_compiled_fn(model: Any, aot_compilation_path: str) -> Any:
        import torch

        load = torch.compiler.load_compiled_function
        torch.compiler.load_compiled_function = tolerating(load)
        try:
            return original(model, aot_compilation_path)
        finally:
            torch.compiler.load_compiled_function = load

    return _try_load_aot_compiled_fn


def _needed() -> Need:
    return Need(True, "vLLM cannot load what it compiled for a CPU, and compiles again at every start")


def _apply() -> None:
    from vllm.compilation import decorators

    parameters = ("model", "aot_compilation_path")
    seams.replace_function(decorators, "_try_load_aot_compiled_fn", with_tolerant_load, parameters)


PATCH = Patch(
    name="cpu-compiled-reload",
    platform=Platform.CPU,
    changes="_try_load_aot_compiled_fn takes a compiled function that has nothing to finalize",
    why="a warm start compiles the model again: `'function' object has no attribute 'finalize_loading'`",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/compilation/decorators.py",
    remove_when="vLLM loads the functions that its CPU backend compiled",
    needed=_needed,
    apply=_apply,
)
