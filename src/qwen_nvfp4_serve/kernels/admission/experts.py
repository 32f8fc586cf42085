"""Who can compute a block's routed experts from the one copy of their weights, and the call that follows a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import build, nvfp4_moe
from qwen_nvfp4_serve.kernels.admission.table import Shape, Span
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, MoeDims, large_m, large_m_w4a4

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCall:
    """What is to be computed, from M tokens, at least one.

    x: contiguous bf16 [M, H]. ids: int32 [M, k], an id outside 0..E-1 adds nothing. shares: float32 [M, k], the routing
    weights. y: contiguous bf16 [M, H], to be filled. input_scales: float32 [2, E], global multipliers of activations
    before each of the two products; None for a weight-only checkpoint.
    """

    x: torch.Tensor
    weights: ExpertWeights
    ids: torch.Tensor
    shares: torch.Tensor
    y: torch.Tensor
    input_scales: torch.Tensor | None = None


class ExpertsCandidate(Protocol):
    """One way to compute the weighted sum of the elected experts.

    max_tokens: the largest M it takes, None for any. rounds_activations: it needs a checkpoint that quantizes them.
    compiles: a library that may still be building its code at the first call.
    """

    @property
    def name(self) -> str: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def rounds_activations(self) -> bool: ...
    @property
    def compiles(self) -> bool: ...

    def unavailable(self) -> str | None:
        """Why it cannot be tried on this machine at all, None if it can."""

    def supports(self, capability: Capability, shape: Shape) -> str | None:
        """Why it does not take such experts on such a card, None if it does."""

    def run(self, call: ExpertsCall) -> None:
        """Fills the call's y on the current stream."""


class _Exact:
    """What both of ours share: BF16 activations as they come."""

    rounds_activations = False


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

    def run(self, call: ExpertsCall) -> None:
        """Two launches."""
        nvfp4_moe.launch.experts(call.x, call.weights, call.ids, call.shares, call.y)


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

    def run(self, call: ExpertsCall) -> None:
        """Six launches for each round of tokens."""
        large_m.experts(call.x, call.weights, call.ids, call.shares, y=call.y)


class FlashInferGrouped:
    """FlashInfer's grouped FP4 GEMM between our own kernels, for W4A4."""

    name = "flashinfer-experts-grouped"
    max_tokens: int | None = None
    rounds_activations = True
    compiles = True

    def unavailable(self) -> str | None:
        """No package, no candidate."""
        return large_m_w4a4.unavailable()

    def supports(self, capability: Capability, shape: Shape) -> str | None:
        """As the GEMM says."""
        return large_m_w4a4.supports(capability, shape.k, shape.n // 2)

    def run(self, call: ExpertsCall) -> None:
        """Five launches of ours and two GEMMs for each round of tokens."""
        if call.input_scales is None:
            raise UsageError(f"{self.name} on weight-only experts", expected="input scales")
        large_m_w4a4.experts(call.x, call.weights, call.ids, call.shares, call.input_scales, call.y)


def default_candidates() -> tuple[ExpertsCandidate, ...]:
    """The one that compiles nothing first, and last the one that may compile for minutes."""
    return (SmallM(), Grouped(), FlashInferGrouped())


@cache
def servers() -> dict[str, ExpertsCandidate]:
    """The candidates by the name that a plan holds."""
    return {candidate.name: candidate for candidate in default_candidates()}


def tokens_of(spans: Sequence[Span], name: str) -> int:
    """The largest M up to which every call goes to `name`: 0 where another one begins."""
    first = spans[0] if spans else None
    return first.until if first is not None and first.candidate == name else 0


def warm_up(spans: Sequence[Span], weights: ExpertWeights, top_k: int, input_scales: torch.Tensor | None) -> None:
    """Compiles and allocates what calls of any number of tokens will need: a CUDA graph capture allows neither."""
    device = weights.w13.device
    x = torch.zeros(1, weights.hidden, dtype=torch.bfloat16, device=device)
    call = ExpertsCall(
        x=x,
        weights=weights,
        ids=torch.arange(top_k, dtype=torch.int32, device=device).unsqueeze(0),
        shares=torch.ones(1, top_k, device=device, dtype=torch.float32),
        y=torch.empty_like(x),
        input_scales=input_scales,
    )
    for name in dict.fromkeys(span.candidate for span in spans):
        if name == Grouped.name:
            large_m.warm_up(weights, top_k)
        else:
            servers()[name].run(call)


def run(spans: Sequence[Span], call: ExpertsCall) -> None:
    """Fills the call's y as the plan says for its number of tokens, of which there may be none.

    x may have any strides here, ids any integer and shares any floating dtype.
    """
    x, y = call.x, call.y
    if x.dtype is not torch.bfloat16 or x.shape != y.shape or not y.is_contiguous():
        raise UsageError("activations of experts", seen=f"{x.dtype} {tuple(x.shape)}", expected="bfloat16, as y")
    if x.shape[0] == 0:
        return
    name = next(span.candidate for span in spans if x.shape[0] <= span.until)
    x, ids, shares = x.contiguous(), call.ids.int().contiguous(), call.shares.float().contiguous()
    if x is not call.x or ids is not call.ids or shares is not call.shares:
        call = replace(call, x=x, ids=ids, shares=shares)
    servers()[name].run(call)
