"""The definition of the NVFP4 linear layer, in plain PyTorch."""

from __future__ import annotations

import torch

from qwen_nvfp4_serve.kernels.nvfp4 import BLOCK, dequantize_nvfp4, quantize_nvfp4, unswizzle_scales


def linear_reference(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """x W^T + bias as [M, N] in `dtype`, every operation in `dtype`.

    x: [M, K]. packed: uint8 [N, K/2]. scales: float8_e4m3fn in 128x4 order. row_scale: float32 [N]. bias: [N] or None.
    """
    n, half_k = packed.shape
    block_scale = unswizzle_scales(scales, n, half_k * 2 // BLOCK)
    y = x.to(dtype) @ dequantize_nvfp4(packed, block_scale, row_scale, dtype=dtype).T
    return y if bias is None else y + bias.to(dtype)


def quantized_activations(x: torch.Tensor, input_scale: float) -> torch.Tensor:
    """`x` as a W4A4 kernel sees it: rounded to NVFP4 with `input_scale` as global multiplier. Float32 [M, K]."""
    return quantize_nvfp4(x, input_scale).dequantize()


def error_bound(x: torch.Tensor, weight: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The largest error allowed for each element: 2^-8 |y| + 1e-5 |x| |W|^T, in the dtype of `reference`.

    Rounding to bf16, of 8 significant bits, is at most 2^-8 |y|; the second term is for float32 sums. The largest error
    measured on an H200, at any M, is 0.988 of this bound.
    """
    magnitude = x.abs().to(reference.dtype) @ weight.abs().to(reference.dtype).T
    return reference.abs() * 2.0**-8 + magnitude * 1e-5
