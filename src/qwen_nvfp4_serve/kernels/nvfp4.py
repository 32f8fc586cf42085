"""The NVFP4 format in plain PyTorch: quantize, dequantize, and the 128x4 order of the block scales.

A weight of N rows and K columns is stored as
    packed        uint8 [N, K/2], row-major; column 2i in the low nibble of byte i, column 2i+1 in the high nibble
    block_scale   float8_e4m3fn [N, K/16], one scale for 16 neighbouring columns
    global_scale  float32, a multiplier: one number, one per matrix, or one per row
and means  weight = E2M1(code) * block_scale * global_scale.  All of it may carry leading dimensions (experts).

E2M1 and the block of 16: NVIDIA's cuBLAS 12.9 documentation, "1D block scaling for FP8 and FP4".
The 128x4 order: the same document, "scaling factors layout".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen_nvfp4_serve.errors import UsageError

BLOCK = 16
SCALE_TILE_ROWS = 128
SCALE_TILE_GROUPS = 4
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The code of a magnitude is how many of these it passes; True where a tie goes up (to the even code).
_ROUNDING_POINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


@dataclass(frozen=True, slots=True)
class Nvfp4Tensor:
    """A quantized weight in checkpoint order.

    packed: uint8 [..., N, K/2]. block_scale: float8_e4m3fn [..., N, K/16], not swizzled.
    global_scale: float32 multiplier, shape (), [...] or [..., N].
    """

    packed: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight as [..., N, K] in `dtype`."""
        return dequantize_nvfp4(self.packed, self.block_scale, self.global_scale, dtype=dtype)


def quantize_nvfp4(weight: torch.Tensor, global_scale: torch.Tensor | float | None = None) -> Nvfp4Tensor:
    """The nearest NVFP4 tensor to `weight`, block by block.

    weight: floating [..., N, K], finite, K a multiple of 16, any device. global_scale: the multiplier, one number, one
    per matrix [...] or one per row [..., N]; by default amax / (6 * 448) of the whole tensor, or 1 where that is zero.
    A block's scale is amax / (6 * global_scale) rounded to E4M3; elements round to nearest, ties to the even code.
    Raises UsageError for a bad shape or a scale that is not finite and positive.
    """
    _require(
        weight.is_floating_point() and weight.ndim >= 2,
        "weight",
        f"{weight.dtype} {tuple(weight.shape)}",
        "floating [..., N, K]",
    )
    _require(weight.shape[-1] % BLOCK == 0, "weight's last dimension", str(weight.shape[-1]), f"a multiple of {BLOCK}")
    values = weight.float()
    if global_scale is None:
        global_scale = default_global_scale(values)
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=weight.device)
    _require(
        bool((scale > 0).all() and scale.isfinite().all()),
        "global scale",
        str(scale.tolist())[:80],
        "finite and positive",
    )
    per_row = rows_of_global_scale(scale, weight.shape[:-1]).unsqueeze(-1)
    blocks = values.unflatten(-1, (-1, BLOCK))
    wanted = blocks.abs().amax(-1) / (E2M1_MAX * per_row)
    block_scale = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    codes = encode_e2m1(_divide(blocks, block_scale.float().mul(per_row).unsqueeze(-1)).flatten(-2))
    return Nvfp4Tensor(pack_codes(codes), block_scale, scale)


