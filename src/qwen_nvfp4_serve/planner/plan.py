"""Does it fit, and with which settings: a pure function from a request to a plan with reasons."""

from __future__ import annotations

from qwen_nvfp4_serve.planner.memory import explain, workspaces
from qwen_nvfp4_serve.planner.request import PlanRequest, check_request
from qwen_nvfp4_serve.planner.result import Plan, PlanBytes, Roofline
from qwen_nvfp4_serve.planner.roofline import tokens_per_s
from qwen_nvfp4_serve.planner.sizing import (
    LARGE_CARD_BYTES,
    LEAST_CONTEXT,
    Sizing,
    advice_for,
    plan_bytes,
    settle,
    utilization,
)
from qwen_nvfp4_serve.units import gib

SLOW_BATCHED_TOKENS = 12_288  # reported on an RTX 5090: prefill 27 times slower
FUSED_QUERY_TOKENS = 8  # query tokens that vLLM's fused GDN decode takes at once


def plan(request: PlanRequest) -> Plan:
    """The plan for `request`. Raises UsageError for values that no engine could be started with."""
    check_request(request)
    sizing = settle(request)
    layout, blocks, context = sizing.layout, sizing.blocks, sizing.context
    sizes = plan_bytes(sizing)
    fits, verdict = _verdict(sizing, sizes)
    return Plan(
        model=request.model.name,
        gpu=request.gpu.name if request.gpu else None,
        fits=fits,
        max_model_len=context,
        block_size_tokens=layout.block_tokens,
        blocks_per_request=layout.request_blocks(context),
        pool_blocks=blocks,
        pool_tokens=None if blocks is None else layout.pool_tokens(blocks, context),
        concurrency=None if blocks is None else round(blocks / layout.request_blocks(context), 2),
        max_num_seqs=sizing.seqs,
        max_num_batched_tokens=sizing.batched_tokens,
        gpu_memory_utilization=utilization(sizing),
        bytes=sizes,
        roofline_tokens_per_s=Roofline(
            at_4k=_rounded(tokens_per_s(request, 4096)), at_context=_rounded(tokens_per_s(request, context))
        ),
        notices=(*_changes(sizing), *_warnings(sizing)),
        reasons=(verdict, *_explanations(sizing)),
        pool_bytes=sizing.pool_bytes,
        largest_context=sizing.largest_context,
        layout=layout,
        request=request,
    )


def _verdict(sizing: Sizing, sizes: PlanBytes) -> tuple[bool | None, str]:
    pool, largest, context = sizing.pool_bytes, sizing.largest_context, sizing.context
    if pool is None or largest is None:
        return None, "no card was named, so whether it fits is not known: pass --gpu NAME, such as --gpu rtx-5090"
    budget, cards = sizing.budget, sizing.request.tensor_parallel
    if budget is not None and sizes.fixed + pool > budget.usable:
        parts = f"{gib(sizes.weights + sizes.embeddings)} of weights, {gib(sizes.fixed)} with all else"
        parts += f" and a pool of {gib(pool)}" if pool else ""
        share = " on each card" if cards > 1 else ""
        return False, f"does not fit: {parts}{share}, but {gib(budget.usable)} of {gib(budget.free)} free may be used"
    if largest < max(context, LEAST_CONTEXT):
        needed = gib(sizing.layout.bytes_for(context))
        return False, (
            f"does not fit: one request of {context:,} tokens takes {needed} of cache and the pool is {gib(pool)}; "
            f"the largest context that fits is {largest:,}"
        )
    taken, blocks = sizing.layout.request_blocks(context), sizing.layout.pool_blocks(pool)
    return True, f"fits: one request of {context:,} tokens takes {taken:,} of the pool's {blocks:,} blocks"


def _changes(sizing: Sizing) -> list[str]:
    """What differs from what was asked, each with its reason."""
    request, layout, changes = sizing.request, sizing.layout, []
    if request.batched_tokens is not None and sizing.batched_tokens > request.batched_tokens:
        why = "prefix caching stores state at block boundaries, and a shorter chunk would never reach one"
        if layout.block_tokens < sizing.batched_tokens:
            why = "one step of one sequence is longer"
        changes.append(
            f"max_num_batched_tokens raised from {request.batched_tokens:,} to {sizing.batched_tokens:,}: {why}"
        )
    if request.seqs is not None and sizing.seqs < request.seqs:
        changes.append(
            f"max_num_seqs lowered from {request.seqs:,} to {sizing.seqs:,}: a sequence takes at least "
            f"{layout.least_blocks} blocks, {layout.state_blocks} of them for its state, and a batched token"
        )
    most, largest = request.model.dims.max_context, sizing.largest_context
    if request.context is None and largest is not None and LEAST_CONTEXT <= largest < most:
        changes.append(f"max_model_len is {largest:,}, the largest that fits; the model allows {most:,}")
    return changes


def _warnings(sizing: Sizing) -> list[str]:
    """What is allowed and deserves a look."""
    request, warnings = sizing.request, []
    if not request.model.weights_read:
        warnings.append("shards could not be read: weights are estimated from config.json; see qwen-nvfp4 inspect")
    small = request.gpu is not None and request.gpu.memory_bytes < LARGE_CARD_BYTES
    if small and sizing.batched_tokens >= SLOW_BATCHED_TOKENS:
        warnings.append(
            f"max_num_batched_tokens {sizing.batched_tokens:,}: others saw an RTX 5090 27 times slower at 12,288"
        )
    if request.speculative_tokens and request.model.dims.is_moe:
        warnings.append("speculation on a mixture of experts was measured as a net loss in vLLM: compare it with 0")
    if request.speculative_tokens and request.model.has_mtp is None:
        warnings.append("nobody has looked whether this checkpoint ships its mtp.* tensors: run inspect first")
    if request.vision and request.model.dims.vision is None:
        warnings.append("this checkpoint has no vision tower")
    if 1 + request.speculative_tokens > FUSED_QUERY_TOKENS:
        warnings.append("more than 7 draft tokens leave vLLM's fused GDN decode for a slower path")
    if request.state == "bfloat16" and request.model.dims.state_dtype == "float32":
        warnings.append("state in bfloat16 is half the size, but the checkpoint asks for float32")
    if request.gdn_prefill == "flashinfer" and request.gpu is not None and request.prefill != "flashinfer":
        warnings.append(f"{request.gpu.title} has no FlashInfer GDN prefill: vLLM will use Triton's")
    return warnings


def _explanations(sizing: Sizing) -> list[str]:
    request, layout = sizing.request, sizing.layout
    caching = "on" if request.prefix_caching else "off"
    parts = workspaces(request, layout, sizing.seqs, sizing.batched_tokens)
    lines = [
        f"a block is {layout.block_tokens:,} tokens: {layout.kv_bytes_per_token:,} B of KV a token and layer must "
        f"cover {layout.state_bytes:,} B of recurrent state",
        f"a request takes {layout.attention_groups} block(s) for every {layout.block_tokens:,} tokens and "
        f"{layout.state_blocks} for its state (prefix caching {caching}, {request.prefill} GDN prefill, "
        f"{request.speculative_tokens} draft tokens)",
        f"workspaces are an estimate: {explain(parts)}",
    ]
    advice = advice_for(request)
    if advice:
        lines.append(f"recommended on this card: {advice.reason}")
    return lines


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
