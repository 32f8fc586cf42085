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
def count_pairs(ids, counts, pairs, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """counts[c, e] = how many of the program's chunk of ids[0 .. pairs-1] are e. counts: [chunks, WIDTH]."""
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < pairs, other=-1)
    every = tl.arange(0, WIDTH)
    found = tl.sum((expert[:, None] == every[None, :]).to(tl.int32), 0)
    tl.store(counts + chunk * WIDTH + every, found.to(counts.dtype.element_ty))


@triton.jit(do_not_specialize=["pairs", "blocks", "chunks"])
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
    chunks,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Deals the pairs of each expert, in order, into blocks of ROWS; one program a chunk, and one for BLOCKS blocks.

    order[blocks * ROWS]: the pair in each place, -1 for none. block_expert[blocks]: whose block it is, -1 for nobody's.
    starts[experts + 1]: the first place of each expert, and the one behind the last. places[pairs]: where a pair is.
    """
    program = tl.program_id(0)
    # Ids from E to WIDTH-1 are counted too, but come behind all experts and move none of them.
    total, before = _sum_counts(counts, chunks, program, WIDTH, COUNTS)
    sizes = (total + ROWS - 1) // ROWS
    end = tl.cumsum(sizes)
    place = (end - sizes) * ROWS
    if program < chunks:
        at = program * CHUNK + tl.arange(0, CHUNK)
        expert = tl.load(ids + at, mask=at < pairs, other=-1)
        real = (expert >= 0) & (expert < experts)
        earlier = (expert[:, None] == expert[None, :]) & (at[:, None] < at[None, :])
        to = tl.gather(place + before, tl.where(real, expert, 0), 0) + tl.sum(earlier.to(tl.int32), 0)
        tl.store(order + to, at, mask=real)
        tl.store(places + at, to, mask=real)
    else:
        block = (program - chunks) * BLOCKS + tl.arange(0, BLOCKS)
        owner = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), 1)
        owned = owner < experts
        tl.store(block_expert + block, tl.where(owned, owner, -1), mask=block < blocks)
        filled = tl.gather(place + total, tl.where(owned, owner, 0), 0)
        row = block[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(order + row, -1, mask=owned[:, None] & (row >= filled[:, None]))
        if program == chunks:
            every = tl.arange(0, WIDTH)
            tl.store(starts, 0)
            tl.store(starts + 1 + every, end * ROWS, mask=every < experts)


@triton.jit
def _sum_counts(counts, chunks, chunk, WIDTH: tl.constexpr, COUNTS: tl.constexpr):
    """Each expert's pairs in all chunks, and in those before `chunk`."""
    every = tl.arange(0, WIDTH)
    total = tl.zeros((COUNTS, WIDTH), tl.int32)
    before = tl.zeros((COUNTS, WIDTH), tl.int32)
    for first in range(0, chunks, COUNTS):
        one = first + tl.arange(0, COUNTS)[:, None]
        found = tl.load(counts + one * WIDTH + every[None, :], mask=one < chunks, other=0).to(tl.int32)
        total += found
        before += tl.where(one < chunk, found, 0)
    return tl.sum(total, 0), tl.sum(before, 0)


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
