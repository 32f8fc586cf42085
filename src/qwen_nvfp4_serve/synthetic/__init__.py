"""Makes Qwen3.5 checkpoints from a seed: any size, MoE or dense, in every quantization style people publish."""

from __future__ import annotations

from qwen_nvfp4_serve.synthetic.spec import (
    ARCHITECTURES,
    STYLES,
    Architecture,
    CheckpointSpec,
    Kind,
    Precision,
    Style,
    Writer,
)
from qwen_nvfp4_serve.synthetic.writing import ensure_checkpoint, write_checkpoint

__all__ = [
    "ARCHITECTURES",
    "STYLES",
    "Architecture",
    "CheckpointSpec",
    "Kind",
    "Precision",
    "Style",
    "Writer",
    "ensure_checkpoint",
    "write_checkpoint",
]
