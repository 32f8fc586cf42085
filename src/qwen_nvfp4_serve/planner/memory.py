"""What a card holds beside weights and cache: CUDA graphs, workspaces, and the part left alone.

The sizes here are estimates, and say so in their reasons; a start compares them with what the engine logs.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen_nvfp4_serve.planner.cache import CacheLayout
from qwen_nvfp4_serve.planner.request import PlanRequest
from qwen_nvfp4_serve.units import GIB, MIB, gib

# CUDA context, cuBLAS handles, loaded modules: what a process holds outside PyTorch's allocator.
CONTEXT_BYTES = 600 * MIB
NCCL_BYTES = 600 * MIB
# vLLM 0.33, envs.py, VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE; v1/attention/backends/flashinfer.py: 16 B an element.
FLASHINFER_WORKSPACE_BYTES = 394 * MIB
FLASHINFER_BYTES_PER_ELEMENT = 16
GDN_CHUNK_TOKENS = 64
GRAPH_BASE_BYTES = 128 * MIB
GRAPH_BYTES_PER_LAYER_AND_SIZE = 300 * 1024
VISION_WORKSPACE_BYTES = 1 * GIB
# Kept free for fragmentation and for what else appears on the card.
HEADROOM_SHARE = 0.02
UNIFIED_HEADROOM_SHARE = 0.10  # the host's own processes and page cache live in the same memory
HEADROOM_LEAST_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One named part of the working memory, in bytes."""

    name: str
    size_bytes: int


def capture_sizes(seqs: int, drafts: int, *, most: int = 512) -> int:
    """How many batch sizes vLLM 0.33 captures as graphs (config/vllm.py, `_set_cudagraph_sizes`)."""
    ceiling = min(2 * seqs * (1 + drafts), most)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16)]
    return sum(size <= ceiling for size in sizes)


def graph_bytes(request: PlanRequest, seqs: int) -> int:
    """Estimate of the CUDA graphs' memory; 0 when they are off, and on the CPU backend."""
    if request.eager or request.attention_backend == "cpu":
        return 0
    sizes = capture_sizes(seqs, request.speculative_tokens)
    return GRAPH_BASE_BYTES + sizes * request.model.dims.layers * GRAPH_BYTES_PER_LAYER_AND_SIZE


def workspaces(request: PlanRequest, layout: CacheLayout, seqs: int, batched_tokens: int) -> tuple[Workspace, ...]:
    """The working memory by name, largest use first come; every part is at least 0 bytes."""
    dims, cards = request.model.dims, request.tensor_parallel
    on_card = request.attention_backend != "cpu"
    parts = [("CUDA context", CONTEXT_BYTES + (NCCL_BYTES if cards > 1 else 0))] if on_card else []
    if request.attention_backend == "flashinfer":
        elements = batched_tokens * dims.q_heads // cards * dims.head_dim
        parts.append(("FlashInfer", max(FLASHINFER_WORKSPACE_BYTES, elements * FLASHINFER_BYTES_PER_ELEMENT)))
    heads = dims.gdn_value_heads // cards * dims.gdn_value_dim * dims.gdn_key_dim
    scratch = -(-batched_tokens // GDN_CHUNK_TOKENS) * heads * 2
    if request.prefill == "flashinfer" and request.prefix_caching:
        scratch += -(-batched_tokens // layout.block_tokens) * heads * 4
    parts.append(("GDN prefill", scratch))
    parts.append(("activations", _activation_bytes(request, batched_tokens)))
    parts.append(("sampling", 2 * 4 * seqs * (1 + request.speculative_tokens) * dims.vocab))
    if request.vision:
        parts.append(("vision inputs", VISION_WORKSPACE_BYTES))
    if request.workspace_bytes:
        parts.append(("our kernels", request.workspace_bytes))
    if request.extra_bytes:
        parts.append(("earlier shortfall", request.extra_bytes))
    return tuple(Workspace(name=name, size_bytes=size) for name, size in parts)


def _activation_bytes(request: PlanRequest, batched_tokens: int) -> int:
    """BF16 values alive at the widest point of a layer: the residual stream and the FFN's inputs and outputs."""
    dims, cards = request.model.dims, request.tensor_parallel
    if dims.is_moe:
        widest = dims.experts_per_token * (3 * dims.expert_intermediate // cards + 2 * dims.hidden)
    else:
        widest = 3 * dims.intermediate // cards
    gdn = 2 * (dims.gdn_key_heads * dims.gdn_key_dim + 2 * dims.gdn_value_heads * dims.gdn_value_dim) // cards
    return 2 * batched_tokens * (4 * dims.hidden + max(widest, gdn))


def headroom_bytes(total_bytes: int, *, unified: bool = False) -> int:
    """What is left alone on a card of `total_bytes`; more where the host shares the memory."""
    return max(HEADROOM_LEAST_BYTES, round(total_bytes * (UNIFIED_HEADROOM_SHARE if unified else HEADROOM_SHARE)))


def explain(parts: tuple[Workspace, ...]) -> str:
    """The parts in one line: `FlashInfer 0.38 GiB, …`."""
    return ", ".join(f"{part.name} {gib(part.size_bytes)}" for part in parts if part.size_bytes)
