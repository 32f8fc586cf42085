"""How much fits on this machine: settings and facts -> the plan -> the numbers that vLLM is started with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Literal

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.gpus import GpuRow, match_gpu
from qwen_nvfp4_serve.host import Gpu
from qwen_nvfp4_serve.kernels.admission.shapes import workspace_bytes
from qwen_nvfp4_serve.launch import Capacity
from qwen_nvfp4_serve.planner import Plan, PlanModel, PlanRequest, alternatives, plan
from qwen_nvfp4_serve.room import free_memory_bytes
from qwen_nvfp4_serve.settings import Settings
from qwen_nvfp4_serve.units import GIB

# The planner names its command-line options; here they were knobs.
KNOBS = {
    "--context": "MAX_MODEL_LEN",
    "--seqs": "MAX_NUM_SEQS",
    "--max-num-batched-tokens": "MAX_NUM_BATCHED_TOKENS",
    "--speculative-tokens": "SPECULATIVE_TOKENS",
    "--gpu-memory-utilization": "GPU_MEMORY_UTILIZATION",
    "--kv-pool-gib": "CPU_KV_CACHE_GIB",
    "--tensor-parallel": "TENSOR_PARALLEL",
}
CPU_SEQS = 16  # measured on 2 cores: 16 requests together take 0.7 s, one by one 6.1 s


def tightest_card(settings: Settings, gpus: Sequence[Gpu]) -> Gpu:
    """Of the cards that the model is split over, the one with the least free memory, which the plan has to fit.

    gpus: those that are visible, in order. Raises UsageError when they are fewer than TENSOR_PARALLEL.
    """
    wanted = settings.tensor_parallel
    if wanted > len(gpus):
        raise UsageError(
            "TENSOR_PARALLEL",
            seen=str(wanted),
            expected=f"at most {len(gpus)}, the number of cards that are visible",
            do="Lower it, or name more cards in CUDA_VISIBLE_DEVICES.",
        )
    return min(
        map(_with_shared_memory, gpus[:wanted]), key=lambda gpu: inf if gpu.free_bytes is None else gpu.free_bytes
    )


def _with_shared_memory(gpu: Gpu) -> Gpu:
    """The card; of one whose memory is the host's, free is what the host could give: page cache is given back."""
    card = match_gpu(gpu.name)
    if card is None or not card.unified_memory:
        return gpu
    return replace(gpu, free_bytes=min(free_memory_bytes(), card.usable_bytes))


def plan_capacity(settings: Settings, model: PlanModel | None, gpu: Gpu | None, *, extra_bytes: int = 0) -> Capacity:
    """The plan's numbers for `model` on `gpu`, None for the CPU backend. extra_bytes: what earlier starts ran short of.

    Where nobody knows the model's dimensions yet, or the card is not in the table, vLLM decides by itself.
    Raises UsageError when MAX_MODEL_LEN does not fit, QwenNvfp4Error when the model fits with no context at all.
    """
    card = match_gpu(gpu.name) if gpu else None
    if model is None or (gpu is not None and card is None):
        missing = "the model is" if model is None else f"{gpu.name if gpu else 'this card'} is"
        return Capacity(notices=(f"{missing} not in the tables: vLLM chooses context and cache by itself",))
    request = cpu_request(settings, model) if gpu is None else _gpu_request(settings, model, gpu, card)
    try:
        planned = plan(replace(request, extra_bytes=extra_bytes))
    except UsageError as error:
        raise UsageError(
            KNOBS.get(error.what, error.what), seen=error.seen, expected=error.expected, do=error.do
        ) from None
    if planned.fits is False:
        raise _refusal(settings, planned)
    return _capacity(settings, planned, gpu)


def cpu_request(settings: Settings, model: PlanModel) -> PlanRequest:
    """What is planned for a run on the CPU backend."""
    return PlanRequest(
        model=model,
        context=settings.max_model_len,
        seqs=settings.max_num_seqs or CPU_SEQS,
        batched_tokens=settings.max_num_batched_tokens,
        kv_pool_bytes=int(settings.cpu_kv_cache_gib * GIB),
        kv_dtype=settings.kv_cache_dtype,
        prefix_caching=settings.prefix_caching,
        speculative_tokens=settings.speculative_tokens,
        gdn_prefill="triton",
        attention="cpu",
    )


def _gpu_request(settings: Settings, model: PlanModel, gpu: Gpu, card: GpuRow | None) -> PlanRequest:
    prefill: Literal["triton", "flashinfer"] | None = None if settings.gdn_prefill == "auto" else settings.gdn_prefill
    return PlanRequest(
        model=model,
        gpu=card,
        context=settings.max_model_len,
        seqs=settings.max_num_seqs,
        batched_tokens=settings.max_num_batched_tokens,
        kv_dtype=settings.kv_cache_dtype,
        prefix_caching=settings.prefix_caching,
        speculative_tokens=settings.speculative_tokens,
        tensor_parallel=settings.tensor_parallel,
        gdn_prefill=prefill,
        vision=settings.vision,
        eager=settings.enforce_eager,
        utilization=settings.gpu_memory_utilization,
        free_bytes=gpu.free_bytes,
        total_bytes=gpu.memory_bytes,
        workspace_bytes=_workspace_bytes(settings, model, card),
    )


def _workspace_bytes(settings: Settings, model: PlanModel, card: GpuRow | None) -> int:
    """Of our own linear kernels, where they are asked for."""
    if card is None or settings.nvfp4_backend != "hybrid" or settings.patches == "off":
        return 0
    return workspace_bytes(card.sm_count, moe=model.dims.is_moe)


def _refusal(settings: Settings, planned: Plan) -> QwenNvfp4Error:
    others = alternatives(planned)
    hint = f"What would work: {'; '.join(others)}." if others else None
    if settings.max_model_len is not None and planned.largest_context:
        largest = f"at most {planned.largest_context:,} here"
        return UsageError("MAX_MODEL_LEN", seen=f"{settings.max_model_len:,}", expected=largest, do=hint)
    return QwenNvfp4Error(f"{planned.model} {planned.reasons[0]}", do=hint)


def _capacity(settings: Settings, planned: Plan, gpu: Gpu | None) -> Capacity:
    notices = list(planned.notices)
    if settings.max_model_len is None and not any("max_model_len" in notice for notice in notices):
        notices.append(f"max_model_len is {planned.max_model_len:,} tokens, the model's own limit")
    return Capacity(
        max_model_len=planned.max_model_len,
        max_num_seqs=planned.max_num_seqs,
        max_num_batched_tokens=planned.max_num_batched_tokens,
        # On a CPU the engine process keeps 128 while its worker raises its own copy (vLLM 0.32), and caching misses.
        block_size_tokens=planned.block_size_tokens if gpu is None else None,
        gpu_memory_utilization=planned.gpu_memory_utilization,
        # Pinned, so that a start is repeatable: vLLM's own measurement of what is left differs from boot to boot.
        kv_cache_bytes=None if gpu is None else planned.pool_bytes,
        notices=tuple(notices),
        plan=planned,
    )
