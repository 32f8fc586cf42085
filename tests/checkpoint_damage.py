"""Damage to an NVFP4 checkpoint's tensors that the known answers of the embedded model must show."""

from __future__ import annotations

from typing import Any

Tensors = dict[str, Any]


def drop_global_scale(tensors: Tensors) -> None:
    """Of one attention layer."""
    import torch

    for name in tensors:
        if "layers.3.self_attn" in name and name.endswith("weight_global_scale"):
            tensors[name] = torch.ones_like(tensors[name])


def swizzle_block_scales(tensors: Tensors) -> None:
    """Block scales in the order of another kernel, everywhere."""
    from qwen_nvfp4_serve.kernels.nvfp4 import swizzle_scales

    for name, tensor in tensors.items():
        if name.endswith("weight_scale"):
            tensors[name] = swizzle_scales(tensor).flatten()[: tensor.numel()].reshape(tensor.shape)
