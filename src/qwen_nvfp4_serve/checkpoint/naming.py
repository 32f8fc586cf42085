"""Which modules a Qwen3.5 checkpoint has, which of them vLLM runs as one, and what vLLM calls them.

Read from vLLM 0.33.0: models/qwen3_5.py (packed_modules_mapping, hf_to_vllm_mapper), models/qwen3_vl.py (prefixes).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Area(Enum):
    """The part of the model, which decides whether a fault matters: drafter and vision are loaded only on request."""

    LANGUAGE = "language model"
    MTP = "drafter"
    VISUAL = "vision tower"


# Fused matrix -> its parts in the checkpoint.
FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}
# vLLM's class of each linear module: compressed-tensors targets may name a class.
CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    "in_proj_qkvz": "MergedColumnParallelLinear",
    "in_proj_ba": "MergedColumnParallelLinear",
    "o_proj": "RowParallelLinear",
    "out_proj": "RowParallelLinear",
    "down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
    "experts": "RoutedExperts",
    "fc": "ColumnParallelLinear",
    "qkv": "QKVParallelLinear",
    "proj": "RowParallelLinear",
    "linear_fc1": "ColumnParallelLinear",
    "linear_fc2": "RowParallelLinear",
}
# Modules that never get a quantization method, whatever the config says: built without one, or no linear at all.
_PLAIN = ("gate", "shared_expert_gate", "conv1d", "embed_tokens", "patch_embed", "pos_embed")
# Order matters: longest prefix first. None of the family's other names is changed.
_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
)
_TEXT_ONLY_PREFIXES = (("model.language_model.", "model."),)


@dataclass(frozen=True, slots=True)
class Unit:
    """A matrix as vLLM runs it. `name` follows the checkpoint's prefixes and the fused leaf; `kind` has no layer."""

    name: str
    kind: str
    area: Area
    layer: int | None

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def is_plain(self) -> bool:
        """True when vLLM never quantizes it."""
        return self.leaf not in CLASSES or any(part in _PLAIN for part in self.name.split("."))


def area_of(name: str) -> Area:
    """The area that a tensor or module of the checkpoint belongs to."""
    if name.startswith("mtp."):
        return Area.MTP
    return Area.VISUAL if name.startswith(("model.visual.", "visual.")) else Area.LANGUAGE


def unit_of(module: str) -> Unit:
    """The unit that a module of the checkpoint ends up in."""
    parts = module.split(".")
    if "experts" in parts:
        parts = parts[: parts.index("experts") + 1]
    elif any(plain in parts for plain in _PLAIN):
        pass
    else:
        parts[-1] = _FUSED_OF.get(parts[-1], parts[-1])
    area = area_of(module)
    layer = next((int(part) for part in parts if part.isdigit()), None)
    return Unit(".".join(parts), _kind(parts, area), area, layer)


def _kind(parts: list[str], area: Area) -> str:
    """`in_proj_ba`, `experts`, `shared_expert.down_proj`; the drafter's with `mtp.`, the tower's with `visual.`."""
    leaf = parts[-1]
    if len(parts) > 1 and parts[-2] == "shared_expert":
        leaf = f"shared_expert.{leaf}"
    prefix = {Area.LANGUAGE: "", Area.MTP: "mtp.", Area.VISUAL: "visual."}[area]
    return prefix + leaf


def vllm_name(name: str, *, text_only: bool) -> str:
    """What vLLM calls a module or an ignore entry of the checkpoint; text_only for a `…ForCausalLM` config."""
    for old, new in _TEXT_ONLY_PREFIXES if text_only else _PREFIXES:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def vllm_module(unit: Unit, *, text_only: bool) -> str:
    """The prefix that vLLM hands to the quantization config for this unit."""
    if unit.name == "lm_head":
        return "lm_head" if text_only else "language_model.lm_head"
    return vllm_name(unit.name, text_only=text_only)
