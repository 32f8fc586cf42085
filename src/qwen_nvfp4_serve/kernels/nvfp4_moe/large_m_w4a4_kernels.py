"""What lies around a library's grouped FP4 GEMM, in Triton: rounding activations to NVFP4, and the sum of the pairs.

Importing this needs Triton; `large_m_w4a4` says what is computed. Rounding is the format's: to nearest, ties to even.
"""

# The names of Triton's language are no types, and a kernel's arguments have no keywords.
# mypy: ignore-errors
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(4)  # places of a block, all of one expert
E2M1_MAX = tl.constexpr(6.0)
E4M3_MAX = tl.constexpr(448.0)
E4M3_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
E4M3_SUBNORMAL_STEPS = tl.constexpr(512.0)  # of 2^-9
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it leaves a float32 rounded to an integer


@triton.jit
def _to_e4m3(value):
    """The E4M3 byte nearest to float32 values from 0 to 448."""
    bits = value.to(tl.uint32, bitcast=True)
    # Three bits of the mantissa stay; the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
    subnormal = ((value * E4M3_SUBNORMAL_STEPS + ROUNDER) - ROUNDER).to(tl.int32)
    return tl.where(value < E4M3_SMALLEST_NORMAL, subnormal, normal)


@triton.jit
def _from_e4m3(byte):
    """Float32 of an E4M3 byte without a sign: read as FP16 it lacks 2^8."""
    return (byte << 7).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _to_e2m1(value):
    """The E2M1 code nearest to float32 values, saturating."""
    size = tl.abs(value)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((value.to(tl.uint32, bitcast=True) >> 31) << 3).to(tl.int32)


@triton.jit
def _store_rounded(low, high, scale, place, first, expert, group, inside, packed, scales, columns):
    """Rounds the even and odd columns [ROWS, groups, 8] of some groups of 16 and stores codes and block scales.

    place: of the rows. first: place of the expert's first row. The scales of each expert are in 128x4 order, from the
    row on that the library expects: (first + 127 * expert) / 128 * 128.
    """
    largest = tl.maximum(tl.max(tl.abs(low), 2), tl.max(tl.abs(high), 2))
    byte = _to_e4m3(tl.minimum(tl.div_rn(largest, tl.zeros_like(largest) + E2M1_MAX * scale), E4M3_MAX))
    unit = _from_e4m3(byte) * scale
    # Zeros stay zeros whatever they are divided by.
    unit = tl.where(unit > 0.0, unit, 1.0)[:, :, None] + tl.zeros_like(low)
    codes = _to_e2m1(tl.div_rn(low, unit)) | (_to_e2m1(tl.div_rn(high, unit)) << 4)
    zero = (byte == 0)[:, :, None]
    at = place.to(tl.int64)[:, None, None] * (columns // 2) + group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    mask = inside[None, :, None] & (place >= 0)[:, None, None]
    tl.store(packed + at, tl.where(zero, 0, codes).to(tl.uint8), mask=mask)
    row = ((first + expert * 127) // 128 * 128 + place - first).to(tl.int64)
    tile = (row // 128)[:, None] * (columns // 64) * 512 + (group // 4)[None, :] * 512
    within = (row % 32 * 16 + row % 128 // 32 * 4)[:, None] + (group % 4)[None, :]
    tl.store(scales + tile + within, byte.to(tl.uint8), mask=inside[None, :] & (place >= 0)[:, None])


@triton.jit
def round_activations(
    x,
    order,
    block_expert,
    starts,
    input_scale,
    packed,
    scales,
    top_k,
    columns,
    GROUPS: tl.constexpr,
):
    """Rounds each pair's row of x [tokens, columns] with its expert's input scale, into its place."""
    block = tl.program_id(0)
    expert = tl.load(block_expert + block)
    if expert >= 0:
        place = block * ROWS + tl.arange(0, ROWS)
        pair = tl.load(order + place)
        token = tl.where(pair >= 0, pair, 0).to(tl.int64) // top_k
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        inside = group < columns // 16
        at = token[:, None, None] * columns + group[None, :, None] * 16 + 2 * tl.arange(0, 8)[None, None, :]
        mask = (pair >= 0)[:, None, None] & inside[None, :, None]
        low = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(x + at + 1, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(input_scale + expert)
        first = tl.load(starts + expert)
        _store_rounded(low, high, scale, place, first, expert, group, inside, packed, scales, columns)


@triton.jit
def _swiglu(base, at, mask, width, gate_scale, up_scale):
    gate = tl.load(base + at, mask=mask, other=0.0).to(tl.float32) * gate_scale
    up = tl.load(base + at + width, mask=mask, other=0.0).to(tl.float32) * up_scale
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def round_swiglu(
    gate_up,
    block_expert,
    starts,
    gate_scale,
    up_scale,
    first_scale,
    second_scale,
    packed,
    scales,
    width,
    GROUPS: tl.constexpr,
):
    """Rounds SiLU(gate) * up of each place with its expert's second input scale.

    gate_up: bf16 [places, 2 width], the first products without any global scale.
    """
    block = tl.program_id(0)
    expert = tl.load(block_expert + block)
    if expert >= 0:
        place = block * ROWS + tl.arange(0, ROWS)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        inside = group < width // 16
        row = place.to(tl.int64)[:, None, None] * (2 * width)
        at = row + group[None, :, None] * 16 + 2 * tl.arange(0, 8)[None, None, :]
        mask = inside[None, :, None] & (place >= 0)[:, None, None]
        rounded_with = tl.load(first_scale + expert)
        of_gate = tl.load(gate_scale + expert) * rounded_with
        of_up = tl.load(up_scale + expert) * rounded_with
        low = _swiglu(gate_up, at, mask, width, of_gate, of_up)
        high = _swiglu(gate_up, at + 1, mask, width, of_gate, of_up)
        scale = tl.load(second_scale + expert)
        first = tl.load(starts + expert)
        _store_rounded(low, high, scale, place, first, expert, group, inside, packed, scales, width)


@triton.jit
def add_up_places(
    output,
    places,
    ids,
    weights,
    down_scale,
    second_scale,
    y,
    experts,
    hidden,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """y[token] = the sum over its pairs, in their order, of weight times global scales times output[place]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < hidden
    total = tl.zeros((WIDTH,), tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids + pair)
        real = (expert >= 0) & (expert < experts)
        place = tl.load(places + pair, mask=real, other=0).to(tl.int64)
        value = tl.load(output + place * hidden + column, mask=inside & real, other=0.0).to(tl.float32)
        scale = tl.load(down_scale + expert, mask=real, other=0.0) * tl.load(
            second_scale + expert, mask=real, other=0.0
        )
        total += tl.where(real, tl.load(weights + pair), 0.0) * scale * value
    tl.store(y + token * hidden + column, total.to(y.dtype.element_ty), mask=inside)
