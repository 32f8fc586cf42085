"""The grouped GEMM of the routed experts in Triton. Importing this needs Triton; `large_m` says what is computed.

Weights are dequantized in registers by `triton_step`. Nothing is added by atomics and each sum has one fixed order, so
results repeat bit for bit.
"""

# The names of Triton's language are no types, and a kernel's arguments have no keywords.
# mypy: ignore-errors
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from qwen_nvfp4_serve.kernels.triton_step import UNSCALE, add_step, split_columns

__all__ = ["add_up", "count_pairs", "down", "gate_up", "place_pairs", "split_columns"]


# Numbers that follow M are not compiled in: a new one would be compiled when a request brings it.
@triton.jit(do_not_specialize=["pairs"])
def count_pairs(ids, counts, pairs, CHUNK: tl.constexpr):
    """counts[e] = how many of ids[0 .. pairs-1] are e, for the program's expert e."""
    expert = tl.program_id(0)
    found = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        found += (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found))


@triton.jit(do_not_specialize=["pairs", "blocks"])
def place_pairs(
    ids,
    counts,
    order,
    block_expert,
    starts,
    places,
    pairs,
    experts,
    blocks,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Deals the pairs of each expert, in order, into blocks of ROWS; one program an expert, and one for what is left.

    order[blocks * ROWS]: the pair in each place, -1 for none. block_expert[blocks]: whose block it is, -1 for nobody's.
    starts[experts + 1]: the first place of each expert, and the one behind the last. places[pairs]: where a pair is.
    """
    expert = tl.program_id(0)
    every = tl.arange(0, WIDTH)
    sizes = (tl.load(counts + every, mask=every < experts, other=0) + ROWS - 1) // ROWS
    first_block = tl.sum(tl.where(every < expert, sizes, 0))
    mine = tl.sum(tl.where(every == expert, sizes, 0))
    tl.store(starts + expert, first_block * ROWS)
    if expert == experts:
        for block in range(first_block, blocks):
            tl.store(block_expert + block, -1)
    else:
        for block in range(first_block, first_block + mine):
            tl.store(block_expert + block, expert)
        place = first_block * ROWS
        if mine > 0:
            for first in range(0, pairs, CHUNK):
                at = first + tl.arange(0, CHUNK)
                hit = (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
                to = place + tl.cumsum(hit) - 1
                tl.store(order + to, at, mask=hit > 0)
                tl.store(places + at, to, mask=hit > 0)
                place += tl.sum(hit)
        rest = place + tl.arange(0, ROWS)
        tl.store(order + rest, -1, mask=rest < (first_block + mine) * ROWS)


@triton.jit
def gate_up(
    split,
    order,
    block_expert,
    packed,
    scales,
    gate_scale,
    up_scale,
    middle,
    top_k,
    hidden,
    width,
    scale_bytes,
    gate_row,
    up_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """middle[pair] = SiLU(gate) * up for a block of pairs and COLUMNS of `width`, even columns before odd ones.

    packed: uint8 [E, 2 width, hidden / 2]. gate_scale, up_scale: float32 [E]. scale_bytes: of one expert's block
    scales. gate_row, up_row: where the two begin in the rows of an expert.
    """
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
        real = pair >= 0
        token = tl.where(real, pair, 0).to(tl.int64) // top_k
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        weights = packed + expert * (2 * width) * (hidden // 2)
        block_scales = scales + expert * scale_bytes
        group_tiles = hidden // 64
        gate = tl.zeros((COLUMNS, ROWS), tl.float32)
        up = tl.zeros((COLUMNS, ROWS), tl.float32)
        for first in range(0, hidden // 2, BYTES):
            at = token[None, :] * hidden + first + tl.arange(0, BYTES)[:, None]
            low = tl.load(split + at, mask=real[None, :], other=0.0)
            high = tl.load(split + at + hidden // 2, mask=real[None, :], other=0.0)
            gate = add_step(
                gate,
                weights,
                block_scales,
                gate_row + column,
                inside,
                first,
                low,
                high,
                hidden // 2,
                group_tiles,
                BYTES,
                ON_CARD,
            )
            up = add_step(
                up,
                weights,
                block_scales,
                up_row + column,
                inside,
                first,
                low,
                high,
                hidden // 2,
                group_tiles,
                BYTES,
                ON_CARD,
            )
        gate *= tl.load(gate_scale + expert) * UNSCALE
        up *= tl.load(up_scale + expert) * UNSCALE
        result = (gate / (1.0 + tl.exp(-gate)) * up).to(middle.dtype.element_ty)
        place = (column % 2) * (width // 2) + column // 2
        at = tl.where(real, pair, 0).to(tl.int64)[None, :] * width + place[:, None]
        tl.store(middle + at, result, mask=inside[:, None] & real[None, :])


@triton.jit
def down(
    middle,
    order,
    block_expert,
    packed,
    scales,
    down_scale,
    pair_output,
    hidden,
    width,
    scale_bytes,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """pair_output[pair], float32 [pairs, hidden], for a block of pairs and COLUMNS of `hidden`.

    packed: uint8 [E, hidden, width / 2]. down_scale: float32 [E].
    """
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
        real = pair >= 0
        pair = tl.where(real, pair, 0).to(tl.int64)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < hidden
        weights = packed + expert * hidden * (width // 2)
        block_scales = scales + expert * scale_bytes
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for first in range(0, width // 2, BYTES):
            at = pair[None, :] * width + first + tl.arange(0, BYTES)[:, None]
            low = tl.load(middle + at, mask=real[None, :], other=0.0)
            high = tl.load(middle + at + width // 2, mask=real[None, :], other=0.0)
            total = add_step(
                total, weights, block_scales, column, inside, first, low, high, width // 2, width // 64, BYTES, ON_CARD
            )
        total *= tl.load(down_scale + expert) * UNSCALE
        tl.store(pair_output + pair[None, :] * hidden + column[:, None], total, mask=inside[:, None] & real[None, :])


@triton.jit
def add_up(pair_output, ids, weights, y, experts, hidden, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """y[token] = the sum over its pairs of weight times output, in their order; an id outside 0..E-1 adds nothing."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < hidden
    total = tl.zeros((WIDTH,), tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids + pair)
        real = (expert >= 0) & (expert < experts)
        value = tl.load(pair_output + pair * hidden + column, mask=inside & real, other=0.0)
        total += tl.where(real, tl.load(weights + pair), 0.0) * value
    tl.store(y + token * hidden + column, total.to(y.dtype.element_ty), mask=inside)
