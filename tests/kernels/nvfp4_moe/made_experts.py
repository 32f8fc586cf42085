"""Experts drawn at random, and their matrices by the format's definition, for the tests in Triton's interpreter."""

from __future__ import annotations

import torch

from qwen_nvfp4_serve.kernels import nvfp4, nvfp4_moe
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights


def made_experts(
    experts: int,
    hidden: int,
    width: int,
    *,
    block_scales: tuple[int, int],
    global_scales: tuple[float, float, float],
) -> ExpertWeights:
    """Every code, and unequal global scales of gate, up and down for each expert.

    block_scales: the first byte of E4M3 to draw, and the one after the last. global_scales: the least of gate, up and
    down; each drawn one is up to twice that.
    """
    generator = torch.Generator().manual_seed(experts + hidden + width)

    def packed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
        scale = torch.randint(*block_scales, (experts, rows, columns // 16), dtype=torch.uint8, generator=generator)
        return codes, scale.view(torch.float8_e4m3fn)

    w13, w13_scale = packed(2 * width, hidden)
    w2, w2_scale = packed(hidden, width)
    gate, up, down = (torch.rand(experts, generator=generator) * least + least for least in global_scales)
    return nvfp4_moe.prepare_experts(
        w13=w13,
        w13_block_scale=w13_scale,
        w2=w2,
        w2_block_scale=w2_scale,
        gate_scale=gate,
        up_scale=up,
        down_scale=down,
    )


def dense(weights: ExpertWeights, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate over up [2I, H], and down [H, I]."""
    hidden, width = weights.hidden, weights.intermediate
    rows = torch.stack((weights.gate_scale[expert], weights.up_scale[expert])).repeat_interleave(width)
    block = nvfp4.unswizzle_scales(weights.w13_scales[expert], 2 * width, hidden // 16)
    first = nvfp4.dequantize_nvfp4(weights.w13[expert], block, rows, dtype=dtype)
    block = nvfp4.unswizzle_scales(weights.w2_scales[expert], hidden, width // 16)
    return first, nvfp4.dequantize_nvfp4(weights.w2[expert], block, weights.down_scale[expert], dtype=dtype)
