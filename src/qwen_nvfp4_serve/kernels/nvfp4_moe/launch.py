"""Launches on torch's current stream. No checks: the ops in `__init__` have made them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import cards
from qwen_nvfp4_serve.kernels.nvfp4_moe import binding
from qwen_nvfp4_serve.kernels.nvfp4_moe.weights import ExpertWeights, MoeDims

EMPTY_SLOT = -1  # csrc/route.cuh

# Where the router's logits meet, per device and stream: calls on one stream follow each other. Left empty by each.
_slots: dict[tuple[int, int], torch.Tensor] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the router decided. ids: int32 [M, k]. weights: float32 [M, k]. shared_share: float32 [M] or None."""

    ids: torch.Tensor
    weights: torch.Tensor
    shared_share: torch.Tensor | None


def workspace_bytes(dims: MoeDims, tokens: int) -> int:
    """Bytes that `moe_block` takes from torch's allocator during a call of `tokens` tokens, its result aside."""
    intermediates = dims.top_k * dims.intermediate + (dims.shared_intermediate or 0)
    return tokens * (2 * intermediates + 8 * dims.top_k + 4)


def intermediate_buffer(
    x: torch.Tensor, weights: ExpertWeights, top_k: int, shared: ExpertWeights | None
) -> torch.Tensor:
    """Room for h, bf16: M k rows of I, row token * k + rank, then the shared expert's M rows."""
    elements = top_k * weights.intermediate + (0 if shared is None else shared.intermediate)
    return x.new_empty(x.shape[0] * elements, dtype=torch.bfloat16)


def experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    y: torch.Tensor | None = None,
    *,
    shared: ExpertWeights | None = None,
    shared_share: torch.Tensor | None = None,
    intermediate: torch.Tensor | None = None,
    dependent: bool = True,
    octets: int = 0,
) -> torch.Tensor:
    """Fills and returns y, bf16 [M, H] with rows at multiples of 8 elements, by default a new one.

    x: bf16 [M, H], rows at multiples of 8 elements. shared_share: float32 [M], None for 1. intermediate: where h goes,
    by default into memory of this call alone. octets: of rows that a CTA of the first product takes, instead of the
    number chosen for M, for measurements.
    """
    y = x.new_empty(x.shape) if y is None else y
    h = intermediate_buffer(x, weights, ids.shape[1], shared) if intermediate is None else intermediate
    call = binding.MoeCall(
        routed=_experts(weights),
        shared=binding.Experts() if shared is None else _experts(shared),
        x=x.data_ptr(),
        y=y.data_ptr(),
        ids=ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        shared_share=None if shared_share is None else shared_share.data_ptr(),
        intermediate=h.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        m=x.shape[0],
        hidden=x.shape[1],
        top_k=ids.shape[1],
        dependent=int(dependent),
        octets=octets,
    )
    error = _enqueue("nvfp4_moe_experts", call, x.device)
    if error:
        binding.check(error, f"NVFP4 experts of {x.shape[0]} tokens, {weights.experts} of {weights.intermediate}")
    return y


def route(
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    renormalize: bool,
    shared_gate: torch.Tensor | None,
    *,
    logits: torch.Tensor | None = None,
    dependent: bool = True,
) -> Choice:
    """The election for x. logits: bf16 [M, E], filled with the router's product if given."""
    choice = _choice(x, top_k, with_share=shared_gate is not None)
    call = binding.RouteCall(
        x=x.data_ptr(),
        router=router.data_ptr(),
        shared_gate=None if shared_gate is None else shared_gate.data_ptr(),
        logits=None if logits is None else logits.data_ptr(),
        shared_share=None if choice.shared_share is None else choice.shared_share.data_ptr(),
        slots=_slots_of(x.device).data_ptr(),
        x_stride=x.stride(0),
        hidden=x.shape[1],
        dependent=int(dependent),
        **_election(choice, router.shape[0], renormalize),
    )
    _launch_route(call, x.device)
    return choice


def select(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids that the router would elect from these logits, bf16 [M, E]."""
    choice = _choice(logits, top_k, with_share=False)
    call = binding.RouteCall(logits=logits.data_ptr(), **_election(choice, logits.shape[1], renormalize))
    _launch_route(call, logits.device)
    return choice.weights, choice.ids


def block(
    x: torch.Tensor,
    router: torch.Tensor,
    weights: ExpertWeights,
    *,
    top_k: int,
    renormalize: bool,
    shared: ExpertWeights | None,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    """The whole block's y, bf16 [M, H]."""
    choice = route(x, router, top_k, renormalize, gate if shared is not None else None)
    return experts(x, weights, choice.ids, choice.weights, shared=shared, shared_share=choice.shared_share)


def _choice(like: torch.Tensor, top_k: int, *, with_share: bool) -> Choice:
    shape = (like.shape[0], top_k)
    return Choice(
        ids=like.new_empty(shape, dtype=torch.int32),
        weights=like.new_empty(shape, dtype=torch.float32),
        shared_share=like.new_empty(like.shape[0], dtype=torch.float32) if with_share else None,
    )


def _election(choice: Choice, experts: int, renormalize: bool) -> dict[str, int]:
    return {
        "ids": choice.ids.data_ptr(),
        "weights": choice.weights.data_ptr(),
        "m": choice.ids.shape[0],
        "top_k": choice.ids.shape[1],
        "experts": experts,
        "renormalize": int(renormalize),
    }


def _launch_route(call: binding.RouteCall, device: torch.device) -> None:
    error = _enqueue("nvfp4_moe_route", call, device)
    if error:
        binding.check(error, f"electing {call.top_k} of {call.experts} experts for {call.m} tokens")


def _enqueue(function: str, call: ctypes.Structure, device: torch.device) -> int:
    return cards.launch(getattr(binding.library(), function), device, ctypes.byref(call))


def _experts(weights: ExpertWeights) -> binding.Experts:
    pointers = [tensor.data_ptr() for tensor in weights.tensors()]
    return binding.Experts(*pointers, weights.experts, weights.intermediate)


def empty_slots(library: ctypes.CDLL, device: torch.device | str) -> torch.Tensor:
    """Slots as the router finds and leaves them.

    One launch at a time may have them: graphs captured on one stream must not be replayed on two at once, since either
    would empty what the other waits for.
    """
    return torch.full((library.nvfp4_moe_slots(),), EMPTY_SLOT, dtype=torch.int32, device=device)


def _slots_of(device: torch.device) -> torch.Tensor:
    key = cards.stream_key(device)
    if key not in _slots:
        # Memory first allocated inside a capture belongs to that graph, and its filling would be part of it.
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "the router's slots",
                seen="not there when a CUDA graph capture began",
                do="Run the block once on the capture's stream before capturing.",
            )
        _slots[key] = empty_slots(binding.library(), device)
    return _slots[key]
