"""The routed experts of a checkpoint that quantizes activations, through FlashInfer's grouped FP4 GEMM, for large M.

FlashInfer's fused mixtures of experts want the up rows of an expert before its gate rows and one global scale for both;
its grouped GEMM (`group_gemm_nvfp4_nt_groupwise`, flashinfer 0.7.2) takes packed weights and 128x4 scales as they are.
So the GEMM is the library's, and ours what lies around it: each pair's activations rounded with its expert's input
scale, SiLU(gate) * up with a global scale for each of the two, and the sum in a fixed order, without atomics.

Pairs lie expert after expert, each expert's places a multiple of four, which the library asks for. All sizes are known
on the host beforehand, so that a CUDA graph holds it. Compute capability 12.0 and 12.1 only. Needs Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels.nvfp4_moe import large_m
from qwen_nvfp4_serve.kernels.nvfp4_moe.weights import ExpertWeights

MAJOR = 12
K_MULTIPLE = 128
PLACES_MULTIPLE = 4
SCALE_ROWS = 128  # each expert's activations have scales in whole tiles of these
GROUPS_IN_STEP = 64

# (packed activations, packed weights, their scales, the weights' scales, first places, bf16 result)
Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def unavailable() -> str | None:
    """Why this cannot run on this machine at all, None if it can."""
    missing = None if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"
    return missing or large_m.unavailable()


def supports(capability: tuple[int, int], hidden: int, intermediate: int) -> str | None:
    """None if experts of these dimensions are served on a card of this compute capability, else the reason."""
    if capability[0] != MAJOR:
        return f"compute capability {capability[0]}.{capability[1]} is not {MAJOR}.x"
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size < 1 or size % K_MULTIPLE:
            return f"{name} size {size} is not a multiple of {K_MULTIPLE}"
    return None


def tokens_in_round(top_k: int, hidden: int, intermediate: int) -> int:
    """The most tokens that large_m.WORKSPACE_BYTES suffice for, at least one, the experts' padding aside."""
    pair = (hidden + intermediate) * 9 // 16 + 4 * intermediate + 2 * hidden
    return max(1, large_m.WORKSPACE_BYTES // (top_k * pair))


def experts(  # noqa: PLR0917
    x: torch.Tensor,
    weights: ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    input_scales: torch.Tensor,
    y: torch.Tensor,
    *,
    gemm: Gemm | None = None,
) -> None:
    """Fills y, contiguous [M, H] in x's dtype.

    x: contiguous bf16 [M, H], M of at least 1. topk_ids: int32 [M, k], an id outside 0..E-1 adds nothing. topk_weights:
    float32 [M, k]. input_scales: float32 [2, E], multipliers, of the activations before each of the two products.
    Raises UsageError for input scales of another shape.
    """
    if input_scales.dtype is not torch.float32 or tuple(input_scales.shape) != (2, weights.experts):
        seen = f"{input_scales.dtype} {tuple(input_scales.shape)}"
        raise UsageError("input scales of experts", seen=seen, expected=f"float32 [2, {weights.experts}]")
    tokens, top_k = topk_ids.shape
    most = tokens_in_round(top_k, weights.hidden, weights.intermediate)
    for first in range(0, tokens, most):
        part = slice(first, min(first + most, tokens))
        rows, ids, shares = (tensor[part].contiguous() for tensor in (x, topk_ids, topk_weights))
        _round(rows, ids, shares, weights, input_scales, y[part], gemm or flashinfer_gemm)


def _round(  # noqa: PLR0917
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    weights: ExpertWeights,
    input_scales: torch.Tensor,
    y: torch.Tensor,
    gemm: Gemm,
) -> None:
    kernels = _kernels()
    tokens, top_k = ids.shape
    hidden, width = weights.hidden, weights.intermediate
    blocks = large_m.deal(ids, weights.experts, PLACES_MULTIPLE)
    count, first, second = blocks.expert.numel(), input_scales[0], input_scales[1]
    places = count * PLACES_MULTIPLE
    packed, scales = _rounded(places, hidden, weights.experts, x.device)
    kernels.round_activations[(count, _steps(hidden))](
        x, blocks.order, blocks.expert, blocks.starts, first, packed, scales, top_k, hidden, GROUPS=GROUPS_IN_STEP
    )
    gate_up = torch.empty(places, 2 * width, dtype=x.dtype, device=x.device)
    gemm(packed, weights.w13, scales, weights.w13_scales.view(torch.uint8), blocks.starts, gate_up)
    packed, scales = _rounded(places, width, weights.experts, x.device)
    kernels.round_swiglu[(count, _steps(width))](
        gate_up,
        blocks.expert,
        blocks.starts,
        weights.gate_scale,
        weights.up_scale,
        first,
        second,
        packed,
        scales,
        width,
        GROUPS=GROUPS_IN_STEP,
    )
    output = torch.empty(places, hidden, dtype=x.dtype, device=x.device)
    gemm(packed, weights.w2, scales, weights.w2_scales.view(torch.uint8), blocks.starts, output)
    kernels.add_up_places[(tokens, -(-hidden // large_m.COLUMNS_IN_STEP))](
        output,
        blocks.places,
        ids,
        shares,
        weights.down_scale,
        second,
        y,
        weights.experts,
        hidden,
        TOP_K=top_k,
        WIDTH=large_m.COLUMNS_IN_STEP,
    )


def _rounded(places: int, columns: int, experts_count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for packed activations, uint8 [places, columns / 2], and their scales, uint8 [rows, columns / 16]."""
    rows = (places + experts_count * (SCALE_ROWS - 1)) // SCALE_ROWS * SCALE_ROWS + SCALE_ROWS
    packed = torch.empty(places, columns // 2, dtype=torch.uint8, device=device)
    return packed, torch.empty(rows, columns // 16, dtype=torch.uint8, device=device)


def _steps(columns: int) -> int:
    return -(-columns // 16 // GROUPS_IN_STEP)


def flashinfer_gemm(  # noqa: PLR0917
    packed: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out[place] = activations[place] times the weight of its expert, in codes and block scales alone."""
    _flashinfer().group_gemm_nvfp4_nt_groupwise(packed, weight, scales, weight_scales, starts, out=out)


@cache
def _flashinfer() -> ModuleType:
    return importlib.import_module("flashinfer.gemm")


@cache
def _kernels() -> ModuleType:
    from qwen_nvfp4_serve.kernels.nvfp4_moe import large_m_w4a4_kernels

    return large_m_w4a4_kernels
