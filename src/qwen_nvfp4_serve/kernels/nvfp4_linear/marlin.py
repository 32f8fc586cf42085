"""vLLM's Marlin kernel for NVFP4, called through its torch ops, to be measured against. Never used to serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen_nvfp4_serve.kernels.nvfp4 import unswizzle_scales

# vLLM 0.33 scalar_type.py: float4_e2m1f is 2 exponent bits, 1 mantissa bit (<< 8), signed (<< 16), finite only (<< 49).
E2M1_TYPE_ID = 2 | 1 << 8 | 1 << 16 | 1 << 49
SCALE_TILE = 64


@dataclass(frozen=True, slots=True)
class MarlinWeight:
    """A weight in Marlin's layout: a second copy, repacked, its scales as eight bits without sign."""

    weight: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    locks: torch.Tensor
    n: int
    k: int

    @classmethod
    def pack(cls, packed: torch.Tensor, scales: torch.Tensor, global_scale: float) -> MarlinWeight:
        """From uint8 [N, K/2] and block scales in 128x4 order. N and K multiples of 64."""
        n, k = packed.shape[0], packed.shape[1] * 2
        codes = packed.view(torch.int32).T.contiguous()
        weight = torch.ops._C.gptq_marlin_repack(codes, k, n, 4, False)
        order = [i + 8 * j for i in range(8) for j in range(8)]
        plain = unswizzle_scales(scales, n, k // 16).float().T.contiguous().half()
        moved = plain.reshape(-1, SCALE_TILE)[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, n) * 2.0**7
        moved[moved < 2] = 0
        bytes_ = (moved.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()
        multiplier = torch.tensor([global_scale * 2.0**119], dtype=torch.float32, device=packed.device)
        processors = torch.cuda.get_device_properties(packed.device).multi_processor_count
        locks = torch.zeros(processors * 4, dtype=torch.int32, device=packed.device)
        return cls(weight, bytes_, multiplier, locks, n, k)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T as bf16 [M, N], with one global scale for all rows."""
        result: torch.Tensor = torch.ops._C.marlin_gemm(
            x,
            None,
            self.weight,
            None,
            self.scales,
            None,
            self.global_scale,
            None,
            self.locks,
            E2M1_TYPE_ID,
            x.shape[0],
            self.n,
            self.k,
            False,
            True,
            False,
        )
        return result
