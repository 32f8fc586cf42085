"""Who can compute an NVFP4 linear layer from the one copy of its weight: our three ways, and FlashInfer's FP4 GEMMs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.kernels import build, nvfp4, nvfp4_linear
from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight, launch, tiled

Capability = tuple[int, int]


class Candidate(Protocol):
    """One way to compute y = x W^T + bias, from an NVFP4 weight or from one in BF16.

    max_tokens: the largest M it takes, None for any. rounds_activations: it needs a checkpoint that quantizes them.
    one_scale: it has no scale for each row, so shards of unequal scale are not for it. compiles: it may still be
    building its code at the first call. rounds_before_bias: to bf16, and then again.
    """

    @property
    def name(self) -> str: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def rounds_activations(self) -> bool: ...
    @property
    def one_scale(self) -> bool: ...
    @property
    def compiles(self) -> bool: ...
    @property
    def rounds_before_bias(self) -> bool: ...

    def unavailable(self) -> str | None:
        """Why it cannot be tried on this machine at all, None if it can."""

    def supports(self, capability: Capability, n: int, k: int) -> str | None:
        """Why it does not take an [n, k] weight on such a card, None if it does."""

    def activations(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """`x` as the products see it, [M, K] in any floating dtype."""

    def run(
        self,
        x: torch.Tensor,
        weight: Any,
        y: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Fills y, contiguous bf16 [M, N], on the current stream.

        x: contiguous bf16 [M, K], M of at least 1. weight: LinearWeight, or bf16 [N, K]. scales: float32 [2] for W4A4,
        what activations are multiplied with before they are rounded, and what products are multiplied with; None for a
        weight-only checkpoint.
        """


