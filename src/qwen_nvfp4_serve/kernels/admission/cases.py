"""What candidates for a linear layer are tried on: random weights of a shape, in NVFP4 or in BF16."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qwen_nvfp4_serve.kernels import nvfp4, nvfp4_linear
from qwen_nvfp4_serve.kernels.admission.table import BF16_BITS, TIMED_TOKENS, Shape
from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight

INPUT_AMAX = 6.0


class Weight(Protocol):
    """A random weight, in the form that candidates take."""

    @property
    def form(self) -> Any:
        """What a candidate is given."""

    @property
    def size_bytes(self) -> int:
        """Bytes that a call reads."""

    def copy(self) -> Weight:
        """The same weight elsewhere in memory."""

    def dense(self, rows: slice) -> torch.Tensor:
        """Some of its rows, exact in float64."""


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """Two shards of unequal global scale, or one."""

    form: LinearWeight

    @property
    def size_bytes(self) -> int:
        """Codes and block scales."""
        return int(self.form.packed.numel() + self.form.scales.numel())

    def copy(self) -> Nvfp4Weight:
        """Codes and block scales."""
        packed, scales = self.form.packed.clone(), self.form.scales.clone()
        return Nvfp4Weight(dataclasses.replace(self.form, packed=packed, scales=scales))

    def dense(self, rows: slice) -> torch.Tensor:
        """Dequantized. `rows` begin where a tile of 128 rows does: tiles of scales follow each other."""
        packed = self.form.packed[rows]
        count, columns = packed.shape
        tiles = slice(rows.start, rows.start + nvfp4.swizzled_scale_shape(count, columns * 2 // nvfp4.BLOCK)[0])
        block_scale = nvfp4.unswizzle_scales(self.form.scales[tiles], count, columns * 2 // nvfp4.BLOCK)
        return nvfp4.dequantize_nvfp4(packed, block_scale, self.form.row_scale[rows], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Bf16Weight:
    """A plain matrix."""

    form: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """Two for each weight."""
        return int(self.form.numel()) * 2

    def copy(self) -> Bf16Weight:
        """All of it."""
        return Bf16Weight(self.form.clone())

    def dense(self, rows: slice) -> torch.Tensor:
        """As it is."""
        return self.form[rows].double()


@dataclass(frozen=True, slots=True)
class Case:
    """A random weight and activations, and for W4A4 the two scales."""

    rows: int
    weight: Weight
    x: torch.Tensor
    bias: torch.Tensor
    scales: torch.Tensor


def make_case(shape: Shape, device: torch.device, *, one_scale: bool, seed: int = 0) -> Case:
    """Random numbers. NVFP4: codes and block scales, in two shards of unequal global scale unless `one_scale`."""
    generator = torch.Generator(device).manual_seed(seed)
    multipliers: tuple[float, ...] = (3.1e-5, 1.7e-4)
    if shape.bits == BF16_BITS:
        values = torch.empty(shape.n, shape.k, dtype=torch.bfloat16, device=device)
        weight: Weight = Bf16Weight(values.normal_(std=0.02, generator=generator))
    else:
        packed = torch.randint(0, 256, (shape.n, shape.k // 2), dtype=torch.uint8, device=device, generator=generator)
        size = (shape.n, shape.k // nvfp4.BLOCK)
        bytes_ = torch.randint(32, 127, size, dtype=torch.uint8, device=device, generator=generator)
        cut = shape.n // 3 // 16 * 16
        rows = (cut, shape.n - cut)
        if one_scale or not cut:
            rows, multipliers = (shape.n,), multipliers[1:]  # type: ignore[assignment]
        block_scale = bytes_.view(torch.float8_e4m3fn)
        weight = Nvfp4Weight(nvfp4_linear.prepare_weight(packed, block_scale, rows, multipliers))
    x = torch.randn(max(TIMED_TOKENS), shape.k, device=device, generator=generator).bfloat16()
    bias = torch.randn(shape.n, device=device, generator=generator).bfloat16()
    inverse = nvfp4.E2M1_MAX * nvfp4.E4M3_MAX / INPUT_AMAX
    scales = torch.tensor([inverse, multipliers[-1] / inverse], dtype=torch.float32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()  # kernels may read weights before the work ahead of them ends
    return Case(shape.n, weight, x, bias, scales)
