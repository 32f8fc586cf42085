"""The mixture-of-experts block for NVFP4 experts at decode: up to 32 tokens, weights read in place, BF16 activations.

Two ops, both opaque to torch.compile, safe in a CUDA graph once they have run on its stream, and free of atomics in
what they compute: results repeat bit for bit, and a token's result does not depend on the tokens beside it.

    y = moe_experts(x, weights, topk_ids, topk_weights)            # routed experts alone; the router was elsewhere
    y = moe_block(x, router, weights, top_k=8,                     # logits, top-k, experts, shared expert, sum
                  shared=shared, shared_gate=shared_gate)

`weights` is an `ExpertWeights`: `prepare_experts` makes one of checkpoint tensors, `shared_from_linears` one with a
single expert of the two linear layers of a shared expert. `supports` says beforehand whether a card, dimensions and a
number of tokens are served; the ops raise UsageError for what is not. Beyond KERNEL_TOKENS tokens somebody else serves.
W4A4 checkpoints are read as W4A16: input scales are not used. A tensor parallel shard is a block of its own whose y are
partial sums. On a CPU the ops compute the definition (`reference`), slowly and for any number of tokens.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import cards, ops
from qwen_nvfp4_serve.kernels.nvfp4_moe import launch, reference
from qwen_nvfp4_serve.kernels.nvfp4_moe.launch import workspace_bytes
from qwen_nvfp4_serve.kernels.nvfp4_moe.weights import ExpertWeights, MoeDims, prepare_experts, shared_from_linears

__all__ = [
    "KERNEL_TOKENS",
    "ExpertWeights",
    "MoeDims",
    "moe_block",
    "moe_experts",
    "prepare_experts",
    "select_experts",
    "shared_from_linears",
    "supports",
    "workspace_bytes",
]

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))
KERNEL_TOKENS = 32
HIDDEN_MULTIPLE = 128
SMALL_INTERMEDIATE = 64
INTERMEDIATE_MULTIPLE = 128
EXPERTS_MULTIPLE = 8
EXPERTS_LIMIT = 512
TOP_K_LIMIT = 16


def supports(capability: tuple[int, int], dims: MoeDims, tokens: int = 1) -> str | None:
    """None if both ops serve `tokens` tokens of such a block on a card of this compute capability, else the reason.

    tokens: 1 to KERNEL_TOKENS. H a multiple of 128, each I a multiple of 128 or 64 itself, E a multiple of 8 up to 512,
    k up to 16.
    """
    wrong = (
        (
            capability not in CAPABILITIES,
            f"compute capability {capability[0]}.{capability[1]} is not among those compiled",
        ),
        (
            dims.hidden < 1 or bool(dims.hidden % HIDDEN_MULTIPLE),
            f"hidden size {dims.hidden} is not a multiple of {HIDDEN_MULTIPLE}",
        ),
        *(
            (
                not _fits(size),
                f"{name} size {size} is neither {SMALL_INTERMEDIATE} nor a multiple of {INTERMEDIATE_MULTIPLE}",
            )
            for name, size in (
                ("intermediate", dims.intermediate),
                ("shared intermediate", dims.shared_intermediate),
            )
            if size is not None
        ),
        (
            not 0 < dims.experts <= EXPERTS_LIMIT or bool(dims.experts % EXPERTS_MULTIPLE),
            f"{dims.experts} experts are not a multiple of {EXPERTS_MULTIPLE} up to {EXPERTS_LIMIT}",
        ),
        (
            not 0 < dims.top_k <= min(TOP_K_LIMIT, dims.experts),
            f"{dims.top_k} experts a token are not in 1..{min(TOP_K_LIMIT, dims.experts)}",
        ),
        (not 0 < tokens <= KERNEL_TOKENS, f"{tokens} tokens are not in 1..{KERNEL_TOKENS}"),
    )
    return next((reason for holds, reason in wrong if holds), None)


_supports = lru_cache(maxsize=1024)(supports)


def _fits(intermediate: int) -> bool:
    return intermediate == SMALL_INTERMEDIATE or (intermediate > 0 and intermediate % INTERMEDIATE_MULTIPLE == 0)


def moe_experts(
    x: torch.Tensor, weights: ExpertWeights, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The routed experts' weighted sum, bf16 [M, H].

    x: bf16 [M, H]. topk_ids: int32 [M, k], an id outside 0..E-1 adds nothing. topk_weights: float32 [M, k].
    Raises UsageError for shapes, dtypes or sizes outside `supports`.
    """
    result: torch.Tensor = moe_experts_op(x, weights.tensors(), topk_ids, topk_weights)
    return result


