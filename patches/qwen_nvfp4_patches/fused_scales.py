"""Fused NVFP4 layers with a global scale for each part: kept from the moment before vLLM makes one out of them.

q, k, v (and gate, up; and GDN's qkv, z) come as separate matrices and may have been quantized with different global
scales. vLLM stacks them and keeps one scale: compressed-tensors the smallest, ModelOpt the largest, experts the gate's.
The others' weights are then off by the ratio. Here the whole vector is put aside on the layer first, for our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.backend import nvfp4_backend
from qwen_nvfp4_patches.patch import Need, Patch

if TYPE_CHECKING:
    import torch

LINEAR_SCALES = "nvfp4_shard_scales"
EXPERT_SCALES = "nvfp4_w13_scales"


def linear_row_scales(layer: torch.nn.Module) -> torch.Tensor:
    """The global multiplier of each output row of a fused layer: float32 [N]; shape () where it has only one.

    Reads `nvfp4_shard_scales`, float32 [shards], put aside below, and vLLM's `logical_widths`, rows of each shard.
    """
    import torch

    scales = getattr(layer, LINEAR_SCALES, None)
    if scales is None or bool((scales == scales[0]).all()):
        collapsed: torch.Tensor = layer.weight_global_scale.data
        return collapsed
    return scales.repeat_interleave(torch.tensor(layer.logical_widths))


def expert_row_scales(layer: torch.nn.Module) -> torch.Tensor:
    """The global multiplier of each row of the experts' gate and up: float32 [E, 2I]; [E] where both have the same."""
    scales = getattr(layer, EXPERT_SCALES, None)
    if scales is None or bool((scales == scales[:, :1]).all()):
        collapsed: torch.Tensor = layer.w13_weight_scale_2.data
        return collapsed
    return scales.repeat_interleave(layer.w13_weight.shape[1] // scales.shape[1], dim=1)


def _first_keep(kept: str, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a method put `read(layer)` on its layer as `kept` before it runs."""

    def make(original: Any) -> Any:
        def process(self: Any, layer: Any, *rest: Any) -> Any:
            setattr(layer, kept, read(layer).detach().float().clone())
            return original(self, layer, *rest)

        return process

    return make


def _needed() -> Need:
    from vllm.platforms import current_platform

    # On a card only our kernels read the vector.
    if not current_platform.is_cpu() and nvfp4_backend() != "hybrid":
        return Need(False, f"vLLM's own kernels serve: NVFP4_BACKEND is {nvfp4_backend()}")
    return Need(True, "vLLM keeps one global scale for a fused layer")


def _apply() -> None:
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as ct_moe,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4

    loaded, method = ("self", "layer"), "process_weights_after_loading"
    ct_experts = seams.require_attribute(ct_moe, "CompressedTensorsW4A4Nvfp4MoEMethod")
    mo_linear = seams.require_attribute(modelopt, "KNvfp4Static")
    mo_experts = seams.require_attribute(modelopt, "ModelOptNvFp4FusedMoE")
    # compressed-tensors stores divisors, and takes their reciprocals in float32 as well.
    keep = _first_keep(LINEAR_SCALES, lambda layer: layer.weight_global_scale.float().reciprocal())
    seams.replace_function(CompressedTensorsW4A4Fp4, method, keep, loaded)
    keep = _first_keep(EXPERT_SCALES, lambda layer: layer.w13_weight_global_scale.float().reciprocal())
    seams.replace_function(ct_experts, method, keep, loaded)
    keep = _first_keep(LINEAR_SCALES, lambda layer: layer.weight_scale_2)
    seams.replace_function(mo_linear, "process", keep, (*loaded, "role"))
    keep = _first_keep(EXPERT_SCALES, lambda layer: layer.w13_weight_scale_2)
    seams.replace_function(mo_experts, method, keep, loaded)


PATCH = Patch(
    name="fused-scales",
    platform=None,
    changes="four post-load steps of the NVFP4 schemes first put the vector of global scales aside for our kernels",
    why="the parts of a fused layer whose global scale is not the one kept are off by the ratio; vLLM only warns",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/quantization/modelopt.py",
    remove_when="vLLM hands its kernels a scale for each shard",
    needed=_needed,
    apply=_apply,
)
