"""The JSON beside the weights: config.json, generation_config.json, and what each quantization tool declares."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from qwen_nvfp4_serve.synthetic.layout import MERGE, PATCH, TEMPORAL, TEXT, Role, Weight, weights_of
from qwen_nvfp4_serve.synthetic.spec import CONV_KERNEL, GDN_HEAD_DIM, CheckpointSpec, Kind, Precision, Writer
from qwen_nvfp4_serve.synthetic.tokenizer import token_id

Json = dict[str, Any]


def model_config(spec: CheckpointSpec) -> Json:
    """config.json. A dequantized checkpoint declares no quantization."""
    dims = spec.architecture
    moe = dims.kind is Kind.MOE
    base = "qwen3_5_moe" if moe else "qwen3_5"
    config: Json = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if moe else "Qwen3_5ForConditionalGeneration"],
        "model_type": base,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "text_config": {"model_type": f"{base}_text", **_text_config(spec)},
        "vision_config": {"model_type": f"{base}_vision", **_vision_config(spec)},
    }
    quantization = None if spec.dequantized else quantization_config(spec)
    if quantization:
        config["quantization_config"] = quantization
    return config


def _text_config(spec: CheckpointSpec) -> Json:
    dims = spec.architecture
    rotary_pairs = dims.head_dim // 8
    config: Json = {
        "dtype": "bfloat16",
        "hidden_size": dims.hidden,
        "num_hidden_layers": dims.layers,
        "full_attention_interval": dims.attention_interval,
        "layer_types": list(dims.layer_types),
        "num_attention_heads": dims.q_heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "attn_output_gate": True,
        "attention_bias": False,
        "linear_num_key_heads": dims.gdn_k_heads,
        "linear_num_value_heads": dims.gdn_v_heads,
        "linear_key_head_dim": GDN_HEAD_DIM,
        "linear_value_head_dim": GDN_HEAD_DIM,
        "linear_conv_kernel_dim": CONV_KERNEL,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": dims.vocab,
        "max_position_embeddings": dims.max_position,
        "mtp_num_hidden_layers": 1 if spec.mtp else 0,
        "tie_word_embeddings": False,
        "eos_token_id": token_id("<|endoftext|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": _mrope_section(rotary_pairs),
        },
    }
    if dims.kind is Kind.DENSE:
        return config | {"intermediate_size": dims.intermediate}
    return config | {
        "num_experts": dims.experts,
        "num_experts_per_tok": dims.experts_per_token,
        "moe_intermediate_size": dims.expert_intermediate,
        "shared_expert_intermediate_size": dims.shared_intermediate,
    }


def _mrope_section(pairs: int) -> list[int]:
    """Rotary pairs for time, height and width; 32 pairs give the published [11, 11, 10]."""
    third = pairs // 3
    rest = pairs - 3 * third
    return [third + (rest > 0), third + (rest > 1), third]


def _vision_config(spec: CheckpointSpec) -> Json:
    dims = spec.architecture
    return {
        "depth": dims.vision_depth,
        "hidden_size": dims.vision_hidden,
        "num_heads": dims.vision_heads,
        "intermediate_size": dims.vision_intermediate,
        "out_hidden_size": dims.hidden,
        "num_position_embeddings": dims.vision_positions,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "deepstack_visual_indexes": [],
    }


def generation_config() -> Json:
    """generation_config.json with the family's recommended sampling."""
    stop = [token_id("<|im_end|>"), token_id("<|endoftext|>")]
    return {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": stop,
        "pad_token_id": token_id("<|endoftext|>"),
    }


def quantization_config(spec: CheckpointSpec) -> Json | None:
    """`quantization_config` of config.json; None where everything is BF16."""
    style = spec.rules()
    if style.writer is Writer.COMPRESSED_TENSORS:
        return _compressed_tensors(spec)
    if style.writer is Writer.MODELOPT:
        return _modelopt(spec)
    return None