class _Exact:
    """What all of ours share: BF16 activations as they come, a scale for each row."""

    rounds_activations = False
    one_scale = False
    compiles = False
    rounds_before_bias = False

    def activations(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        """Unchanged."""
        return x

    def run(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        y: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,  # noqa: ARG002
    ) -> None:
        """Without scales, which are for those that round."""
        self.fill(x, weight, y, bias)

    def fill(self, x: torch.Tensor, weight: LinearWeight, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Fills y, as `run` says."""
        raise NotImplementedError


class _Library(_Exact):
    """What those of our CUDA library share."""

    def unavailable(self) -> str | None:
        """No library, no candidate."""
        return None if build.find(build.NVFP4_LINEAR) else "kernel library nvfp4_linear is not built"

    def supports(self, capability: Capability, n: int, k: int) -> str | None:
        """As the op says."""
        return nvfp4_linear.supports(capability, n, k)


class SmallM(_Library):
    """Our kernel: reads the weight in place."""

    name = "qwen-small-m"
    max_tokens: int | None = nvfp4_linear.KERNEL_TOKENS

    def fill(self, x: torch.Tensor, weight: LinearWeight, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """One launch."""
        launch.small_m(x, weight.packed, weight.scales, weight.row_scale, bias, y)


class Dequantized(_Library):
    """Rows dequantized into the bounded workspace, then the vendor's BF16 GEMM."""

    name = "qwen-dequantized"
    max_tokens: int | None = None
    rounds_before_bias = True  # allowed; `launch.large_m` rounds once, which no card has been seen to do

    def fill(self, x: torch.Tensor, weight: LinearWeight, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """A few launches for each stretch of rows."""
        shards = list(zip(weight.shard_rows, weight.shard_scales, strict=True))
        launch.large_m(x, weight.packed, weight.scales, bias, shards, y)


class Tiled(_Exact):
    """Our tiled GEMM in Triton: dequantizes in registers, for more tokens than the small-M kernel is good at."""

    name = "qwen-tiled"
    max_tokens: int | None = tiled.MAX_TOKENS
    compiles = True

    def unavailable(self) -> str | None:
        """No Triton, no candidate."""
        return tiled.unavailable()

    def supports(self, capability: Capability, n: int, k: int) -> str | None:
        """As the tiled GEMM says."""
        return tiled.supports(capability, n, k)

    def fill(self, x: torch.Tensor, weight: LinearWeight, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Two launches, or three."""
        tiled.linear(x, weight, y, bias=bias)


@dataclass(frozen=True, slots=True)
class FlashInferFp4:
    """FlashInfer's `mm_fp4` with one of its backends, on the same packed weight and 128x4 scales, for W4A4.

    majors: compute capability majors that have the backend (flashinfer 0.7.2: CUTLASS 10 and 12, b12x 12 alone).
    """

    name: str
    backend: str
    majors: tuple[int, ...]
    max_tokens: int | None = None
    rounds_activations: bool = True
    one_scale: bool = True
    compiles: bool = True
    rounds_before_bias: bool = True

    N_MULTIPLE = 32

    def unavailable(self) -> str | None:
        """No package, no candidate."""
        return None if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"

    def supports(self, capability: Capability, n: int, k: int) -> str | None:
        """Cards with FP4 tensor cores; sizes that need no padding, which would be a copy of the weight."""
        if capability[0] not in self.majors:
            cards = " or ".join(f"{major}.x" for major in self.majors)
            return f"compute capability {capability[0]}.{capability[1]} is not {cards}"
        if n % self.N_MULTIPLE or k % nvfp4_linear.K_MULTIPLE:
            return f"N = {n} is not a multiple of {self.N_MULTIPLE}, or K = {k} of {nvfp4_linear.K_MULTIPLE}"
        return None

    def _quantize(self, x: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # "4 over 6" rounding, which an environment variable can turn on, is another format's rule.
        quantize = _flashinfer().fp4_quantize
        packed, block_scale = quantize(x, scales[:1], is_sf_swizzled_layout=True, nvfp4_4over6=None)
        rows, groups = nvfp4.swizzled_scale_shape(x.shape[0], x.shape[1] // nvfp4.BLOCK)
        return packed.view(torch.uint8), block_scale.view(torch.uint8).reshape(rows, groups)

    def activations(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """`x` after the library's own rounding, which breaks ties in its own way."""
        if scales is None:
            raise UsageError(f"{self.name} on a weight-only layer", expected="input scales")
        packed, swizzled = self._quantize(x, scales)
        groups = x.shape[1] // nvfp4.BLOCK
        block_scale = nvfp4.unswizzle_scales(swizzled.view(torch.float8_e4m3fn), x.shape[0], groups)
        return nvfp4.dequantize_nvfp4(packed, block_scale, scales[:1].reciprocal(), dtype=torch.float64)

    def run(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        y: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Rounds the activations, multiplies, adds the bias."""
        if scales is None:
            raise UsageError(f"{self.name} on a weight-only layer", expected="input scales")
        packed, block_scale = self._quantize(x, scales)
        weight_scale = weight.scales.view(torch.uint8)
        _flashinfer().mm_fp4(
            packed, weight.packed.T, block_scale, weight_scale.T, scales[1:], y.dtype, out=y, backend=self.backend
        )
        if bias is not None:
            y += bias


@cache
def _flashinfer() -> Any:
    return importlib.import_module("flashinfer")


def default_candidates() -> tuple[Candidate, ...]:
    """Ours first, so that a library that takes long costs them nothing."""
    return (
        SmallM(),
        Dequantized(),
        Tiled(),
        FlashInferFp4("flashinfer-cutlass", "cutlass", (10, 12)),
        FlashInferFp4("flashinfer-b12x", "b12x", (12,)),
    )


DEFAULT = "qwen_nvfp4_serve.kernels.admission.candidates:default_candidates"


def load(spec: str) -> dict[str, Candidate]:
    """The candidates that the function `module:function` returns, by name. Raises QwenNvfp4Error for a bad one."""
    module, _, function = spec.partition(":")
    try:
        found: Sequence[Candidate] = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise QwenNvfp4Error(f"kernel candidates {spec}", seen=repr(error), expected="module:function") from None
    return {candidate.name: candidate for candidate in found}
