"""Compiled kernels start while the kernel ahead of them still ends, on cards that have programmatic dependent launch.

Only under NVFP4_BACKEND=hybrid. torch.compile can write its Triton kernels so, but leaves it off; and it lets a kernel
that reads nothing of the one ahead of it go without waiting, for example one that fills a tensor. Beside kernels that
let the next one start before they have stored anything, as ours do, that is wrong: what comes after the one that did
not wait would wait for that one alone. So every compiled kernel waits here, before all else, and wherever a kernel has
ended all kernels before it have. Right after, it lets the next one start, which torch does behind the last load and,
where rows are read in a loop, at the very end: kernels of ours request their first weights meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.backend import nvfp4_backend
from qwen_nvfp4_patches.patch import Need, Patch, Platform

if TYPE_CHECKING:
    from collections.abc import Callable

OPTION = "triton.enable_pdl"


def waiting_first(stock: Any) -> Callable[[Any, Any], None]:
    """TritonKernel._filter_pdl, which leaves one wait and one release in a kernel's lines; both go first here."""

    def _filter_pdl(self: Any, code: Any) -> None:
        stock(self, code)
        if self._enable_pdl_codegen():
            marks = self.GDC_WAIT, self.GDC_LAUNCH
            marked = [isinstance(line, str) and any(mark in line for mark in marks) for line in code._lines]
            others = [line for line, left in zip(code._lines, marked, strict=True) if not left]
            code._lines = [*marks, *others]

    return _filter_pdl


def dependent(stock: Any) -> Any:
    """vLLM's last word on how a graph is compiled, with dependent launch on."""

    def set_inductor_config(config: dict[str, Any], compile_range: Any) -> None:
        from torch._inductor.codegen.triton import TritonKernel  # a second to load, in the one process that compiles

        seams.require_attribute(TritonKernel, "_enable_pdl_codegen")
        seams.require_attribute(TritonKernel, "GDC_WAIT")
        seams.require_attribute(TritonKernel, "GDC_LAUNCH")
        seams.replace_function(TritonKernel, "_filter_pdl", waiting_first, parameters=("self", "code"))
        stock(config, compile_range)
        config[OPTION] = True

    return set_inductor_config


def _needed() -> Need:
    if nvfp4_backend() != "hybrid":
        return Need(False, f"NVFP4_BACKEND is {nvfp4_backend()}, which leaves the choice to vLLM")
    return Need(True, "NVFP4_BACKEND is hybrid")


def _apply() -> None:
    from vllm.compilation import compiler_interface

    seams.replace_function(compiler_interface, "set_inductor_config", dependent, parameters=("config", "compile_range"))


PATCH = Patch(
    name="gpu-dependent-launch",
    platform=Platform.GPU,
    changes="set_inductor_config turns on programmatic dependent launch, and every kernel compiled with it waits for "
    "the kernel ahead before its first access and then lets the next one start; only under NVFP4_BACKEND=hybrid",
    why="hundreds of kernels of a microsecond in each decode step, and about as long between one and the next",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/compilation/compiler_interface.py",
    remove_when="vLLM compiles for dependent launch and torch has every such kernel wait",
    needed=_needed,
    apply=_apply,
)
