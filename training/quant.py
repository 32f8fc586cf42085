"""Fake NVFP4 for training: values rounded as the format rounds them, gradients passed straight through."""

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0


def round_e2m1(values: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code, saturating at 6."""
    size = values.abs().clamp(max=E2M1_MAX)
    rounded = torch.where(size < 2, (size * 2).round() / 2, torch.where(size < 4, size.round(), (size / 2).round() * 2))
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
    """Activations after NVFP4 and back, in their own dtype, with a straight-through gradient.

    The global scale follows the largest magnitude, so nothing saturates: a network trained through saturation with
    straight-through gradients comes to need it, and then fails with inputs that are not rounded.
    """
    scale = (values.detach().abs().amax().float() / (E2M1_MAX * E4M3_MAX)).clamp(min=1e-12)
    rounded = fake_quantize(values.detach(), scale).to(values.dtype)
    return rounded + (values - values.detach())


def fake_quantize_cache(values: Tensor) -> Tensor:
    """Keys or values after an E4M3 cache with scale 1 and back, with a straight-through gradient."""
    rounded = values.detach().float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(values.dtype)
    return rounded + (values - values.detach())
