"""vLLM's own mixture-of-experts block with random NVFP4 weights, and what it should compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from qwen_nvfp4_serve.kernels import nvfp4_moe
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, reference
from qwen_nvfp4_serve.synthetic import CheckpointSpec
from qwen_nvfp4_serve.synthetic.config import model_config

PREFIX = "language_model.model.layers.0.mlp"


def vllm_config(style: str, *, ignore: str | None = None) -> Any:
    """A vLLM configuration for the embedded model in a style of checkpoint."""
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = model_config(CheckpointSpec(style=style))
    quantization = config["quantization_config"]
    if ignore:
        quantization["ignore"] = [*quantization["ignore"], ignore]
    if quantization["quant_method"] == "compressed-tensors":
        quant: Any = CompressedTensorsConfig.from_config(quantization)
    elif quantization["quant_algo"] == "MIXED_PRECISION":
        quant = modelopt.ModelOptMixedPrecisionConfig.from_config(quantization)
    else:
        quant = modelopt.ModelOptNvFp4Config.from_config(quantization)
    quant.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    found = VllmConfig()
    found.quant_config = quant
    found.model_config = SimpleNamespace(  # type: ignore[assignment]
        hf_text_config=SimpleNamespace(**config["text_config"]), dtype=torch.bfloat16, quantization=None
    )
    return found


class Loaded:
    """A block of vLLM's with random NVFP4 weights of unequal scales, and what it should compute."""

    def __init__(self, style: str, *, ignore: str | None = None) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock

        self.config = vllm_config(style, ignore=ignore)
        with set_current_vllm_config(self.config):
            self.block = Qwen3NextSparseMoeBlock(self.config, prefix=PREFIX)
            fill(self.block)
            self.weights, self.shared = self.experts(), self.shared_expert()
            self.input_scales = None if "a16" in style or "mixed" in style else self.declared_input_scales()
            for _, module in list(self.block.named_modules()):
                method = getattr(module, "quant_method", None)
                if "Unquantized" in type(method).__name__:
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
                elif method is not None:
                    method.process_weights_after_loading(module)
        self.top_k = self.block.experts.router.top_k

    def experts(self) -> ExpertWeights:
        """The routed experts as the checkpoint has them."""
        layer = self.block.experts.routed_experts
        gate, up = multipliers(layer, "w13").unbind(1)
        return nvfp4_moe.prepare_experts(
            w13=packed(layer, "w13").clone(),
            w13_block_scale=layer.w13_weight_scale.data.clone(),
            w2=packed(layer, "w2").clone(),
            w2_block_scale=layer.w2_weight_scale.data.clone(),
            gate_scale=gate,
            up_scale=up,
            down_scale=multipliers(layer, "w2"),
        )

    def declared_input_scales(self) -> Any:
        """Multipliers of the activations, as the checkpoint has them: of gate and up the larger one."""
        layer = self.block.experts.routed_experts
        divisors = named(layer, "w13_input_global_scale")
        if divisors is not None:
            first, second = 1 / divisors.data, 1 / layer.w2_input_global_scale.data
        else:
            first, second = layer.w13_input_scale.data.clone(), layer.w2_input_scale.data.clone()
        return torch.stack([first.amax(1), second]).float()

    def shared_expert(self) -> ExpertWeights | None:
        """The shared expert as the checkpoint has it, None where it is not NVFP4."""
        mlp = self.block.shared_expert
        if not hasattr(mlp.down_proj, "weight_scale"):
            return None
        first, second = mlp.gate_up_proj, mlp.down_proj
        gate, up = multipliers(first, "").flatten()
        return nvfp4_moe.prepare_experts(
            w13=packed(first, "").clone().unsqueeze(0),
            w13_block_scale=first.weight_scale.data.clone().unsqueeze(0),
            w2=packed(second, "").clone().unsqueeze(0),
            w2_block_scale=second.weight_scale.data.clone().unsqueeze(0),
            gate_scale=gate.reshape(1),
            up_scale=up.reshape(1),
            down_scale=multipliers(second, "").reshape(1),
        )

    def run(self, x: Any) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        with set_current_vllm_config(self.config), set_forward_context(None, self.config):
            return self.block(x)

    def expected(self, x: Any) -> Any:
        """The whole block by its definition: values and what a result may be off."""
        return reference.moe_block(
            x,
            self.block.gate.weight.data,
            self.weights,
            top_k=self.top_k,
            shared=self.shared,
            shared_gate=self.block.shared_expert_gate.weight.data,
        )


def named(layer: Any, name: str) -> Any:
    return getattr(layer, name, None)


def packed(layer: Any, part: str) -> Any:
    prefix = f"{part}_" if part else ""
    found = named(layer, f"{prefix}weight_packed")
    return (named(layer, f"{prefix}weight") if found is None else found).data


def multipliers(layer: Any, part: str) -> Any:
    """Global scales as multipliers, whichever way round the checkpoint's format stores them."""
    prefix = f"{part}_" if part else ""
    divisors = named(layer, f"{prefix}weight_global_scale")
    if divisors is not None:
        return divisors.data.float().reciprocal()
    return named(layer, f"{prefix}weight_scale_2").data.float().clone()


def fill(block: Any) -> None:
    """Random values for every parameter, all global scales different, as a loader would have left them."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in block.named_parameters():
        data = parameter.data
        if data.dtype is torch.uint8:
            data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=generator))
        elif data.dtype is torch.float8_e4m3fn:
            bytes_ = torch.randint(40, 110, data.shape, dtype=torch.uint8, generator=generator)
            data.view(torch.uint8).copy_(bytes_)
        elif data.dtype is torch.float32:
            drawn = torch.rand(data.shape, generator=generator, dtype=torch.float32) * 3e-4 + 3e-4
            data.copy_(drawn.reciprocal() if name.endswith("_global_scale") else drawn)
        else:
            data.copy_(torch.randn(data.shape, generator=generator) * 0.1)


def tokens(count: int, seed: int = 0) -> Any:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_within(y: Any, expected: Any, *, roundings: int = 1) -> None:
    """Within the bound of one rounding at the end, or of some more in between."""
    slack = (roundings - 1) * expected.value.abs().amax(-1, keepdim=True) * 2.0**-7
    assert ((y.double() - expected.value).abs() <= expected.bound + slack).all()