def dequantize_nvfp4(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight [..., N, K] in `dtype`.

    packed: uint8 [..., N, K/2]. block_scale: float8_e4m3fn [..., N, K/16], not swizzled. global_scale: multiplier of
    shape (), [...] or [..., N]. Code times block scale is exact; the global scale and a narrower `dtype` round once
    each. In float64 every product is exact. Raises UsageError if the shapes do not belong together.
    """
    groups = packed.shape[-1] * 2 // BLOCK
    expected = (*packed.shape[:-1], groups)
    _require(tuple(block_scale.shape) == expected, "block scales' shape", str(tuple(block_scale.shape)), str(expected))
    work = torch.float64 if dtype is torch.float64 else torch.float32
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=packed.device).to(work)
    per_row = rows_of_global_scale(scale, packed.shape[:-1]).unsqueeze(-1).unsqueeze(-1)
    blocks = decode_e2m1(unpack_codes(packed)).to(work).unflatten(-1, (-1, BLOCK))
    return (blocks * block_scale.to(work).unsqueeze(-1) * per_row).flatten(-2).to(dtype)


def default_global_scale(weight: torch.Tensor) -> torch.Tensor:
    """amax / (6 * 448), the smallest multiplier with which no block scale saturates; 1 for zeros. Float32, shape ()."""
    amax = weight.abs().amax().float()
    return torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones_like(amax))


def global_scale_from_divisor(divisor: torch.Tensor) -> torch.Tensor:
    """The multiplier for a compressed-tensors `weight_global_scale`, which divides. Float32, same shape."""
    return _reciprocal(divisor, "compressed-tensors global scale")


def divisor_from_global_scale(global_scale: torch.Tensor) -> torch.Tensor:
    """The divisor that compressed-tensors stores as `weight_global_scale`. Float32, same shape."""
    return _reciprocal(global_scale, "global scale")


def global_scale_from_modelopt(weight_scale_2: torch.Tensor) -> torch.Tensor:
    """The multiplier for ModelOpt's `weight_scale_2`, which is one already: checked, in float32."""
    scale = weight_scale_2.float()
    _require(
        bool((scale > 0).all() and scale.isfinite().all()),
        "ModelOpt weight_scale_2",
        str(scale.tolist())[:80],
        "finite and positive",
    )
    return scale


def rows_of_global_scale(global_scale: torch.Tensor, rows_shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """`global_scale` as a tensor that broadcasts to `rows_shape` = [..., N].

    Accepts one number (shape () or (1,)), one per matrix (rows_shape[:-1]) or one per row (rows_shape).
    """
    rows_shape = tuple(rows_shape)
    if global_scale.numel() == 1:
        return global_scale.reshape(())
    if tuple(global_scale.shape) == rows_shape:
        return global_scale
    _require(
        tuple(global_scale.shape) == rows_shape[:-1],
        "global scale's shape",
        str(tuple(global_scale.shape)),
        f"(), {rows_shape[:-1]} or {rows_shape}",
    )
    return global_scale.unsqueeze(-1)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The 4-bit codes (uint8, 0..15) nearest to `values`: ties to the even code, saturating, -0 keeps its sign."""
    magnitude = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for point, tie_goes_up in _ROUNDING_POINTS:
        code += (magnitude >= point) if tie_goes_up else (magnitude > point)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Float32 values of 4-bit codes (uint8, 0..15): sign in bit 3, magnitude in bits 0..2."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=codes.device)
    return torch.cat((magnitudes, -magnitudes))[codes.long()]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., K] as bytes [..., K/2], the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [..., K/2] as codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def swizzled_scale_shape(rows: int, groups: int) -> tuple[int, int]:
    """Rows and groups after padding: the next multiples of 128 and of 4."""
    return -(-rows // SCALE_TILE_ROWS) * SCALE_TILE_ROWS, -(-groups // SCALE_TILE_GROUPS) * SCALE_TILE_GROUPS


def swizzle_scales(block_scale: torch.Tensor) -> torch.Tensor:
    """Block scales in 128x4 order, padded with zeros.

    block_scale: one-byte dtype [..., N, G], G = K/16. Returns a contiguous tensor of the same dtype, [..., N', G'] with
    N' and G' the next multiples of 128 and 4, whose memory is a row-major sequence of 512-byte tiles of 128 rows x 4
    groups: row r, group g lie in tile (r / 128, g / 4) at byte (r % 32) * 16 + (r % 128 / 32) * 4 + g % 4.
    """
    rows, groups = block_scale.shape[-2:]
    padded_rows, padded_groups = swizzled_scale_shape(rows, groups)
    lead = tuple(block_scale.shape[:-2])
    padded = torch.zeros((*lead, padded_rows, padded_groups), dtype=torch.uint8, device=block_scale.device)
    padded[..., :rows, :groups] = block_scale.view(torch.uint8)
    tiles = padded.view(*lead, padded_rows // 128, 4, 32, padded_groups // 4, 4)
    # (row tile, row / 32, row % 32, group tile, group % 4) -> (row tile, group tile, row % 32, row / 32, group % 4)
    moved = tiles.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).contiguous()
    return moved.view(*lead, padded_rows, padded_groups).view(block_scale.dtype)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """The scales [..., rows, groups] out of `swizzle_scales`' result, without its padding."""
    padded_rows, padded_groups = swizzled_scale_shape(rows, groups)
    lead = tuple(swizzled.shape[:-2])
    expected = (*lead, padded_rows, padded_groups)
    _require(tuple(swizzled.shape) == expected, "swizzled scales' shape", str(tuple(swizzled.shape)), str(expected))
    tiles = swizzled.view(torch.uint8).view(*lead, padded_rows // 128, padded_groups // 4, 32, 4, 4)
    moved = tiles.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1)).contiguous()
    return moved.view(*lead, padded_rows, padded_groups)[..., :rows, :groups].contiguous().view(swizzled.dtype)


def _divide(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """values / scale, and zero where the scale rounded to zero: such a block cannot hold anything else."""
    return torch.where(scale > 0, values / scale, torch.zeros_like(values))


def _reciprocal(scale: torch.Tensor, name: str) -> torch.Tensor:
    scale = scale.float()
    _require(bool((scale > 0).all() and scale.isfinite().all()), name, str(scale.tolist())[:80], "finite and positive")
    return scale.reciprocal()


def _require(holds: bool, what: str, seen: str, expected: str) -> None:
    if not holds:
        raise UsageError(what, seen=seen, expected=expected)
