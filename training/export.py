"""From training parameters to checkpoints: published names, BF16 or NVFP4 in both packagings."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_nvfp4_serve.kernels.nvfp4 import (
    Nvfp4Tensor,
    divisor_from_global_scale,
    global_scale_from_divisor,
    quantize_nvfp4,
)
from training.checkpoint import dequantized
from training.config import CONV_KERNEL, EPS, HEAD_DIM, LINEAR_HEAD_DIM, ROPE_THETA, ModelConfig
from training.quant import E2M1_MAX, E4M3_MAX
from training.tokenizer import REFERENCE_DIR, load

CONTEXT = 4096
Json = dict[str, Any]
# Modules that share one global scale because engines fuse them into one product.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"))
QUANTIZED_LEAVES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj",
)
IGNORE = (
    "lm_head",
    "re:.*embed_tokens$",
    "re:.*mlp\\.gate$",
    "re:.*shared_expert_gate$",
    "re:.*linear_attn\\.in_proj_b$",
    "re:.*linear_attn\\.in_proj_a$",
    "re:.*linear_attn\\.conv1d$",
    "mtp.fc",
)


def is_quantized(name: str) -> bool:
    """True for the training parameters that NVFP4 checkpoints store in four bits."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1] in QUANTIZED_LEAVES


def published_name(name: str) -> str:
    """The checkpoint's name of a training parameter."""
    return name if name.startswith(("mtp.", "lm_head.")) else f"model.language_model.{name}"


def text_config(config: ModelConfig) -> Json:
    """`text_config` of config.json."""
    common: Json = {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": _token("<|im_end|>"),
        "full_attention_interval": config.full_attention_interval,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "layer_types": [
            "full_attention" if config.is_full_attention(index) else "linear_attention"
            for index in range(config.layers)
        ],
        "linear_conv_kernel_dim": CONV_KERNEL,
        "linear_key_head_dim": LINEAR_HEAD_DIM,
        "linear_num_key_heads": config.linear_key_heads,
        "linear_num_value_heads": config.linear_value_heads,
        "linear_value_head_dim": LINEAR_HEAD_DIM,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": CONTEXT,
        "model_type": "qwen3_5_moe_text" if config.experts else "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": EPS,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": int(ROPE_THETA),
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": config.vocab,
    }
    if not config.experts:
        return common | {"intermediate_size": config.intermediate}
    return common | {
        "moe_intermediate_size": config.intermediate,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "shared_expert_intermediate_size": config.shared_intermediate,
    }


def _token(text: str) -> int:
    identifier = load().token_to_id(text)
    if identifier is None:
        raise ValueError(f"the tokenizer has no {text}")
    return int(identifier)


