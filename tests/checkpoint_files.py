"""Checkpoint folders for tests: real headers over sparse files, so that a 20 GB model takes no disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from qwen_nvfp4_serve.checkpoint import Report, inspect_folder

BITS = {"U8": 8, "F8_E4M3": 8, "BF16": 16, "F32": 32, "I32": 32, "F16": 16}
Shape = tuple[str, tuple[int, ...]]

LAYER = "model.language_model.layers.0"
NVFP4_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}


def write_shard(path: Path, tensors: Mapping[str, Shape], values: Mapping[str, float] | None = None) -> int:
    """Write a safetensors file of zeros, F32 scalars in `values` apart; returns the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
        for name, value in (values or {}).items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(struct.pack("<f", value))
    return offset


def write_config(folder: Path, **keys: Any) -> None:
    """Write config.json of a dense model with the 27B's dims; `keys` are added at its top level."""
    text = {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 17408, "linear_num_value_heads": 48}
    text |= {"num_attention_heads": 24, "num_key_value_heads": 4, "max_position_embeddings": 262144}
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **text}, **keys}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def packed_ct(module: str, rows: int, columns: int) -> dict[str, Shape]:
    """The tensors of an NVFP4 matrix as compressed-tensors names them."""
    return {
        f"{module}.weight_packed": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_global_scale": ("F32", (1,)),
        f"{module}.input_global_scale": ("F32", (1,)),
    }


def packed_modelopt(module: str, rows: int, columns: int) -> dict[str, Shape]:
    """The tensors of an NVFP4 matrix as ModelOpt names them."""
    return {
        f"{module}.weight": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_scale_2": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }


def plain(module: str, rows: int, columns: int) -> dict[str, Shape]:
    """The tensor of a BF16 matrix."""
    return {f"{module}.weight": ("BF16", (rows, columns))}


GDN = f"{LAYER}.linear_attn"
GDN_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
GDN_ROWS = {"in_proj_qkv": 10240, "in_proj_z": 6144, "in_proj_b": 48, "in_proj_a": 48}


def gdn_plain() -> dict[str, Shape]:
    """The four input projections of a GDN layer in BF16."""
    return {name: shape for part in GDN_PARTS for name, shape in plain(f"{GDN}.{part}", GDN_ROWS[part], 5120).items()}


def inspect_tensors(
    folder: Path, tensors: dict[str, Shape], *, values: dict[str, float] | None = None, **config: Any
) -> Report:
    """The report on a one-shard checkpoint of these tensors. speculative_tokens and vision are for the inspector."""
    asked = {key: config.pop(key) for key in ("speculative_tokens", "vision") if key in config}
    write_config(folder, **config)
    write_shard(folder / "model.safetensors", tensors, values)
    return inspect_folder(folder, **asked)


def codes(faults: tuple[Any, ...]) -> list[str]:
    return [fault.code for fault in faults]


def compressed_tensors(**keys: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": NVFP4_GROUP},
        **keys,
    }
