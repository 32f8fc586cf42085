"""A reference model whose delta net projects its input in BF16, as most checkpoints of the large ones do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4

PLAIN = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
WEIGHTS = "model.safetensors"
PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")


def with_plain_projections(reference: Path, folder: Path) -> Path:
    """Writes `reference`, a checkpoint in compressed-tensors' form, to the new `folder` with PLAIN dequantized."""
    shutil.copytree(reference, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += [f"re:.*{name.replace('.', chr(92) + '.')}$" for name in PLAIN]
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Any] = load_file(reference / WEIGHTS)
    for name in [name for name in tensors if name.endswith(PARTS[0]) and any(part in name for part in PLAIN)]:
        layer = name.removesuffix(PARTS[0])
        packed, scale, divisor, _ = (tensors.pop(layer + part) for part in PARTS)
        tensors[layer + "weight"] = dequantize_nvfp4(packed, scale, 1 / divisor).to(torch.bfloat16)
    save_file(tensors, folder / WEIGHTS)
    return folder
