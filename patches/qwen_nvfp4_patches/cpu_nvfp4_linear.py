"""NVFP4 linear layers on CPU: the checkpoint's weights, dequantized once at load, in the GEMM that BF16 layers use."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.activations import CpuActivations, cpu_activations, rounding_op
from qwen_nvfp4_patches.fused_scales import linear_row_scales
from qwen_nvfp4_patches.patch import Need, Patch, Platform

if TYPE_CHECKING:
    import torch

KERNEL = "CpuNvFp4LinearKernel"


@functools.cache
def kernel_class() -> Any:
    """`CpuNvFp4LinearKernel`, a vLLM NvFp4LinearKernel."""
    import torch
    from vllm.model_executor.kernels.linear import NvFp4LinearKernel
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4

    class CpuNvFp4LinearKernel(NvFp4LinearKernel):  # type: ignore[misc]
        """Bit for bit what the layer's BF16 dequantization computes, unless activations are rounded too."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            # The model's dtype: layers are built under it.
            self.dtype = torch.get_default_dtype()

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:  # noqa: ARG003
            return (True, None) if current_platform.is_cpu() else (False, "serves the CPU platform")

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:  # noqa: ARG003
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            scales = linear_row_scales(layer)
            dense = dequantize_nvfp4(layer.weight.data, layer.weight_scale.data, scales, dtype=self.dtype)
            layer.weight = torch.nn.Parameter(dense, requires_grad=False)
            del layer.weight_scale
            dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            rounds = cpu_activations() is CpuActivations.W4A4
            layer.nvfp4_input_scale = getattr(layer, "input_global_scale", None) if rounds else None
            if layer.nvfp4_input_scale is not None:
                rounding_op()

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if layer.nvfp4_input_scale is not None:
                x = torch.ops.qwen_nvfp4.round_to_nvfp4(x, layer.nvfp4_input_scale)
            return layer.cpu_linear(x, layer.weight, bias)

    return CpuNvFp4LinearKernel


def _needed() -> Need:
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    names = [kernel.__name__ for kernel in linear._POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU, [])]
    others = [name for name in names if name != KERNEL]
    if others:
        return Need(False, f"vLLM has {', '.join(others)} for CPU")
    return Need(True, "vLLM has no NVFP4 linear kernel for CPU")


def _apply() -> None:
    from vllm.logger import init_logger
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearLayerConfig
    from vllm.platforms import PlatformEnum

    kernel, logger = kernel_class(), init_logger("vllm.qwen_nvfp4_patches")
    if all(present is not kernel for present in linear._POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU, [])):
        linear.register_linear_kernel(kernel, PlatformEnum.CPU, "nvfp4")

    def with_weight_only(original: Any) -> Any:
        # Weight-only layers never reach the registry: their candidates are written into this function.
        def init_nvfp4_linear_kernel(use_a16: bool = False) -> Any:
            if not use_a16:
                return original(use_a16=False)
            logger.info_once("Using %s for NVFP4 GEMM", KERNEL)
            return kernel(NvFp4LinearLayerConfig())

        return init_nvfp4_linear_kernel

    seams.replace_function(linear, "init_nvfp4_linear_kernel", with_weight_only, parameters=("use_a16",))


PATCH = Patch(
    name="cpu-nvfp4-linear",
    platform=Platform.CPU,
    changes="registers CpuNvFp4LinearKernel for the CPU platform, and answers init_nvfp4_linear_kernel(use_a16=True)",
    why="the CPU backend has no NVFP4 linear kernel, so no NVFP4 model starts there",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/kernels/linear/__init__.py",
    remove_when="vLLM registers an NVFP4 linear kernel for CPU, weight-only layers included",
    serves_nvfp4=True,
    needed=_needed,
    apply=_apply,
)
