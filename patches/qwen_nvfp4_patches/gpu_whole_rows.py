"""Compiled norms hold a row in registers instead of reading it twice, in pieces, one after the other.

Only under NVFP4_BACKEND=hybrid. torch's compiler does that for rows of up to 1,024 columns. At few tokens a kernel for
longer rows is a chain of waits for memory, six for 5,120 columns, and a decode step has two norms in each layer.
"""

from __future__ import annotations

from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.backend import nvfp4_backend
from qwen_nvfp4_patches.patch import Need, Patch, Platform

MOST_COLUMNS = 8192  # 32 values for each of 256 threads


def at_once(stock: Any) -> Any:
    """InductorChoices.should_use_persistent_reduction, also for contiguous rows of up to MOST_COLUMNS."""
    from torch._inductor import config
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        if stock(features, cooperative_reduction):
            return True
        if cooperative_reduction or not config.triton.persistent_reductions:
            return False
        if features.get_reduction_hint() is not ReductionHint.INNER:
            return False
        return bool(V.graph.sizevars.statically_known_leq(features.reduction_numel, MOST_COLUMNS))

    return should_use_persistent_reduction


def with_whole_rows(stock: Any) -> Any:
    """vLLM's last word on how a graph is compiled, with torch's choice of reductions replaced by then."""

    def set_inductor_config(config: dict[str, Any], compile_range: Any) -> None:
        from torch._inductor.choices import InductorChoices  # a second to load, in the one process that compiles

        name = "should_use_persistent_reduction"
        seams.replace_function(InductorChoices, name, at_once, parameters=("features", "cooperative_reduction"))
        stock(config, compile_range)

    return set_inductor_config


def _needed() -> Need:
    if nvfp4_backend() != "hybrid":
        return Need(False, f"NVFP4_BACKEND is {nvfp4_backend()}, which leaves the choice to vLLM")
    return Need(True, "NVFP4_BACKEND is hybrid")


def _apply() -> None:
    from vllm.compilation import compiler_interface

    seams.replace_function(
        compiler_interface, "set_inductor_config", with_whole_rows, parameters=("config", "compile_range")
    )


PATCH = Patch(
    name="gpu-whole-rows",
    platform=Platform.GPU,
    changes="a graph's reductions over contiguous rows of up to 8,192 columns are compiled as one block a row; only "
    "under NVFP4_BACKEND=hybrid",
    why="a norm of few tokens over 5,120 columns reads its row twice in three pieces each, one after the other",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/compilation/compiler_interface.py",
    remove_when="torch compiles such norms as one block a row, or vLLM has a kernel of its own for them",
    needed=_needed,
    apply=_apply,
)
