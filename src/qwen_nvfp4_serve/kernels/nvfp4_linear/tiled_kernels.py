"""The tiled GEMM of the linear layer in Triton. Importing this needs Triton; `tiled` says what is computed.

Weights are dequantized in registers by `triton_step`. Every sum has one fixed order and nothing is added by atomics, so
results repeat bit for bit.
"""

# The names of Triton's language are no types, and a kernel's arguments have no keywords.
# mypy: ignore-errors
# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from qwen_nvfp4_serve.kernels.triton_step import UNSCALE, add_step, split_columns

__all__ = ["add_parts", "multiply", "split_columns"]


# What follows M or a layer's bias is not compiled in: a new value would be compiled when a request brings it.
@triton.jit(do_not_specialize=["bias", "tokens", "parts", "has_bias"])
def multiply(
    split,
    packed,
    scales,
    row_scale,
    bias,
    out,
    tokens,
    outputs,
    columns,
    parts,
    has_bias,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    WHOLE: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """out[token, n] for ROWS tokens and COLUMNS outputs: y if WHOLE, else one of `parts` parts of its sum, unscaled.

    split: [tokens, 2, columns / 2], even columns before odd ones. packed: uint8 [outputs, columns / 2].
    out: [tokens, outputs], or float32 [parts, tokens, outputs]. has_bias: 0 or 1.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = token < tokens
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < outputs
    part = tl.program_id(2)
    half = columns // 2
    steps = half // BYTES
    each = (steps + parts - 1) // parts
    start = split + token.to(tl.int64)[None, :] * columns
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(part * each, tl.minimum((part + 1) * each, steps)):
        first = step * BYTES
        at = start + first + tl.arange(0, BYTES)[:, None]
        low = tl.load(at, mask=real[None, :], other=0.0)
        high = tl.load(at + half, mask=real[None, :], other=0.0)
        total = add_step(total, packed, scales, row, inside, first, low, high, half, columns // 64, BYTES, ON_CARD)
    if WHOLE:
        total *= (tl.load(row_scale + row, mask=inside, other=0.0) * UNSCALE)[:, None]
        total += tl.load(bias + row, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)[:, None]
    to = out + (part * tokens + token).to(tl.int64)[:, None] * outputs + row[None, :]
    tl.store(to, tl.trans(total).to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["bias", "tokens", "has_bias"])
def add_parts(parts_of_y, row_scale, bias, y, tokens, outputs, has_bias, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """y[token] = row scale times the sum of the parts in their order, plus the bias, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = row < outputs
    total = tl.zeros((WIDTH,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts_of_y + (part * tokens + token) * outputs + row, mask=inside, other=0.0)
    total *= tl.load(row_scale + row, mask=inside, other=0.0) * UNSCALE
    total += tl.load(bias + row, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)
    tl.store(y + token * outputs + row, total.to(y.dtype.element_ty), mask=inside)