def moe_block(
    x: torch.Tensor,
    router: torch.Tensor,
    weights: ExpertWeights,
    *,
    top_k: int,
    renormalize: bool = True,
    shared: ExpertWeights | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole block, bf16 [M, H]: router, top-k, routed experts, plus sigmoid(shared_gate x) times the shared expert.

    x: bf16 [M, H]. router: bf16 [E, H]. shared: an ExpertWeights of one expert, or None for a block without one.
    shared_gate: bf16 [H] or [1, H], or None for a share of 1. Logits are rounded to BF16; the softmax and everything
    after it is float32. Raises UsageError for shapes, dtypes or sizes outside `supports`.
    """
    common = [] if shared is None else shared.tensors()
    result: torch.Tensor = moe_block_op(x, router, weights.tensors(), common, shared_gate, top_k, renormalize)
    return result


def select_experts(logits: torch.Tensor, top_k: int, *, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's election alone: weights float32 [M, k] and ids int32 [M, k]. logits: bf16 [M, E]."""
    if logits.device.type == "cpu":
        return reference.select_experts(logits, top_k, renormalize=renormalize)
    if logits.dtype is not torch.bfloat16 or logits.ndim != 2 or not logits.is_contiguous():
        raise UsageError("logits", seen=f"{logits.dtype} {tuple(logits.shape)}", expected="contiguous bfloat16 [M, E]")
    dims = MoeDims(hidden=128, intermediate=128, experts=logits.shape[1], top_k=top_k)
    _require_support(logits, dims)
    return launch.select(logits, top_k, renormalize)


def _moe_experts(
    x: torch.Tensor, weights: list[torch.Tensor], topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    experts = ExpertWeights.of(weights)
    _check_activations(x, experts)
    _check_choice(x, topk_ids, topk_weights)
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    if x.device.type == "cpu":
        return reference.moe_experts(x, experts, topk_ids, topk_weights, dtype=torch.float32).value.bfloat16()
    dims = MoeDims(
        hidden=experts.hidden, intermediate=experts.intermediate, experts=experts.experts, top_k=topk_ids.shape[1]
    )
    _require_support(x, dims)
    return launch.experts(_aligned(x), experts, topk_ids.contiguous(), topk_weights.contiguous())


def _moe_block(  # noqa: PLR0917
    x: torch.Tensor,
    router: torch.Tensor,
    weights: list[torch.Tensor],
    shared: list[torch.Tensor],
    shared_gate: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
) -> torch.Tensor:
    experts, common = ExpertWeights.of(weights), ExpertWeights.of(shared) if shared else None
    _check_activations(x, experts)
    _check_router(experts, router, common, shared_gate)
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    if x.device.type == "cpu":
        result = reference.moe_block(
            x,
            router,
            experts,
            top_k=top_k,
            renormalize=renormalize,
            shared=common,
            shared_gate=shared_gate,
            dtype=torch.float32,
        )
        return result.value.bfloat16()
    dims = MoeDims(
        hidden=experts.hidden,
        intermediate=experts.intermediate,
        experts=experts.experts,
        top_k=top_k,
        shared_intermediate=None if common is None else common.intermediate,
    )
    _require_support(x, dims)
    gate = None if shared_gate is None else shared_gate.reshape(-1)
    return launch.block(_aligned(x), router, experts, top_k=top_k, renormalize=renormalize, shared=common, gate=gate)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def _require_support(x: torch.Tensor, dims: MoeDims) -> None:
    reason = _supports(cards.capability(x.device), dims, x.shape[0])
    if reason is not None:
        raise UsageError("NVFP4 mixture of experts", seen=reason)


def _check_activations(x: torch.Tensor, weights: ExpertWeights) -> None:
    problem = weights.problem()
    if problem is not None:
        raise UsageError("expert weights", seen=problem)
    if x.dtype is not torch.bfloat16 or x.ndim != 2 or x.shape[1] != weights.hidden:
        raise UsageError("activations", seen=f"{x.dtype} {tuple(x.shape)}", expected=f"bfloat16 [M, {weights.hidden}]")


def _check_choice(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    if ids.dtype is not torch.int32 or ids.ndim != 2 or ids.shape[0] != x.shape[0]:
        raise UsageError("topk_ids", seen=f"{ids.dtype} {tuple(ids.shape)}", expected=f"int32 [{x.shape[0]}, k]")
    if weights.dtype is not torch.float32 or weights.shape != ids.shape:
        raise UsageError(
            "topk_weights", seen=f"{weights.dtype} {tuple(weights.shape)}", expected=f"float32 {tuple(ids.shape)}"
        )


def _check_router(
    weights: ExpertWeights, router: torch.Tensor, shared: ExpertWeights | None, gate: torch.Tensor | None
) -> None:
    expected = (weights.experts, weights.hidden)
    if router.dtype is not torch.bfloat16 or tuple(router.shape) != expected or not router.is_contiguous():
        raise UsageError(
            "router", seen=f"{router.dtype} {tuple(router.shape)}", expected=f"contiguous bfloat16 {expected}"
        )
    if shared is not None and (shared.problem() or shared.experts != 1 or shared.hidden != weights.hidden):
        raise UsageError(
            "the shared expert",
            seen=shared.problem() or f"{shared.experts} of hidden size {shared.hidden}",
            expected=f"one of hidden size {weights.hidden}",
        )
    if gate is None:
        return
    if gate.dtype is not torch.bfloat16 or gate.numel() != weights.hidden or not gate.is_contiguous():
        raise UsageError(
            "shared_gate", seen=f"{gate.dtype} {tuple(gate.shape)}", expected=f"contiguous bfloat16 [{weights.hidden}]"
        )


def _moe_experts_fake(
    x: torch.Tensor,
    weights: list[torch.Tensor],  # noqa: ARG001
    topk_ids: torch.Tensor,  # noqa: ARG001
    topk_weights: torch.Tensor,  # noqa: ARG001
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _moe_block_fake(  # noqa: PLR0917
    x: torch.Tensor,
    router: torch.Tensor,  # noqa: ARG001
    weights: list[torch.Tensor],  # noqa: ARG001
    shared: list[torch.Tensor],  # noqa: ARG001
    shared_gate: torch.Tensor | None,  # noqa: ARG001
    top_k: int,  # noqa: ARG001
    renormalize: bool,  # noqa: ARG001
) -> torch.Tensor:
    return x.new_empty(x.shape)


moe_experts_op = ops.register(
    "moe_experts",
    "(Tensor x, Tensor[] weights, Tensor topk_ids, Tensor topk_weights) -> Tensor",
    _moe_experts,
    _moe_experts_fake,
)
moe_block_op = ops.register(
    "moe_block",
    "(Tensor x, Tensor router, Tensor[] weights, Tensor[] shared, Tensor? shared_gate, int top_k, bool renormalize)"
    " -> Tensor",
    _moe_block,
    _moe_block_fake,
)