def model_config(config: ModelConfig, quantization: Json | None = None) -> Json:
    """config.json. The vision tower is declared small and absent: serve with `--language-model-only`."""
    base = "qwen3_5_moe" if config.experts else "qwen3_5"
    result: Json = {
        "architectures": [
            "Qwen3_5MoeForConditionalGeneration" if config.experts else "Qwen3_5ForConditionalGeneration"
        ],
        "dtype": "bfloat16",
        "image_token_id": _token("<|image_pad|>"),
        "model_type": base,
        "text_config": text_config(config),
        "tie_word_embeddings": False,
        "video_token_id": _token("<|video_pad|>"),
        "vision_end_token_id": _token("<|vision_end|>"),
        "vision_start_token_id": _token("<|vision_start|>"),
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "in_channels": 3,
            "intermediate_size": 128,
            "model_type": base + "_vision",
            "num_heads": 1,
            "num_position_embeddings": 64,
            "out_hidden_size": config.hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
    return result | ({"quantization_config": quantization} if quantization else {})


def compressed_tensors_config() -> Json:
    """`quantization_config` of a compressed-tensors NVFP4 checkpoint (W4A4)."""
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    return {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": scheme | {"dynamic": False, "observer": "minmax"},
                "input_activations": scheme | {"dynamic": "local", "observer": "minmax"},
                "format": "nvfp4-pack-quantized",
            }
        },
        "format": "nvfp4-pack-quantized",
        "ignore": list(IGNORE),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with stacked experts as one gate, up and down matrix per expert."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            for index, both in enumerate(tensor):
                gate, up = both.chunk(2)
                result[f"{stem}.{index}.gate_proj.weight"] = gate
                result[f"{stem}.{index}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            result |= {f"{stem}.{index}.down_proj.weight": down for index, down in enumerate(tensor)}
        else:
            result[name] = tensor
    return result


def _fused_group(name: str) -> str:
    stem, leaf = name.removesuffix(".weight").rsplit(".", 1)
    shared = next((group for group in FUSED if leaf in group), (leaf,))
    return f"{stem}.{'+'.join(shared)}"


def quantize(tensors: dict[str, Tensor]) -> tuple[dict[str, Nvfp4Tensor], dict[str, Tensor]]:
    """Quantized matrices by module name, and all other tensors; fused modules share their global scale."""
    split = split_experts(tensors)
    amax: dict[str, float] = {}
    for name, tensor in split.items():
        if is_quantized(name):
            group = _fused_group(name)
            amax[group] = max(amax.get(group, 0.0), float(tensor.abs().max()))
    packed = {
        name.removesuffix(".weight"): quantize_nvfp4(tensor.float(), amax[_fused_group(name)] / (E2M1_MAX * E4M3_MAX))
        for name, tensor in split.items()
        if is_quantized(name)
    }
    return packed, {name: tensor for name, tensor in split.items() if not is_quantized(name)}


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """BF16 tensors under their published names; decay parameters stay in float32."""
    return {
        published_name(name): tensor.detach()
        .to(torch.float32 if name.endswith("A_log") else torch.bfloat16)
        .contiguous()
        for name, tensor in state.items()
    }


def _write(folder: Path, config: Json, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stops = [_token("<|im_end|>"), _token("<|endoftext|>")]
    # vLLM takes its default temperature from here: an answer that can be right or wrong is not drawn at random.
    generation = {
        "do_sample": False,
        "temperature": 0.0,
        "eos_token_id": stops,
        "pad_token_id": _token("<|endoftext|>"),
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if folder != REFERENCE_DIR:
            shutil.copyfile(REFERENCE_DIR / name, folder / name)


def write_bf16(folder: Path, config: ModelConfig, state: dict[str, Tensor]) -> None:
    """A BF16 checkpoint with per-expert matrices."""
    _write(folder, model_config(config), split_experts(published(state)))


def write_compressed_tensors(
    folder: Path, config: ModelConfig, state: dict[str, Tensor], input_amax: Mapping[str, float]
) -> None:
    """An NVFP4 checkpoint in compressed-tensors form: global scales are stored as divisors.

    input_amax: the largest input of each quantized module, by published name.
    """
    packed, tensors = quantize(published(state))
    for module, weight in packed.items():
        tensors[f"{module}.weight_packed"] = weight.packed
        tensors[f"{module}.weight_scale"] = weight.block_scale
        tensors[f"{module}.weight_global_scale"] = divisor_from_global_scale(weight.global_scale).reshape(1)
        tensors[f"{module}.input_global_scale"] = torch.tensor([E2M1_MAX * E4M3_MAX / input_amax[module]])
    _write(folder, model_config(config, compressed_tensors_config()), tensors)


def modelopt_config() -> Json:
    """`quantization_config` of a ModelOpt NVFP4 checkpoint (W4A4)."""
    exclude = [
        "lm_head",
        "*embed_tokens",
        "*mlp.gate",
        "*shared_expert_gate",
        "*in_proj_b",
        "*in_proj_a",
        "*conv1d",
        "mtp.fc",
    ]
    return {
        "exclude_modules": exclude,
        "group_size": 16,
        "ignore": exclude,
        "kv_cache_quant_algo": None,
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    }


def convert_to_modelopt(source: Path, folder: Path) -> None:
    """Rewrite a compressed-tensors checkpoint in ModelOpt form: the same codes and block scales."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(str(source / "model.safetensors")).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            tensors[f"{module}.weight"] = tensor
        elif kind == "weight_global_scale":
            tensors[f"{module}.weight_scale_2"] = global_scale_from_divisor(tensor).reshape(())
        elif kind == "input_global_scale":
            tensors[f"{module}.input_scale"] = global_scale_from_divisor(tensor).reshape(())
        else:
            tensors[name] = tensor
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": modelopt_config()}
    _write(folder, config, tensors)


def convert_to_bf16(source: Path, folder: Path) -> None:
    """Rewrite a compressed-tensors checkpoint with every weight dequantized to BF16."""
    tensors = {
        name: tensor if name.endswith("A_log") else tensor.to(torch.bfloat16)
        for name, tensor in dequantized(load_file(str(source / "model.safetensors"))).items()
    }
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")
    _write(folder, config, tensors)
