"""Fake NVFP4 for training: values rounded as the format rounds them, gradients passed straight through."""

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
# Activations are scaled for this largest magnitude; the exported input scale is the same constant.
ACTIVATION_AMAX = 128.0
ACTIVATION_GLOBAL_SCALE = ACTIVATION_AMAX / (E2M1_MAX * E4M3_MAX)


def round_e2m1(values: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code, saturating at 6."""
    size = values.abs().clamp(max=E2M1_MAX)
    rounded = torch.where(
        size < 2, (size * 2).round() / 2, torch.where(size < 4, size.round(), (size / 2).round() * 2)
    )
    return torch.copysign(rounded, values)


def fake_quantize(values: Tensor, global_scale: Tensor | float) -> Tensor:
    """`values` (float, last dimension a multiple of 16) after NVFP4 and back, in float32.

    `global_scale` is the multiplier: one number, or broadcastable to the blocks [..., K / 16, 1].
    """
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    wanted = blocks.abs().amax(-1, keepdim=True) / (E2M1_MAX * global_scale)
    scale = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * global_scale
    quotient = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks))
    return (round_e2m1(quotient) * scale).flatten(-2)


def fake_quantize_activation(values: Tensor) -> Tensor:
    """Activations after NVFP4 and back, in their own dtype, with a straight-through gradient."""
    rounded = fake_quantize(values.detach(), ACTIVATION_GLOBAL_SCALE).to(values.dtype)
    return values + (rounded - values.detach())
