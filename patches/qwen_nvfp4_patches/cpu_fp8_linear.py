"""FP8 linear layers on CPU with BF16 activations: the weights of mixed NVFP4 checkpoints, dequantized once at load."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.activations import CpuActivations, cpu_activations
from qwen_nvfp4_patches.patch import Need, Patch, Platform

if TYPE_CHECKING:
    import torch

KERNEL = "CpuFp8WeightOnlyLinearKernel"


@functools.cache
def kernel_class() -> Any:
    """`CpuFp8WeightOnlyLinearKernel`, a vLLM FP8ScaledMMLinearKernel for per-tensor and per-channel weights."""
    import torch
    from vllm.model_executor.kernels.linear import FP8ScaledMMLinearKernel
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    class CpuFp8WeightOnlyLinearKernel(FP8ScaledMMLinearKernel):  # type: ignore[misc]
        """Bit for bit what the layer's BF16 dequantization computes."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:  # noqa: ARG003
            return (True, None) if current_platform.is_cpu() else (False, "serves the CPU platform")

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            shape = c.weight_quant_key.scale.group_shape
            if shape.is_per_tensor() or shape.is_per_channel() or shape.is_per_token():
                return True, None
            return False, "takes per-tensor and per-channel weight scales"

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            weight, scale = layer.weight.data.t(), layer.weight_scale.data.float()
            # vLLM hands the weight over transposed; its scale is one number or one for each output row.
            column = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
            dense = (weight.float() * column).to(self.config.out_dtype).contiguous()
            layer.weight = torch.nn.Parameter(dense, requires_grad=False)
            del layer.weight_scale
            dispatch_cpu_unquantized_gemm(layer, remove_weight=True)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return layer.cpu_linear(x, layer.weight, bias)

        def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
            raise NotImplementedError(f"{KERNEL} multiplies in apply_weights")

    return CpuFp8WeightOnlyLinearKernel


def scales_by_row(weight_scale: torch.Tensor, logical_widths: list[int]) -> torch.Tensor:
    """The scale of each output row, float32 [N], of a fused per-tensor layer; shape () where all parts share one.

    weight_scale: float32 () or [shards]; vLLM leaves float8's lowest value in the places that a checkpoint of already
    fused layers does not fill. logical_widths: rows of each shard.
    """
    import torch

    filled = weight_scale.reshape(-1)
    filled = filled[filled > torch.finfo(torch.float8_e4m3fn).min]
    if filled.numel() < weight_scale.numel() or bool((filled == filled[0]).all()):
        return filled.max()
    return filled.repeat_interleave(torch.tensor(logical_widths))


def _needed() -> Need:
    if cpu_activations() is CpuActivations.W4A4:
        return Need(False, "vLLM's CPU kernels quantize activations to FP8, as the setting asks")
    return Need(True, "vLLM's CPU kernels quantize the activations of FP8 layers; the setting says weights only")


def _apply() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils import w8a8_utils
    from vllm.platforms import PlatformEnum

    def without_requantizing(_original: Any) -> Any:
        # vLLM would round the weights again to the largest of the scales, with an operator that its CPU build lacks.
        def requantize_with_max_scale(weight: Any, weight_scale: Any, logical_widths: list[int]) -> tuple[Any, Any]:
            return scales_by_row(weight_scale, logical_widths), weight

        return requantize_with_max_scale

    parameters = ("weight", "weight_scale", "logical_widths")
    seams.replace_function(w8a8_utils, "requantize_with_max_scale", without_requantizing, parameters)
    seams.add_once(linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU], kernel_class(), first=True)


PATCH = Patch(
    name="cpu-fp8-linear",
    platform=Platform.CPU,
    changes="puts CpuFp8WeightOnlyLinearKernel first among the FP8 linear kernels for CPU; requantize_with_max_scale "
    "keeps each part's own scale",
    why="mixed checkpoints would quantize activations in their FP8 layers alone, and fail to load where the parts of a "
    "fused layer have different scales",
    upstream=None,
    remove_when="vLLM offers weight-only FP8 linear layers on every CPU",
    needed=_needed,
    apply=_apply,
)
