"""The definition of the mixture-of-experts block, in plain PyTorch, on any device and for any number of tokens.

For one token x, with the elected experts e_j and their weights c_j, j = 0..k-1:
    h_j = bf16(silu(gate_scale W_gate x) * (up_scale W_up x))
    y   = bf16(sum_j c_j down_scale W_down h_j + sigmoid(s x) * shared(x))
where nothing but h_j and y is rounded to BF16, W is E2M1 code times block scale, and an expert id outside 0..E-1 adds
nothing. The router's logits are rounded to BF16, as a BF16 linear layer rounds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qwen_nvfp4_serve.kernels.nvfp4 import BLOCK, dequantize_nvfp4, unswizzle_scales
from qwen_nvfp4_serve.kernels.nvfp4_moe.weights import ExpertWeights

# Of |x| |W|: what float32 sums may be off, in any order, over a few thousand products (as for the linear kernel).
SUM_ERROR = 1e-5
BF16_ERROR = 2.0**-8


@dataclass(frozen=True, slots=True)
class Bounded:
    """Values and the largest error allowed for each element, of one shape and dtype."""

    value: torch.Tensor
    bound: torch.Tensor


def router_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """x W^T rounded once to BF16: [M, E]. x: bf16 [M, H]. router: bf16 [E, H]."""
    return (x.double() @ router.double().T).bfloat16()


def select_experts(logits: torch.Tensor, top_k: int, *, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 [M, k] and ids int32 [M, k] of the largest probabilities, largest first, ties to the lower id.

    logits: [M, E]. Probabilities are a softmax in float32, those that are not finite count as zero; with `renormalize`
    the elected ones are divided by their sum, unless that is zero (vLLM's csrc/moe/topk_softmax_kernels.cu).
    """
    values = logits.float()
    shifted = torch.exp(values - values.amax(-1, keepdim=True))
    probability = (shifted * shifted.sum(-1, keepdim=True).reciprocal()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    ordered, ids = torch.sort(probability, dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k]
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, torch.ones_like(total))
    return weights.contiguous(), ids[:, :top_k].int().contiguous()


def intermediate(x: torch.Tensor, weights: ExpertWeights, ids: torch.Tensor, *, dtype: torch.dtype) -> Bounded:
    """h [M, k, I] in `dtype`, not yet rounded; the bound holds for a BF16 result. Zeros for ids out of range."""
    activations = x.to(dtype)
    shape = (*ids.shape, weights.intermediate)
    value, bound = torch.zeros(shape, dtype=dtype, device=x.device), torch.zeros(shape, dtype=dtype, device=x.device)
    for expert, token, rank in _elected(ids, weights.experts):
        rows = activations[token]
        gate_weight, up_weight = _w13(weights, expert, dtype).chunk(2)
        gate, up = rows @ gate_weight.T, rows @ up_weight.T
        gate_error, up_error = (SUM_ERROR * (rows.abs() @ w.abs().T) for w in (gate_weight, up_weight))
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        slope = (sigmoid * (1 + gate * (1 - sigmoid))).abs() + gate_error  # the slope's own slope is at most 1/2
        h = silu * up
        value[token, rank] = h
        error = slope * gate_error * (up.abs() + up_error) + silu.abs() * up_error
        bound[token, rank] = h.abs() * BF16_ERROR + error * (1 + BF16_ERROR)
    return Bounded(value, bound)


def combine(
    h: torch.Tensor,
    weights: ExpertWeights,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    h_bound: torch.Tensor | None = None,
) -> Bounded:
    """sum_j c_j W_down h_j as [M, H] in h's dtype; the bound holds for a BF16 result from an h off by up to h_bound.

    h: [M, k, I]. ids: [M, k]. topk_weights: float32 [M, k].
    """
    dtype = h.dtype
    y = torch.zeros(ids.shape[0], weights.hidden, dtype=dtype, device=h.device)
    error = torch.zeros_like(y)
    for expert, token, rank in _elected(ids, weights.experts):
        w2 = _w2(weights, expert, dtype)
        share = topk_weights[token, rank].to(dtype).unsqueeze(-1)
        rows = h[token, rank]
        allowed = SUM_ERROR * rows.abs() if h_bound is None else SUM_ERROR * rows.abs() + h_bound[token, rank]
        y.index_add_(0, token, share * (rows @ w2.T))
        error.index_add_(0, token, share.abs() * (allowed @ w2.abs().T))
    return Bounded(y, y.abs() * BF16_ERROR + error * (1 + BF16_ERROR))


