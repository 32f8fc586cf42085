"""Who can compute a block's routed experts from the one copy of their weights, and the call that follows a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import build, nvfp4_moe
from qwen_nvfp4_serve.kernels.admission.table import Shape, Span
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, MoeDims, large_m

Capability = tuple[int, int]


class ExpertsCandidate(Protocol):
    """One way to compute the weighted sum of the elected experts.

    max_tokens: the largest M it takes, None for any. rounds_activations: it needs a checkpoint that quantizes them.
    one_scale: gate and up of an expert must have the same global scale. compiles: a library that may still be building
    its code at the first call.
    """

    @property
    def name(self) -> str: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def rounds_activations(self) -> bool: ...
    @property
    def one_scale(self) -> bool: ...
    @property
    def compiles(self) -> bool: ...

    def unavailable(self) -> str | None:
        """Why it cannot be tried on this machine at all, None if it can."""

    def supports(self, capability: Capability, shape: Shape) -> str | None:
        """Why it does not take such experts on such a card, None if it does."""

    def run(
        self, x: torch.Tensor, weights: ExpertWeights, ids: torch.Tensor, shares: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Fills y, contiguous bf16 [M, H], on the current stream.

        x: contiguous bf16 [M, H], M of at least 1. ids: int32 [M, k], an id outside 0..E-1 adds nothing.
        shares: float32 [M, k], the routing weights.
        """


class _Exact:
    """What both of ours share: BF16 activations as they come, a global scale for gate and for up."""

    rounds_activations = False
    one_scale = False


class SmallM(_Exact):
    """Our CUDA kernels: read the weights of the elected experts in place."""

    name = "qwen-experts-small-m"
    max_tokens: int | None = nvfp4_moe.KERNEL_TOKENS
    compiles = False

    def unavailable(self) -> str | None:
        """No library, no candidate."""
        return None if build.find(build.NVFP4_MOE) else "kernel library nvfp4_moe is not built"

    def supports(self, capability: Capability, shape: Shape) -> str | None:
        """As the op says."""
        dims = MoeDims(hidden=shape.k, intermediate=shape.n // 2, experts=shape.experts, top_k=shape.top_k)
        return nvfp4_moe.supports(capability, dims)

    def run(
        self, x: torch.Tensor, weights: ExpertWeights, ids: torch.Tensor, shares: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Two launches."""
        nvfp4_moe.launch.experts(x, weights, ids, shares, y)


class Grouped(_Exact):
    """Our grouped GEMM in Triton."""

    name = "qwen-experts-grouped"
    max_tokens: int | None = None
    compiles = True

    def unavailable(self) -> str | None:
        """No Triton, no candidate."""
        return large_m.unavailable()

    def supports(self, capability: Capability, shape: Shape) -> str | None:
        """As the grouped GEMM says."""
        return large_m.supports(capability, shape.k, shape.n // 2)

    def run(
        self, x: torch.Tensor, weights: ExpertWeights, ids: torch.Tensor, shares: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Six launches for each round of tokens."""
        large_m.experts(x, weights, ids, shares, y=y)


def default_candidates() -> tuple[ExpertsCandidate, ...]:
    """The one that compiles nothing first."""
    return (SmallM(), Grouped())


@cache
def servers() -> dict[str, ExpertsCandidate]:
    """The candidates by the name that a plan holds."""
    return {candidate.name: candidate for candidate in default_candidates()}


def tokens_of(spans: Sequence[Span], name: str) -> int:
    """The largest M up to which every call goes to `name`: 0 where another one begins."""
    first = spans[0] if spans else None
    return first.until if first is not None and first.candidate == name else 0


def run(  # noqa: PLR0917
    spans: Sequence[Span],
    x: torch.Tensor,
    weights: ExpertWeights,
    ids: torch.Tensor,
    shares: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Fills y as the plan says for x's number of tokens. Tensors as in `ExpertsCandidate.run`, any number of tokens."""
    if x.dtype is not torch.bfloat16 or x.shape != y.shape or not y.is_contiguous():
        raise UsageError("activations of experts", seen=f"{x.dtype} {tuple(x.shape)}", expected="bfloat16, as y")
    tokens = x.shape[0]
    if tokens:
        name = next(span.candidate for span in spans if tokens <= span.until)
        servers()[name].run(x.contiguous(), weights, ids.int().contiguous(), shares.float().contiguous(), y)
