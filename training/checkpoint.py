"""Reads a compressed-tensors NVFP4 checkpoint back into training parameters."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4, global_scale_from_divisor
from training.config import MODELS, ModelConfig

_PREFIX = "model.language_model."


def config_of(folder: Path) -> ModelConfig:
    """The training configuration whose dimensions config.json declares."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    for config in MODELS.values():
        same = (config.layers, config.experts, config.kv_heads) == (
            text["num_hidden_layers"],
            text.get("num_experts", 0),
            text["num_key_value_heads"],
        )
        if same and config.hidden == text["hidden_size"]:
            return config
    raise ValueError(f"no reference model has the dimensions of {folder}/config.json")


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors with every packed matrix as float32 under `….weight`, scales gone."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            scale = global_scale_from_divisor(tensors[f"{module}.weight_global_scale"])
            result[f"{module}.weight"] = dequantize_nvfp4(tensor, tensors[f"{module}.weight_scale"], scale)
        elif not name.endswith((".weight_scale", ".weight_global_scale", ".input_global_scale")):
            result[name] = tensor.float()
    return result


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Training parameters of published, dequantized tensors: prefixes off, experts stacked."""
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        short = name.removeprefix(_PREFIX)
        if ".experts." not in short:
            result[short] = tensor
            continue
        stem, _, rest = short.partition(".experts.")
        index, leaf, _ = rest.split(".")
        experts[stem][leaf][int(index)] = tensor
    for stem, leaves in experts.items():
        gate, up, down = (
            torch.stack([leaves[leaf][index] for index in range(len(leaves[leaf]))])
            for leaf in ("gate_proj", "up_proj", "down_proj")
        )
        result[f"{stem}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        result[f"{stem}.experts.down_proj"] = down
    return result


def read(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and float32 training parameters of a compressed-tensors NVFP4 checkpoint."""
    return config_of(folder), stacked(dequantized(load_file(str(folder / "model.safetensors"))))


def input_amax_of(folder: Path) -> dict[str, float]:
    """The largest inputs that the checkpoint's input scales stand for, by module."""
    tensors = load_file(str(folder / "model.safetensors"))
    suffix = ".input_global_scale"
    return {
        name.removesuffix(suffix): 6.0 * 448.0 / float(tensor)
        for name, tensor in tensors.items()
        if name.endswith(suffix)
    }
