"""y = x W^T for the layers that an NVFP4 checkpoint leaves in BF16, for few tokens.

They are most of the bytes of a decode step where the delta net's projections and the head are not quantized, and the
vendor's GEMM is made for other sizes. No torch code of its own: `small_m` launches the kernel.
"""

from __future__ import annotations

import ctypes

import torch

from qwen_nvfp4_serve.kernels import cards
from qwen_nvfp4_serve.kernels.bf16_linear import binding
from qwen_nvfp4_serve.kernels.nvfp4_linear import supports

MAX_TOKENS = 16

__all__ = ["MAX_TOKENS", "small_m", "supports"]  # the cards and sizes are those of the NVFP4 layers


def small_m(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    variant: int = -1,
    dependent: bool = True,
) -> None:
    """Fills y [M, N] on the current stream, for M of at most 16. No checks: callers have made them.

    x: bf16 [M, K], rows 16-byte aligned. weight: bf16 [N, K], contiguous, 16-byte aligned. bias: bf16 [N] or None.
    variant overrides the choice made for M, for measurements. The kernel reads weights before the kernel ahead of it
    has ended: synchronize once after loading them.
    """
    (m, k), n = x.shape, weight.shape[0]
    call = binding.Bf16LinearCall(
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        m=m,
        n=n,
        k=k,
        variant=variant,
        dependent=dependent,
    )
    error = cards.launch(binding.library().bf16_linear, x.device, ctypes.byref(call))
    if error:
        binding.check(error, f"BF16 linear of {m} tokens, [{n}, {k}]")
