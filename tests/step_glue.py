"""The small kernels of a decode step for `tests.step_on_card`, the same for stock and ours. Needs Triton.

With PDL a kernel is launched dependently, as gpu-dependent-launch compiles those of an engine: it waits before its
first access, and lets the next one start before it stores.
"""

# ruff: noqa: PLR0917 - what a kernel takes is in its own order

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HEAD, GATE_BLOCK = 128, 1024


@triton.jit
def norm_kernel(h, delta, y, n, ADD: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    if PDL:
        gdc_wait()
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < n
    v = tl.load(h + row * n + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(delta + row * n + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    if ADD:
        tl.store(h + row * n + cols, v.to(tl.bfloat16), mask=mask)
    tl.store(y + row * n + cols, (v * tl.rsqrt(tl.sum(v * v) / n + 1e-6)).to(tl.bfloat16), mask=mask)


@triton.jit
def gate_kernel(gate, up, y, stride, n, PDL: tl.constexpr, BLOCK: tl.constexpr):
    if PDL:
        gdc_wait()
    row, cols = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    g = tl.load(gate + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    tl.store(y + row * n + cols, (g / (1.0 + tl.exp(-g)) * u).to(tl.bfloat16), mask=mask)


@triton.jit
def gated_norm_kernel(o, z, y, z_stride, n, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    row, cols = tl.program_id(0), tl.program_id(1) * 128 + tl.arange(0, 128)
    v = tl.load(o + row * n + cols).to(tl.float32)
    g = tl.load(z + row * z_stride + cols).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    y_value = v * tl.rsqrt(tl.sum(v * v) / 128 + 1e-6) * (g / (1.0 + tl.exp(-g)))
    tl.store(y + row * n + cols, y_value.to(tl.bfloat16))


class Glue:
    """Norms and gates of BF16 rows; dependent: launched so."""

    def __init__(self, *, dependent: bool) -> None:
        self.options = {"PDL": dependent, "launch_pdl": True} if dependent else {"PDL": False}

    def norm(self, h: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Adds delta to h where it is, and gives its norm."""
        m, n = h.shape
        y = torch.empty_like(h)
        block = triton.next_power_of_2(n)
        added = h if delta is None else delta
        norm_kernel[(m,)](h, added, y, n, ADD=delta is not None, BLOCK=block, num_warps=8, **self.options)
        return y

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) up, of two parts of one row."""
        m, n = gate.shape
        y = torch.empty(m, n, dtype=gate.dtype, device=gate.device)
        grid = (m, triton.cdiv(n, GATE_BLOCK))
        gate_kernel[grid](gate, up, y, gate.stride(0), n, BLOCK=GATE_BLOCK, num_warps=4, **self.options)
        return y

    def gated_norm(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Each head's norm of o times silu(z)."""
        m, n = o.shape
        y = torch.empty_like(o)
        gated_norm_kernel[(m, n // HEAD)](o, z, y, z.stride(0), n, num_warps=1, **self.options)
        return y