def moe_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
) -> Bounded:
    """The routed experts' sum [M, H] in `dtype`, not yet rounded, and what a BF16 result may be off.

    The bound is rigorous and therefore wide: h may round the other way. To see single wrong elements compare h with
    `intermediate`, and y with `combine` of that same h.
    """
    h = intermediate(x, weights, topk_ids, dtype=dtype)
    rounded = h.value.bfloat16().to(dtype)
    return combine(rounded, weights, topk_ids, topk_weights, h_bound=h.bound + h.value.abs() * BF16_ERROR)


def shared_share(x: torch.Tensor, shared_gate: torch.Tensor, *, dtype: torch.dtype) -> Bounded:
    """sigmoid(s x) [M, 1]. x: [M, H]. shared_gate: [H] or [1, H]. The bound is for float32."""
    gate = shared_gate.reshape(-1, 1).to(dtype)
    share = torch.sigmoid(x.to(dtype) @ gate)
    return Bounded(share, SUM_ERROR * (x.to(dtype).abs() @ gate.abs()) / 4 + SUM_ERROR * share)


def add_shared(routed: Bounded, x: torch.Tensor, shared: ExpertWeights, shared_gate: torch.Tensor | None) -> Bounded:
    """The routed sum plus the shared expert, weighted with its gate if it has one."""
    dtype = routed.value.dtype
    ids = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
    ones = torch.ones(x.shape[0], 1, dtype=dtype, device=x.device)
    share = Bounded(ones, 0 * ones) if shared_gate is None else shared_share(x, shared_gate, dtype=dtype)
    alone = moe_experts(x, shared, ids, ones, dtype=dtype)
    y = routed.value + share.value * alone.value
    # Each part's bound counts its own rounding to BF16; only the sum is rounded.
    unrounded = routed.bound - routed.value.abs() * BF16_ERROR
    error = unrounded + share.value * (alone.bound - alone.value.abs() * BF16_ERROR) + share.bound * alone.value.abs()
    return Bounded(y, y.abs() * BF16_ERROR + error * (1 + BF16_ERROR))


def moe_block(
    x: torch.Tensor,
    router: torch.Tensor,
    weights: ExpertWeights,
    *,
    top_k: int,
    renormalize: bool = True,
    shared: ExpertWeights | None = None,
    shared_gate: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Bounded:
    """The whole block [M, H] in `dtype`, not yet rounded, and what a BF16 result from the same election may be off."""
    topk_weights, ids = select_experts(router_logits(x, router), top_k, renormalize=renormalize)
    routed = moe_experts(x, weights, ids, topk_weights, dtype=dtype)
    return routed if shared is None else add_shared(routed, x, shared, shared_gate)


def _elected(ids: torch.Tensor, experts: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each elected expert once, with the tokens and ranks that elected it."""
    for expert in ids.unique().tolist():
        if 0 <= expert < experts:
            token, rank = (ids == expert).nonzero(as_tuple=True)
            yield expert, token, rank


def _w13(weights: ExpertWeights, expert: int, dtype: torch.dtype) -> torch.Tensor:
    half = weights.intermediate
    scale = torch.stack((weights.gate_scale[expert], weights.up_scale[expert])).repeat_interleave(half)
    block = unswizzle_scales(weights.w13_scales[expert], 2 * half, weights.hidden // BLOCK)
    return dequantize_nvfp4(weights.w13[expert], block, scale, dtype=dtype)


def _w2(weights: ExpertWeights, expert: int, dtype: torch.dtype) -> torch.Tensor:
    block = unswizzle_scales(weights.w2_scales[expert], weights.hidden, weights.intermediate // BLOCK)
    return dequantize_nvfp4(weights.w2[expert], block, weights.down_scale[expert], dtype=dtype)