def hf_quant_config(spec: CheckpointSpec) -> Json | None:
    """ModelOpt's own file of the same content, hf_quant_config.json; None for other tools."""
    if spec.rules().writer is not Writer.MODELOPT or spec.dequantized:
        return None
    declared = _modelopt(spec)
    quantization: Json = {
        "quant_algo": declared["quant_algo"],
        "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in declared else None,
        "group_size": 16,
        "exclude_modules": declared["ignore"],
    }
    if "quantized_layers" in declared:
        quantization["quantized_layers"] = declared["quantized_layers"]
    return {"producer": declared["producer"], "quantization": quantization}


def _linears(spec: CheckpointSpec) -> list[tuple[Weight, Precision]]:
    style = spec.rules()
    matrices = (weight for weight in weights_of(spec) if weight.role is not Role.OTHER)
    return [(weight, weight.precision(style)) for weight in matrices]


def _kept_modules(spec: CheckpointSpec) -> list[str]:
    """Linear modules of the language model that stay in BF16, by name."""
    return [
        weight.module
        for weight, precision in _linears(spec)
        if precision is Precision.BF16 and (weight.module.startswith(TEXT) or weight.role is Role.LM_HEAD)
    ]


_NVFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_CT_GROUPS: dict[Precision, Json] = {
    Precision.NVFP4: {
        "format": "nvfp4-pack-quantized",
        "weights": _NVFP4_ARGS | {"dynamic": False},
        "input_activations": _NVFP4_ARGS | {"dynamic": "local"},
    },
    Precision.NVFP4_A16: {
        "format": "nvfp4-pack-quantized",
        "weights": _NVFP4_ARGS | {"dynamic": False},
        "input_activations": None,
    },
    Precision.FP8_CHANNEL: {
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    },
}


def _compressed_tensors(spec: CheckpointSpec) -> Json:
    modules: dict[Precision, list[str]] = {}
    for weight, precision in _linears(spec):
        if precision is not Precision.BF16:
            modules.setdefault(precision, []).append(weight.module)
    groups: Json = {}
    for index, (precision, names) in enumerate(modules.items()):
        # "Linear" names a class, and the head is of another one.
        targets = ["Linear", *_patterns(set(names) & {"lm_head"})] if len(modules) == 1 else _patterns(names)
        groups[f"group_{index}"] = {"targets": targets, **_CT_GROUPS[precision], "output_activations": None}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*_kept_modules(spec), "re:.*visual.*", "re:^mtp.*"],
        "kv_cache_scheme": None,
    }


def _patterns(modules: Iterable[str]) -> list[str]:
    """One regular expression for each kind of module among `modules`, layer and expert numbers left open.

    The server knows the modules by other prefixes, so the expressions begin at the layer.
    """
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", module.removeprefix(f"{TEXT}.")) for module in modules)
    return ["re:.*" + re.escape(kind).replace(r"\.N\.", r"\.\d+\.") + "$" for kind in kinds]


def _modelopt(spec: CheckpointSpec) -> Json:
    linears = [(weight, precision) for weight, precision in _linears(spec) if precision is not Precision.BF16]
    used = {precision for _, precision in linears}
    config: Json = {
        "quant_method": "modelopt",
        "producer": {"name": "modelopt", "version": "0.46.0"},
        "ignore": [*_kept_modules(spec), "model.visual*", "mtp*"],
    }
    if len(used) == 1 and Precision.FP8_TENSOR not in used:
        precision = used.pop()
        arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        inputs = arguments if precision is Precision.NVFP4 else None
        return config | {
            "quant_algo": _MODELOPT_ALGORITHMS[precision]["quant_algo"],
            "group_size": 16,
            "config_groups": {"group_0": {"input_activations": inputs, "weights": arguments, "targets": ["Linear"]}},
        }
    # Routed experts are declared once for a layer, under the name of their parent.
    layers = {
        weight.module.split(".experts.")[0] + ".experts" if weight.stack else weight.module: _MODELOPT_ALGORITHMS[
            precision
        ]
        for weight, precision in linears
    }
    return config | {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "quantized_layers": layers,
    }


_MODELOPT_ALGORITHMS: dict[Precision, Json] = {
    Precision.FP8_TENSOR: {"quant_algo": "FP8"},
    Precision.NVFP4: {"quant_algo": "NVFP4", "group_size": 16},
    Precision.NVFP4_A16: {"quant_algo": "W4A16_NVFP4", "group_size": 16},
}
