"""Launches on torch's current stream, and the workspaces they share. No checks: the op in `__init__` has made them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import cards
from qwen_nvfp4_serve.kernels.nvfp4_linear import binding

# Bound on the bf16 copy of weight rows that a large-M call works through.
DEQUANTIZED_BYTES = 128 * 2**20
ROW_TILE = 128
BIASED_TOKENS = 256  # 13 MiB of float32 products for rows of 5,120 columns

# One set per device and stream: calls on one stream follow each other, calls on two may not share memory.
_partials: dict[tuple[int, int], torch.Tensor] = {}
_dequantized: dict[tuple[int, int], torch.Tensor] = {}


def workspace_bytes(device: torch.device) -> int:
    """Bytes of both workspaces of one stream on `device`, whatever the shapes."""
    with torch.cuda.device(device):
        return int(binding.library().nvfp4_linear_workspace_bytes()) + DEQUANTIZED_BYTES


def small_m(  # noqa: PLR0917
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    variant: int = -1,
    grid: int = 0,
    dependent: bool = True,
) -> None:
    """Fills y [M, N] for M of at most 64. variant and grid override the choice made for M, for measurements."""
    (m, k), n = x.shape, packed.shape[0]
    call = binding.LinearCall(
        packed=packed.data_ptr(),
        scales=scales.data_ptr(),
        row_scale=row_scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        x=x.data_ptr(),
        y=y.data_ptr(),
        workspace=_partial_workspace(x.device).data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        m=m,
        n=n,
        k=k,
        variant=variant,
        grid=grid,
        dependent=dependent,
    )
    error = cards.launch(binding.library().nvfp4_linear, x.device, ctypes.byref(call))
    if error:
        binding.check(error, f"NVFP4 linear of {m} tokens, [{n}, {k}]")


def dequantize_rows(packed: torch.Tensor, scales: torch.Tensor, first_row: int, out: torch.Tensor) -> None:
    """Fills out, bf16 [rows, K], with E2M1 times E4M3 of the weight rows from `first_row`, a multiple of 128. Exact."""
    n, k = packed.shape[0], packed.shape[1] * 2
    arguments = (packed.data_ptr(), scales.data_ptr(), out.data_ptr(), first_row, out.shape[0], n, k)
    error = cards.launch(binding.library().nvfp4_dequantize, packed.device, *arguments)
    if error:
        binding.check(error, f"dequantizing rows from {first_row} of [{n}, {k}]")


def large_m(  # noqa: PLR0917
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    shards: Sequence[tuple[int, float]],
    y: torch.Tensor,
) -> None:
    """Fills y [M, N] through the bf16 workspace, a bounded number of weight rows at a time.

    shards: rows and global scale of each. The scale is the GEMM's alpha, and every output is rounded once. Sums are
    kept in float32 whatever torch's setting for bf16 reductions.
    """
    n, k = packed.shape[0], x.shape[1]
    workspace = _dequantized_workspace(x.device)
    capacity = max(workspace.numel() // k // ROW_TILE, 1) * ROW_TILE
    with _Float32Sums():
        for first in range(0, n, capacity):
            stop = min(n, first + capacity)
            rows = workspace.as_strided((stop - first, k), (k, 1))
            dequantize_rows(packed, scales, first, rows)
            begin = 0
            for count, scale in shards:
                low, high = max(begin, first), min(begin + count, stop)
                begin += count
                if low < high:
                    weight = (rows if high - low == stop - first else rows[low - first : high - first]).T
                    out = y if high - low == n else y[:, low:high]
                    if bias is None:
                        torch.addmm(out, x, weight, beta=0, alpha=scale, out=out)
                    else:
                        _add_product(x, weight, scale, bias[low:high].float(), out)


def _add_product(x: torch.Tensor, weight: torch.Tensor, scale: float, bias: torch.Tensor, y: torch.Tensor) -> None:
    """y = scale x weight + bias, rounded once.

    In float32, some tokens at a time: the library rounds a bf16 product before it adds anything to it, be it given as
    an epilogue or as the addend (an H200 was off by up to 1.79 times the bound of one rounding).
    """
    for tokens, results in zip(x.split(BIASED_TOKENS), y.split(BIASED_TOKENS), strict=True):
        on_card = x.is_cuda  # a CPU has no product of another dtype than its factors
        product = torch.mm(tokens, weight, out_dtype=torch.float32) if on_card else tokens.float() @ weight.float()
        results.copy_(torch.add(bias, product, alpha=scale))


class _Float32Sums:
    """While it is entered, torch's GEMMs keep sums of bf16 products in float32."""

    __slots__ = ("before",)

    def __enter__(self) -> None:
        settings = torch.backends.cuda.matmul
        self.before = settings.allow_bf16_reduced_precision_reduction
        settings.allow_bf16_reduced_precision_reduction = False

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self.before


def _partial_workspace(device: torch.device) -> torch.Tensor:
    key = cards.stream_key(device)
    if key not in _partials:
        _refuse_capture("the small-M kernel")
        size_bytes = int(binding.library().nvfp4_linear_workspace_bytes())
        _partials[key] = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    return _partials[key]


def _dequantized_workspace(device: torch.device) -> torch.Tensor:
    key = cards.stream_key(device)
    if key not in _dequantized:
        _refuse_capture("the large-M path")
        _dequantized[key] = torch.empty(DEQUANTIZED_BYTES // 2, dtype=torch.bfloat16, device=device)
    return _dequantized[key]


def _refuse_capture(what: str) -> None:
    # Memory first allocated inside a capture belongs to that graph, and its zeroing would be part of it.
    if torch.cuda.is_current_stream_capturing():
        raise UsageError(
            f"the workspace of {what}",
            seen="not there when a CUDA graph capture began",
            do="Run the layer once on the capture's stream before capturing.",
        )
