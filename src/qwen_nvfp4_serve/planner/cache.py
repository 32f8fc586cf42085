"""The engine's cache in blocks: how vLLM 0.33 sizes a block, groups the layers and counts tokens.

Read from vLLM 0.33.0: platforms/interface.py (`_align_hybrid_block_size`), v1/core/kv_cache_planning.py (grouping, the
reserved null block), v1/core/kv_cache_utils.py (token count), v1/kv_cache_interface.py (blocks of a Mamba layer) and
model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py (FlashInfer's prefill checkpoints).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from qwen_nvfp4_serve.dims import Dims
from qwen_nvfp4_serve.gpus import GpuRow
from qwen_nvfp4_serve.planner.request import Attention, PlanRequest

DTYPE_BYTES = {"fp8": 1, "bfloat16": 2, "float32": 4}
# Smallest page of each attention backend, in tokens; a block is a multiple of it (get_supported_kernel_block_sizes).
# The CPU platform starts from 128 (platforms/cpu.py, update_block_size_for_backend).
KERNEL_BLOCK_TOKENS: dict[Attention, int] = {"flashinfer": 16, "flash-attn": 16, "triton": 16, "cpu": 128}
FA4_HEAD_256_BLOCK_TOKENS = 128  # v1/attention/backends/fa_utils.py, FA4_HD256_PAGE_SIZE: SM100 and SM110
FLASHINFER_GDN_CHECKPOINT_TOKENS = 64  # v1/attention/backends/gdn_attn.py, FLASHINFER_GDN_CHECKPOINT_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The cache of one card. A page is one block of one layer; a block holds a page for each layer of its group.

    block_tokens: tokens in a block of an attention group. block_bytes: a block over its layers. attention_groups,
    gdn_groups: block tables of each kind. state_blocks_per_group: blocks that one request's state takes in each GDN
    group. kv_bytes_per_token, state_bytes: of one layer (state: convolution and recurrent state of one sequence).
    """

    block_tokens: int
    block_bytes: int
    attention_groups: int
    gdn_groups: int
    state_blocks_per_group: int
    kv_bytes_per_token: int
    state_bytes: int

    @property
    def state_blocks(self) -> int:
        """Blocks that the recurrent state of one request takes, whatever its length."""
        return self.gdn_groups * self.state_blocks_per_group

    @property
    def least_blocks(self) -> int:
        """Blocks that a request takes at least: its state, and one block in each attention group."""
        return self.state_blocks + self.attention_groups

    def request_blocks(self, context: int) -> int:
        """Blocks that one request of `context` tokens takes."""
        return _ceil_div(context, self.block_tokens) * self.attention_groups + self.state_blocks

    def pool_blocks(self, pool_bytes: int) -> int:
        """Blocks that a pool of `pool_bytes` is cut into."""
        return max(0, pool_bytes) // self.block_bytes

    def bytes_for(self, context: int) -> int:
        """The smallest pool that admits one request of `context` tokens; one block more is vLLM's null block."""
        return (self.request_blocks(context) + 1) * self.block_bytes

    def largest_context(self, pool_blocks: int) -> int:
        """The longest request, in tokens, that a pool admits: vLLM keeps one block back as the null block."""
        for_tokens = (pool_blocks - 1 - self.state_blocks) // self.attention_groups
        return max(0, for_tokens) * self.block_tokens

    def pool_tokens(self, pool_blocks: int, context: int) -> int:
        """The token count that the engine logs: requests of `context` tokens that fit, times `context`."""
        # The same float expression as vLLM's, so that the last digit agrees.
        return int(pool_blocks / self.request_blocks(context) * context)

    def most_seqs(self, pool_blocks: int) -> int:
        """Sequences whose state and first block fit at once."""
        return max(0, pool_blocks - 1) // self.least_blocks


def cache_layout(request: PlanRequest) -> CacheLayout:
    """The cache layout for the request's model, precision, backends and parallelism."""
    dims, cards = request.model.dims, request.tensor_parallel
    drafts = request.speculative_tokens
    kv_bytes = 2 * max(1, dims.kv_heads // cards) * dims.head_dim * DTYPE_BYTES[request.kv_dtype]
    state_bytes = gdn_state_bytes(dims, DTYPE_BYTES[request.state], cards=cards, drafts=drafts)
    block_tokens = _block_tokens(request, kv_bytes, state_bytes)
    attention_layers = dims.attention_layers + (dims.mtp_layers if drafts else 0)
    group_layers = _group_layers(attention_layers, dims.gdn_layers)
    attention_groups = _ceil_div(attention_layers, group_layers)
    gdn_groups = _ceil_div(dims.gdn_layers, group_layers)
    # Layers are dealt out evenly, and the widest group sets the bytes of a block.
    widest = max(_ceil_div(attention_layers, attention_groups), _ceil_div(dims.gdn_layers, gdn_groups))
    return CacheLayout(
        block_tokens=block_tokens,
        block_bytes=widest * block_tokens * kv_bytes,
        attention_groups=attention_groups,
        gdn_groups=gdn_groups,
        state_blocks_per_group=_state_blocks_per_group(request),
        kv_bytes_per_token=kv_bytes,
        state_bytes=state_bytes,
    )


def gdn_state_bytes(dims: Dims, state_dtype_bytes: int, *, cards: int = 1, drafts: int = 0) -> int:
    """Bytes of one layer's state for one sequence on one card: BF16 convolution state and recurrent state."""
    channels = 2 * dims.gdn_key_heads * dims.gdn_key_dim + dims.gdn_value_heads * dims.gdn_value_dim
    conv = channels // cards * (dims.conv_kernel - 1 + drafts) * 2
    return conv + dims.gdn_value_heads // cards * dims.gdn_value_dim * dims.gdn_key_dim * state_dtype_bytes


def kernel_block_tokens(attention: Attention, gpu: GpuRow | None, head_dim: int) -> int:
    """Tokens in the smallest block that the attention backend's kernels read."""
    if attention == "flash-attn" and gpu is not None and gpu.capability[0] in (10, 11) and head_dim == 256:
        return FA4_HEAD_256_BLOCK_TOKENS
    return KERNEL_BLOCK_TOKENS[attention]


def _has_checkpoints(request: PlanRequest) -> bool:
    # FlashInfer's GDN prefill writes states inside a chunk; it does so only where blocks of state are cached.
    return request.prefix_caching and request.prefill == "flashinfer"


def _block_tokens(request: PlanRequest, kv_bytes: int, state_bytes: int) -> int:
    kernel = kernel_block_tokens(request.attention_backend, request.gpu, request.model.dims.head_dim)
    step = lcm(kernel, FLASHINFER_GDN_CHECKPOINT_TOKENS) if _has_checkpoints(request) else kernel
    return max(kernel, step * _ceil_div(state_bytes, step * kv_bytes))


def _state_blocks_per_group(request: PlanRequest) -> int:
    if not request.prefix_caching:
        return 1 + request.speculative_tokens
    return 2 + request.speculative_tokens + int(_has_checkpoints(request))


def _group_layers(attention_layers: int, gdn_layers: int) -> int:
    fewest, most = sorted((attention_layers, gdn_layers))
    # vLLM pads to the larger count when that wastes little; 1.5 is its heuristic.
    return most if most < fewest * 1.5 else fewest


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
