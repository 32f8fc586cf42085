"""What would fit instead: one change at a time, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import GPUS
from qwen_nvfp4_serve.planner.plan import plan
from qwen_nvfp4_serve.planner.request import PlanRequest
from qwen_nvfp4_serve.planner.result import Plan
from qwen_nvfp4_serve.planner.sizing import LEAST_CONTEXT


def alternatives(refused: Plan) -> tuple[str, ...]:
    """Settings under which a plan that does not fit would, as sentences: a shorter context, then other changes."""
    found, largest = [], refused.largest_context
    if largest is not None and largest >= LEAST_CONTEXT and _fits(replace(refused.request, context=largest)):
        found.append(f"it fits with --context {largest}")
    found += [sentence for request, sentence in _changes(refused) if _fits(request)]
    return (*found, *_larger_machines(refused.request, is_hopeless=not found))


def _changes(refused: Plan) -> Iterator[tuple[PlanRequest, str]]:
    request = refused.request
    if request.vision:
        yield replace(request, vision=False), "it fits without the vision tower"
    if request.speculative_tokens:
        yield replace(request, speculative_tokens=0), "it fits with --speculative-tokens 0"
    if refused.max_num_seqs > 1:
        yield replace(request, seqs=1), "it fits with --seqs 1"
    if refused.max_num_batched_tokens > refused.block_size_tokens:
        tokens = refused.block_size_tokens
        yield (
            replace(request, batched_tokens=tokens, seqs=1),
            f"it fits with --max-num-batched-tokens {tokens} --seqs 1",
        )
    if request.kv_dtype == "bfloat16":
        yield replace(request, kv_dtype="fp8"), "it fits with --kv-cache-dtype fp8"
    if request.kv_pool_bytes is not None and request.gpu is not None:
        yield replace(request, kv_pool_bytes=None), "it fits with the pool left to the planner"


def _larger_machines(request: PlanRequest, *, is_hopeless: bool) -> list[str]:
    """More cards or larger ones; is_hopeless: no change on this card makes it fit."""
    if request.gpu is None:
        return []
    found = []
    cards = next(
        (n for n in (2, 4, 8) if n > request.tensor_parallel and _fits(replace(request, tensor_parallel=n))), None
    )
    if cards:
        found.append(f"it fits with --tensor-parallel {cards} on {cards} cards of the kind")
    idle = replace(request, free_bytes=None, total_bytes=None, gdn_prefill=None, attention=None, tensor_parallel=1)
    single = [gpu.name for gpu in GPUS if gpu.memory_bytes > request.gpu.memory_bytes and _fits(replace(idle, gpu=gpu))]
    if single:
        found.append(f"it fits on one card with --gpu {' or '.join(single)}")
    elif not cards and is_hopeless:
        found.append("no quantization or setting makes it fit on one card of the table: choose a smaller model")
    return found


def _fits(request: PlanRequest) -> bool:
    try:
        return plan(request).fits is True
    except UsageError:
        return False
