"""NVFP4 experts on CPU: dequantized once at load, then vLLM's own BF16 CPU experts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.activations import CpuActivations, cpu_activations, rounding_op
from qwen_nvfp4_patches.fused_scales import expert_row_scales
from qwen_nvfp4_patches.patch import Need, Patch, Platform

if TYPE_CHECKING:
    import torch


def dequantize_experts(layer: torch.nn.Module, dtype: torch.dtype) -> None:
    """Replaces the packed `w13_weight` [E, 2I, H/2] and `w2_weight` [E, H, I/2] of `layer` by dense ones in `dtype`.

    Reads `*_weight_scale` (E4M3, a scale for 16 columns) and `*_weight_scale_2` (float32 [E], multipliers); for gate
    and up, the multipliers put aside before vLLM dropped one. One expert at a time, since the float32 intermediates
    are eight times the size of the packed weights.
    """
    import torch
    from vllm.model_executor.utils import replace_parameter

    from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4

    for name, overall in (("w13_weight", expert_row_scales(layer)), ("w2_weight", layer.w2_weight_scale_2.data)):
        packed, scales = getattr(layer, name).data, getattr(layer, f"{name}_scale").data
        dense = torch.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=dtype)
        for expert in range(packed.shape[0]):
            dense[expert] = dequantize_nvfp4(packed[expert], scales[expert], overall[expert], dtype=dtype)
        replace_parameter(layer, name, dense)


def _weight_only(parent: Any) -> Any:
    """A subclass of vLLM's CPU experts class `parent` that takes NVFP4 weights."""
    from vllm.logger import init_logger
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static

    logger = init_logger("vllm.qwen_nvfp4_patches")

    class CpuNvFp4Experts(parent):  # type: ignore[misc]
        """Bit for bit what the experts' BF16 dequantization computes."""

        def __init__(self, moe_config: Any, quant_config: Any) -> None:
            super().__init__(moe_config, quant_config)
            logger.info_once("Using %s on %s for NVFP4 MoE", "CpuNvFp4Experts", parent.__name__)

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return bool(weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic))

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            dequantize_experts(layer, self.moe_config.in_dtype)
            super().process_weights_after_loading(layer)

    return CpuNvFp4Experts


@functools.cache
def rounded_experts_op() -> Any:
    """The operator `qwen_nvfp4::rounded_experts`, opaque to torch.compile: a gated SiLU FFN, expert by expert in plain
    PyTorch, with activations rounded to NVFP4 before each product. For comparing numerics, not for speed.

    x [M, H], w1 [E, 2I, H], w2 [E, H, I] in BF16; weights [M, top-k]; ids [M, top-k], integers; the input scales of
    both products, float32 multipliers of shape (). Returns [M, H] in x's dtype, summed in float32.
    """
    import torch
    from torch.nn import functional

    from qwen_nvfp4_serve.kernels import ops

    rounded = rounding_op()

    def rounded_experts(  # noqa: PLR0917 - an operator's schema
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        first_scale: torch.Tensor,
        second_scale: torch.Tensor,
    ) -> torch.Tensor:
        inputs = rounded(x, first_scale)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(inputs[token], w1[expert]).chunk(2, dim=-1)
            middle = rounded(functional.silu(gate) * up, second_scale)
            result = functional.linear(middle, w2[expert]).float()
            total.index_add_(0, token, result * weights[token, place].float().unsqueeze(-1))
        return total.to(x.dtype)

    def like_x(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    tensors = ("x", "w1", "w2", "weights", "ids", "first_scale", "second_scale")
    schema = f"({', '.join(f'Tensor {name}' for name in tensors)}) -> Tensor"
    return ops.register("rounded_experts", schema, rounded_experts, like_x)


def _rounding(parent: Any) -> Any:
    """A subclass of `parent` whose activations are rounded to NVFP4 too."""
    import torch
    from vllm.logger import init_logger
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static

    logger = init_logger("vllm.qwen_nvfp4_patches")

    class CpuNvFp4W4A4Experts(parent):  # type: ignore[misc]
        """What a W4A4 kernel computes, with BF16 products."""

        def __init__(self, moe_config: Any, quant_config: Any) -> None:
            super().__init__(moe_config, quant_config)
            logger.info_once("Using %s for NVFP4 MoE", "CpuNvFp4W4A4Experts")

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return bool(weight_key == kNvfp4Static and activation_key == kNvfp4Dynamic)

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return bool(activation == MoEActivation.SILU)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            dequantize_experts(layer, self.moe_config.in_dtype)
            rounded_experts_op()

        def apply(  # noqa: PLR0917 - vLLM's signature
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            *_: Any,
            apply_router_weight_on_input: bool = False,
            **__: Any,
        ) -> None:
            # The router's weights are on the input already where vLLM says so.
            weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
            scales = self.a1_gscale.reciprocal(), self.a2_gscale.reciprocal()
            output.copy_(torch.ops.qwen_nvfp4.rounded_experts(hidden_states, w1, w2, weights, topk_ids, *scales))

    return CpuNvFp4W4A4Experts


@functools.cache
def experts_classes() -> tuple[Any, ...]:
    """Our experts classes in the order of preference: activation-rounding first when the setting asks for it."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    names = ("X86CPUUnquantizedExperts", "ArmCPUUnquantizedExperts", "CPUUnquantizedExperts")
    parents = [seams.require_attribute(cpu_moe, name) for name in names]
    rounding = (_rounding(parents[-1]),) if cpu_activations() is CpuActivations.W4A4 else ()
    return (*rounding, *(_weight_only(parent) for parent in parents))


def _needed() -> Need:
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return Need(False, "Triton is present, so vLLM's own NVFP4 emulation can run")
    return Need(True, "vLLM's NVFP4 experts need a GPU or Triton")


def _apply() -> None:
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    def with_cpu_experts(original: Any) -> Any:
        def backend_to_kernel_cls(backend: Any) -> list[Any]:
            # EMULATION is the backend whose converter hands the checkpoint's layout through untouched.
            return list(experts_classes()) if backend is nvfp4.NvFp4MoeBackend.EMULATION else list(original(backend))

        return backend_to_kernel_cls

    seams.replace_function(nvfp4, "backend_to_kernel_cls", with_cpu_experts, parameters=("backend",))


PATCH = Patch(
    name="cpu-nvfp4-moe",
    platform=Platform.CPU,
    changes="oracle.nvfp4.backend_to_kernel_cls answers EMULATION with CpuNvFp4Experts",
    why="no NVFP4 experts implementation runs without a GPU or Triton, so no NVFP4 MoE model starts on CPU",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/fused_moe/oracle/nvfp4.py",
    remove_when="vLLM selects NVFP4 experts for CPU by itself",
    serves_nvfp4=True,
    needed=_needed,
    apply=_apply,
)
