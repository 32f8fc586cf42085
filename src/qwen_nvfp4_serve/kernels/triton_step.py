"""What our GEMMs in Triton share: one step of a product with NVFP4 weights. Importing this needs Triton.

Weights are operand A of the tensor-core product and are dequantized in registers: a code times its block scale is exact
in BF16, here times 2^-22 because both are read as FP16 of a smaller exponent. Activations come with the even columns of
a row before the odd ones, so that the two nibbles of a byte need no shuffling. Products are in the dtype of the
activations: BF16; Triton's interpreter, which cannot multiply BF16, is given float32.
"""

# The names of Triton's language are no types, and a kernel's arguments have no keywords.
# mypy: ignore-errors
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl

# E2M1 read as FP16 lacks 2^14, E4M3 read as FP16 lacks 2^8.
UNSCALE = tl.constexpr(2.0**22)
# E2M1 read as BF16 lacks 2^126. Scales of this size leave what UNSCALE makes up for.
BF16_SCALE = tl.constexpr(2.0**112)

# Four bytes of codes ($4) and the scales of each byte ($5, $6) become the weights of the low ($0, $1) and of the high
# nibbles ($2, $3). A code times 0x1040 has its sign in bit 15 and its magnitude in bits 8 to 6 of a BF16 half.
DECODE = tl.constexpr("""{
.reg .b32 low, high, pair, zero;
mov.b32 zero, 0;
and.b32 low, $4, 0x0F0F0F0F;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 pair, low, zero, 0x4140;
mul.lo.u32 pair, pair, 0x1040;
and.b32 pair, pair, 0x81C081C0;
fma.rn.bf16x2 $0, pair, $5, zero;
prmt.b32 pair, low, zero, 0x4342;
mul.lo.u32 pair, pair, 0x1040;
and.b32 pair, pair, 0x81C081C0;
fma.rn.bf16x2 $1, pair, $6, zero;
prmt.b32 pair, high, zero, 0x4140;
mul.lo.u32 pair, pair, 0x1040;
and.b32 pair, pair, 0x81C081C0;
fma.rn.bf16x2 $2, pair, $5, zero;
prmt.b32 pair, high, zero, 0x4342;
mul.lo.u32 pair, pair, 0x1040;
and.b32 pair, pair, 0x81C081C0;
fma.rn.bf16x2 $3, pair, $6, zero;
}""")


@triton.jit
def split_columns(x, split, columns, WIDTH: tl.constexpr):
    """split[row, 0, i] = x[row, 2i] and split[row, 1, i] = x[row, 2i + 1]; both [rows, columns]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0)
    tl.store(split + row * columns + (at % 2) * (columns // 2) + at // 2, value, mask=inside)


@triton.jit
def block_scales(base, rows, inside, first_group, group_tiles, GROUPS: tl.constexpr):
    """Block scales [rows, GROUPS] as float32 times 2^-8, out of one expert's 128x4 order."""
    group = first_group + tl.arange(0, GROUPS)
    of_row = (rows // 128) * group_tiles * 512 + (rows % 32) * 16 + ((rows % 128) // 32) * 4
    of_group = (group // 4) * 512 + group % 4
    byte = tl.load(base + of_row[:, None] + of_group[None, :], mask=inside[:, None], other=0).to(tl.uint16)
    return (((byte & 0x7F) << 7) | ((byte & 0x80) << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def values(codes, scale):
    """E2M1 codes in the low four bits of 16, times their scales: float32, times 2^-22, exact in BF16."""
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * scale


@triton.jit
def add_step(
    total,
    packed,
    scales,
    rows,
    inside,
    first_byte,
    low,
    high,
    bytes_in_row,
    group_tiles,
    BYTES: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """total [rows, tokens] plus W[rows, columns of BYTES bytes] times the activations' even and odd columns."""
    byte = first_byte + tl.arange(0, BYTES)
    at = rows.to(tl.int64)[:, None] * bytes_in_row + byte[None, :]
    codes = tl.load(packed + at, mask=inside[:, None], other=0)
    block = block_scales(scales, rows, inside, first_byte // 8, group_tiles, BYTES // 8)
    if ON_CARD:
        block = (block * BF16_SCALE).to(tl.bfloat16)
    spread = tl.broadcast_to(block[:, :, None], (rows.shape[0], BYTES // 8, 8)).reshape(rows.shape[0], BYTES)
    if ON_CARD:
        even, odd = tl.inline_asm_elementwise(
            DECODE, "=r,=r,=r,=r,r,r,r", [codes, spread], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        even = values(codes.to(tl.uint16) & 0xF, spread).to(low.dtype)
        odd = values(codes.to(tl.uint16) >> 4, spread).to(low.dtype)
    return tl.dot(odd, high, tl.dot(even, low, total))
