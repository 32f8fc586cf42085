"""The routed experts for any number of tokens, on any card: a grouped GEMM that reads the packed weights in place.

    y = experts(x, weights, topk_ids, topk_weights)

The pairs of token and elected expert are dealt into blocks of one expert each, in order; a block's weights are
dequantized in registers (`triton_step`), h = SiLU(gate) * up is rounded to BF16, and a token's pairs are added up
in float32 in their order. The result is bounded as `reference.moe_experts` says and repeats bit for bit.
Tokens beyond what WORKSPACE_BYTES holds are served in several rounds. Needs Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import cards
from qwen_nvfp4_serve.kernels.nvfp4_moe.weights import ExpertWeights

K_MULTIPLE = 64  # of both products' columns: four blocks of 16, one tile of the scales' order
WORKSPACE_BYTES = 256 * 2**20
# Of the dealing: pairs that one program deals, counts and lines of counts that it adds up at a time, blocks that one
# program fills. Its work grows with the square of the first, and with all pairs over it. The fastest of those timed on
# an H200 for 2,048 tokens of the 35B and more (docs/kernels-moe.md).
PAIRS_IN_CHUNK = 256
COUNTS_IN_STEP = 32 * 256
LINES_IN_STEP = 32
BLOCKS_IN_STEP = 64
DEALING_WARPS = 4
COLUMNS_IN_STEP = 1024  # of the kernels that only move or add
STEP_BYTES = 64  # of a weight row that one step takes, or half of it where rows are no multiple
OLDEST_CAPABILITY = (8, 0)  # BF16 tensor cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one program computes: `rows` pairs of `columns` outputs. warps, stages: as Triton understands them."""

    rows: int
    columns: int
    warps: int
    stages: int


# The fastest of those timed on an H200 for 64, 512, 2048 and 8192 tokens of the 35B (docs/kernels-moe.md), all within
# the 99 KB of shared memory of compute capability 12.0. The last one is for products that are `wgmma`, which compute
# capability 9.0 alone has: with others it spills hundreds of bytes.
TILES = (
    Tile(rows=16, columns=64, warps=4, stages=3),
    Tile(rows=32, columns=64, warps=4, stages=3),
    Tile(rows=64, columns=64, warps=4, stages=3),
    Tile(rows=128, columns=128, warps=8, stages=3),
)
# Pairs that an expert has on average up to which each but the last is used: between 8 (16 rows won) and 16 (32 did),
# 16 and 64 (64 did), 64 and 256 (128 did). At 108, the most in a round of the 35B, 128 win with uniform elections and
# lose more with uneven ones.
AVERAGES = (8, 24, 128)
WGMMA_MAJOR = 9


def unavailable() -> str | None:
    """Why this cannot run on this machine at all, None if it can."""
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def supports(capability: tuple[int, int], hidden: int, intermediate: int) -> str | None:
    """None if experts of these dimensions are served on a card of this compute capability, else the reason."""
    if capability < OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no BF16 tensor cores"
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size < 1 or size % K_MULTIPLE:
            return f"{name} size {size} is not a multiple of {K_MULTIPLE}"
    return None


