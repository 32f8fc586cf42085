"""The most tokens per second that a card's memory bandwidth allows one stream: bytes read per token, nothing else."""

from __future__ import annotations

from qwen_nvfp4_serve.planner.cache import DTYPE_BYTES, gdn_state_bytes
from qwen_nvfp4_serve.planner.request import PlanRequest


def bytes_per_token(request: PlanRequest, context: int) -> int:
    """Bytes that one decode step of one stream moves on one card: weights, KV of `context`, state read and written."""
    dims, cards = request.model.dims, request.tensor_parallel
    kv_heads = max(1, dims.kv_heads // cards)
    kv = dims.attention_layers * 2 * kv_heads * dims.head_dim * DTYPE_BYTES[request.kv_dtype] * context
    state = dims.gdn_layers * gdn_state_bytes(dims, DTYPE_BYTES[request.state], cards=cards)
    return request.model.weights.on_card(cards).per_token + kv + 2 * state


def tokens_per_s(request: PlanRequest, context: int) -> float | None:
    """The bound without speculation; None without a card."""
    if request.gpu is None:
        return None
    return request.gpu.bandwidth_bytes_per_s / bytes_per_token(request, context)
