# ruff: noqa: ARG002
"""Candidates for the admission tests, in plain PyTorch: one right, the others broken each in its own way."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4, quantize_nvfp4, unswizzle_scales
from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight


class Right:
    """The definition."""

    name = "right"
    max_tokens: int | None = None
    rounds_activations = False
    one_scale = False
    compiles = False
    rounds_before_bias = False

    def unavailable(self) -> str | None:
        return None

    def supports(self, capability: tuple[int, int], n: int, k: int) -> str | None:
        return None if k % 128 == 0 else f"K = {k}"

    def activations(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return x

    def weight(self, weight: LinearWeight, scales: torch.Tensor) -> torch.Tensor:
        n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
        return dequantize_nvfp4(weight.packed, unswizzle_scales(scales, n, k // 16), weight.row_scale)

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        y[:] = self.product(x, self.weight(weight, weight.scales), bias)

    def product(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # In double: 200 x 5,000 sums of a CPU's float32 GEMM are not this test's matter.
        result = x.double() @ dense.double().T
        return (result if bias is None else result + bias.double()).bfloat16()


class FewTokens(Right):
    """Takes up to eight tokens."""

    name = "few"
    max_tokens = 8


class Slow(Right):
    """Right, and late."""

    name = "slow"

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        time.sleep(0.01)
        super().run(x, weight, y, bias=bias, scales=scales)


class OneScaleOff(Right):
    """Reads one block's scale as the next larger one."""

    name = "one-scale-off"

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        broken = weight.scales.clone()
        broken.view(torch.uint8).flatten()[0] += 1
        y[:] = self.product(x, self.weight(weight, broken), bias)


class LeavesPadding(Right):
    """Writes whole tiles of 128 rows."""

    name = "leaves-padding"

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        whole = y.shape[1] // 128 * 128
        y[:, :whole] = self.product(x, self.weight(weight, weight.scales), bias)[:, :whole]


class WritesPast(Right):
    """Writes one element behind its output."""

    name = "writes-past"

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        super().run(x, weight, y, bias=bias, scales=scales)
        if y.untyped_storage().nbytes() > 2 * y.numel():
            torch.as_strided(y, (1,), (1,), y.numel()).zero_()


class HalfPrecision(Right):
    """Computes in FP16, whose range ends at 65,504."""

    name = "fp16"

    def product(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().product(x.half(), dense, bias)


class ForgetsBias(Right):
    """Takes a bias and drops it."""

    name = "no-bias"

    def product(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().product(x, dense, None)


class OneScaleForAll(Right):
    """Gives every row the last row's global scale."""

    name = "collapsed"

    def weight(self, weight: LinearWeight, scales: torch.Tensor) -> torch.Tensor:
        dense = super().weight(weight, scales)
        return dense / weight.row_scale[:, None] * weight.row_scale[-1]


class Restless(Right):
    """Not the same twice."""

    name = "restless"

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        super().run(x, weight, y, bias=bias, scales=scales)
        y += torch.randn_like(y) * y.abs() * 2.0**-7


class Crashes(Right):
    """Ends the process at more than 16 tokens."""

    name = "crashes"

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        if x.shape[0] > 16:
            os.kill(os.getpid(), signal.SIGSEGV)
        super().run(x, weight, y, bias=bias, scales=scales)


class Raises(Right):
    """Throws."""

    name = "raises"

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        raise RuntimeError("no kernel image is available")


class Hangs(Right):
    """Never comes back."""

    name = "hangs"

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        time.sleep(600)


class Compiles(Hangs):
    """A library that is still building."""

    name = "compiles"
    compiles = True


class Absent(Right):
    """Not installed."""

    name = "absent"

    def unavailable(self) -> str | None:
        return "its library is not installed"


class Rounds(Right):
    """A W4A4 GEMM: activations rounded to NVFP4."""

    name = "w4a4"
    rounds_activations = True
    one_scale = True
    loss = 1.0

    def activations(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        assert scales is not None
        return quantize_nvfp4(x * self.loss, 1 / float(scales[0])).dequantize(torch.float64)

    def run(self, x: Any, weight: LinearWeight, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        n, groups = weight.packed.shape[0], weight.packed.shape[1] // 8
        block_scale = unswizzle_scales(weight.scales, n, groups)
        dense = dequantize_nvfp4(weight.packed, block_scale, scales[0] * scales[1])
        y[:] = self.product(self.activations(x, scales), dense, bias)


class RoundsBadly(Rounds):
    """Rounds something else."""

    name = "w4a4-off"
    loss = 0.9


ALL = (
    Right, FewTokens, Slow, OneScaleOff, LeavesPadding, WritesPast, HalfPrecision, ForgetsBias, OneScaleForAll,
    Restless, Crashes, Raises, Hangs, Compiles, Absent, Rounds, RoundsBadly,
)  # fmt: skip


def every() -> tuple[Any, ...]:
    """All of them."""
    return tuple(kind() for kind in ALL)