def tiles_of(capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Those in use on a card of this compute capability, smallest first."""
    return TILES if capability[0] == WGMMA_MAJOR else TILES[:-1]


def tile_for(average: float, tiles: Sequence[Tile]) -> Tile:
    """The tile for so many pairs of an expert on average, the largest of `tiles` where none is large enough."""
    return next((tile for tile, most in zip(tiles, AVERAGES, strict=False) if average <= most), tiles[-1])


def workspace_bytes(tokens: int, top_k: int, hidden: int, intermediate: int) -> int:
    """What a call of so many tokens takes beside its result: activations, h and the pairs' outputs."""
    round_ = min(tokens, tokens_in_round(top_k, hidden, intermediate))
    return round_ * _token_bytes(top_k, hidden, intermediate)


def tokens_in_round(top_k: int, hidden: int, intermediate: int) -> int:
    """The most tokens that WORKSPACE_BYTES suffice for, at least one."""
    return max(1, WORKSPACE_BYTES // _token_bytes(top_k, hidden, intermediate))


def _token_bytes(top_k: int, hidden: int, intermediate: int) -> int:
    return 2 * hidden + top_k * (2 * intermediate + 4 * hidden)


def experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    y: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """The routed experts' weighted sum, [M, H] in x's dtype, into y if it is given (contiguous).

    x: bf16 [M, H]. topk_ids: int32 [M, k], an id outside 0..E-1 adds nothing. topk_weights: float32 [M, k].
    tile: instead of the one chosen for M. Raises UsageError for shapes, dtypes or sizes that are not served.
    """
    tiles = tiles_of(_check(x, weights, topk_ids, topk_weights))
    y = x.new_empty(x.shape) if y is None else y
    tokens, top_k = topk_ids.shape
    if tokens == 0:
        return y
    # Full ones, not equal ones: the more pairs an expert has, the less each costs.
    most = tokens_in_round(top_k, weights.hidden, weights.intermediate)
    for first in range(0, tokens, most):
        stop = min(first + most, tokens)
        chosen = tile or tile_for((stop - first) * top_k / weights.experts, tiles)
        rows, ids, shares, sums = (
            tensor if tokens <= most else tensor[first:stop] for tensor in (x, topk_ids, topk_weights, y)
        )
        _round(rows.contiguous(), ids.contiguous(), shares.contiguous(), weights, sums, chosen)
    return y


def warm_up(weights: ExpertWeights, top_k: int) -> None:
    """Compiles every tile for these weights, so that no call does it later, least of all inside a graph capture."""
    device = weights.w13.device
    capability = torch.cuda.get_device_capability(device)
    x = torch.zeros(1, weights.hidden, dtype=torch.bfloat16, device=device)
    ids = torch.arange(top_k, dtype=torch.int32, device=device).unsqueeze(0)
    shares = torch.ones(1, top_k, dtype=torch.float32, device=device)  # whatever the default while a model loads
    for tile in tiles_of(capability):
        experts(x, weights, ids, shares, tile=tile)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs dealt into blocks.

    order: int32 [blocks * rows], a pair or -1. expert: int32 [blocks], -1 for nobody's. starts: int32 [E + 1], each
    expert's first place in `order` and the one behind the last. places: int32 [M k], where a pair is, if it was dealt.
    """

    order: torch.Tensor
    expert: torch.Tensor
    starts: torch.Tensor
    places: torch.Tensor


def deal(topk_ids: torch.Tensor, experts_count: int, rows: int) -> Blocks:
    """The pairs of each expert in blocks of `rows`, in order. topk_ids: int32 [M, k], contiguous.

    Memory behind the last block is not written. No pair, no block: ids outside 0..E-1 are dealt nowhere.
    """
    kernels, pairs = _kernels(), topk_ids.numel()
    # Each block holds a pair, and all but one of an expert's are full.
    blocks = min(pairs, pairs // rows + min(experts_count, pairs))
    order, expert, starts, places = (
        topk_ids.new_empty(size) for size in (blocks * rows, blocks, experts_count + 1, pairs)
    )
    width = 1 << (experts_count - 1).bit_length()
    chunks = -(-pairs // PAIRS_IN_CHUNK)
    counts = topk_ids.new_empty((chunks, width), dtype=torch.int16)
    fixed: dict[str, Any] = {"WIDTH": width, "CHUNK": PAIRS_IN_CHUNK, "num_warps": DEALING_WARPS}
    kernels.count_pairs[(chunks,)](topk_ids, counts, pairs, **fixed)
    kernels.place_pairs[(chunks + max(1, -(-blocks // BLOCKS_IN_STEP)),)](
        topk_ids,
        counts,
        order,
        expert,
        starts,
        places,
        pairs,
        experts_count,
        blocks,
        chunks,
        ROWS=rows,
        COUNTS=max(1, min(LINES_IN_STEP, COUNTS_IN_STEP // width)),
        BLOCKS=BLOCKS_IN_STEP,
        **fixed,
    )
    return Blocks(order, expert, starts, places)


def _round(  # noqa: PLR0917
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    weights: ExpertWeights,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    kernels = _kernels()
    tokens, top_k = ids.shape
    hidden, width = weights.hidden, weights.intermediate
    blocks = deal(ids, weights.experts, tile.rows)
    steps = (tokens, -(-hidden // COLUMNS_IN_STEP))
    split = torch.empty_like(x)
    kernels.split_columns[steps](x, split, hidden, WIDTH=COLUMNS_IN_STEP)
    middle = x.new_empty((tokens * top_k, width))
    shape: dict[str, Any] = {"ROWS": tile.rows, "COLUMNS": tile.columns, "ON_CARD": x.is_cuda}
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    count = blocks.expert.numel()
    kernels.gate_up[(-(-width // tile.columns), count)](
        split,
        blocks.order,
        blocks.expert,
        weights.w13,
        weights.w13_scales.view(torch.uint8),
        weights.gate_scale,
        weights.up_scale,
        middle,
        top_k,
        hidden,
        width,
        _of_one_expert(weights.w13_scales),
        0,
        width,
        BYTES=_step_bytes(hidden),
        **shape,
        **options,
    )
    pair_output = x.new_empty((tokens * top_k, hidden), dtype=torch.float32)
    kernels.down[(-(-hidden // tile.columns), count)](
        middle,
        blocks.order,
        blocks.expert,
        weights.w2,
        weights.w2_scales.view(torch.uint8),
        weights.down_scale,
        pair_output,
        hidden,
        width,
        _of_one_expert(weights.w2_scales),
        BYTES=_step_bytes(width),
        **shape,
        **options,
    )
    kernels.add_up[steps](pair_output, ids, shares, y, weights.experts, hidden, TOP_K=top_k, WIDTH=COLUMNS_IN_STEP)


def _of_one_expert(scales: torch.Tensor) -> int:
    return int(scales.shape[1] * scales.shape[2])


def _step_bytes(columns: int) -> int:
    return STEP_BYTES if columns % (2 * STEP_BYTES) == 0 else STEP_BYTES // 2


@cache
def _kernels() -> ModuleType:
    from qwen_nvfp4_serve.kernels.nvfp4_moe import large_m_kernels

    return large_m_kernels


def _check(x: torch.Tensor, weights: ExpertWeights, ids: torch.Tensor, shares: torch.Tensor) -> tuple[int, int]:
    """The card's compute capability. Raises UsageError for what is not served."""
    capability = cards.capability(x.device) if x.is_cuda else OLDEST_CAPABILITY
    reason = weights.problem() or supports(capability, weights.hidden, weights.intermediate)
    if reason is not None:
        raise UsageError("experts of the grouped GEMM", seen=reason)
    if x.ndim != 2 or x.shape[1] != weights.hidden or (x.is_cuda and x.dtype is not torch.bfloat16):
        expected = f"bfloat16 [M, {weights.hidden}]"
        raise UsageError("activations", seen=f"{x.dtype} {tuple(x.shape)}", expected=expected)
    if ids.dtype is not torch.int32 or ids.ndim != 2 or ids.shape[0] != x.shape[0]:
        raise UsageError("topk_ids", seen=f"{ids.dtype} {tuple(ids.shape)}", expected=f"int32 [{x.shape[0]}, k]")
    if shares.dtype is not torch.float32 or shares.shape != ids.shape:
        raise UsageError(
            "topk_weights", seen=f"{shares.dtype} {tuple(shares.shape)}", expected=f"float32 {tuple(ids.shape)}"
        )
    return capability
