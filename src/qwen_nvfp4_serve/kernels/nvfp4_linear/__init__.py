"""y = x W^T for NVFP4 weights, from one copy of them: a kernel of our own up to 64 tokens, the vendor GEMM beyond.

The op is `torch.ops.qwen_nvfp4.linear`; `prepare_weight` brings a checkpoint's tensors into its form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import cards, ops
from qwen_nvfp4_serve.kernels.nvfp4 import rows_of_global_scale, swizzle_scales, swizzled_scale_shape
from qwen_nvfp4_serve.kernels.nvfp4_linear import launch

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))
K_MULTIPLE = 128
N_LIMIT = 128 * 2**14
# Tokens the kernel takes. Beyond them the vendor GEMM serves: measured on an H200, two launches lose to it from 128 on.
KERNEL_TOKENS = 64
# Where a fused projection may begin: bf16 GEMMs want 16-byte aligned operands, and are several times slower without.
SHARD_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight as the op takes it, N rows and K columns.

    packed: uint8 [N, K/2]. scales: float8_e4m3fn in 128x4 order. row_scale: float32 [N].
    shard_rows, shard_scales: the same row scale as runs of equal rows, for the GEMM's alpha.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    row_scale: torch.Tensor
    shard_rows: tuple[int, ...]
    shard_scales: tuple[float, ...]


def supports(capability: tuple[int, int], n: int, k: int) -> str | None:
    """None if the op serves an [n, k] weight on a card of this compute capability, else the reason it does not."""
    if capability not in CAPABILITIES:
        return f"compute capability {capability[0]}.{capability[1]} is not among those compiled"
    if k % K_MULTIPLE or k < K_MULTIPLE:
        return f"K = {k} is not a multiple of {K_MULTIPLE}"
    if not 0 < n <= N_LIMIT:
        return f"N = {n} is not in 1..{N_LIMIT}"
    return None


def prepare_weight(
    packed: torch.Tensor, block_scale: torch.Tensor, shard_rows: Sequence[int], shard_scales: Sequence[float]
) -> LinearWeight:
    """Checkpoint tensors as the op takes them; nothing is copied but the scales.

    packed: uint8 [N, K/2], contiguous. block_scale: float8_e4m3fn [N, K/16], not swizzled. shard_rows: rows of each
    fused projection, N in all, each from a multiple of 8 on. shard_scales: each one's global multiplier.
    Raises UsageError where these do not fit together.
    """
    n = packed.shape[0]
    if sum(shard_rows) != n or len(shard_rows) != len(shard_scales):
        raise UsageError("rows of the fused projections", seen=str(tuple(shard_rows)), expected=f"{n} rows in all")
    starts = [sum(shard_rows[:i]) for i in range(len(shard_rows))]
    if any(start % SHARD_MULTIPLE for start in starts):
        raise UsageError(
            "first rows of the fused projections", seen=str(starts), expected=f"multiples of {SHARD_MULTIPLE}"
        )
    scale = torch.tensor(list(shard_scales), dtype=torch.float32, device=packed.device)
    row_scale = scale.repeat_interleave(torch.tensor(list(shard_rows), device=packed.device))
    return LinearWeight(packed, swizzle_scales(block_scale), row_scale, tuple(shard_rows), tuple(shard_scales))


def linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias as bf16 [..., N]. x: bf16 [..., K] on the weight's device. See `linear_op` for limits and errors."""
    rows, scales = list(weight.shard_rows), list(weight.shard_scales)
    result: torch.Tensor = linear_op(x, weight.packed, weight.scales, weight.row_scale, bias, rows, scales)
    return result


def _linear(  # noqa: PLR0917
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    shard_rows: list[int],
    shard_scales: list[float],
) -> torch.Tensor:
    _check(x, packed, scales, row_scale, bias)
    n, k = packed.shape[0], x.shape[-1]
    tokens = x if x.dim() == 2 else x.reshape(-1, k)
    if tokens.stride(-1) != 1 or tokens.stride(0) % 8 or tokens.data_ptr() % 16:
        tokens = tokens.contiguous()
    m = tokens.shape[0]
    y = tokens.new_empty((m, n))
    if m > KERNEL_TOKENS:
        launch.large_m(tokens, packed, scales, bias, list(zip(shard_rows, shard_scales, strict=True)), y)
    elif m:
        launch.small_m(tokens, packed, scales, row_scale, bias, y)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


def _fake(  # noqa: PLR0917
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,  # noqa: ARG001
    row_scale: torch.Tensor,  # noqa: ARG001
    bias: torch.Tensor | None,  # noqa: ARG001
    shard_rows: list[int],  # noqa: ARG001
    shard_scales: list[float],  # noqa: ARG001
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


def _check(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, row_scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    n, k = packed.shape[0], packed.shape[1] * 2
    reason = supports(cards.capability(x.device), n, k)
    if reason is not None:
        raise UsageError(f"NVFP4 linear of [{n}, {k}]", seen=reason)
    if x.dtype is not torch.bfloat16 or x.shape[-1] != k:
        raise UsageError("activations", seen=f"{x.dtype} {tuple(x.shape)}", expected=f"bfloat16 [..., {k}]")
    expected = swizzled_scale_shape(n, k // 16)
    if tuple(scales.shape) != expected or not scales.is_contiguous() or not packed.is_contiguous():
        raise UsageError("scales", seen=str(tuple(scales.shape)), expected=f"contiguous {expected}, weights contiguous")
    if packed.data_ptr() % 16 or scales.data_ptr() % 16:
        raise UsageError("weights", seen="an address off 16 bytes", expected="16-byte aligned tensors")
    rows_of_global_scale(row_scale, (n,))
    if row_scale.shape != (n,) or row_scale.dtype is not torch.float32:
        raise UsageError("row scales", seen=f"{row_scale.dtype} {tuple(row_scale.shape)}", expected=f"float32 [{n}]")
    if bias is not None and (bias.dtype is not torch.bfloat16 or bias.shape != (n,) or not bias.is_contiguous()):
        raise UsageError("bias", seen=f"{bias.dtype} {tuple(bias.shape)}", expected=f"contiguous bfloat16 [{n}]")


_SCHEMA = (
    "(Tensor x, Tensor packed, Tensor scales, Tensor row_scale, Tensor? bias, int[] shard_rows, float[] shard_scales)"
    " -> Tensor"
)
linear_op = ops.register("linear", _SCHEMA, _linear, _fake, backends=("CUDA",))
