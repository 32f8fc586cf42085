"""The dimensions of a Qwen3.5-architecture model, from the catalogue or from any `config.json` of the family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qwen_nvfp4_serve.errors import UsageError

StateDtype = Literal["float32", "bfloat16"]

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
# A count above this in a config.json is damage, not a model: the largest real value is a vocabulary of 248,320.
_LARGEST = 10_000_000
_MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionDims:
    """The vision tower: `depth` blocks of width `hidden`, merged to the text width `out_hidden`."""

    depth: int
    hidden: int
    intermediate: int
    patch: int
    temporal_patch: int
    merge: int
    channels: int
    positions: int
    out_hidden: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Dimensions of one checkpoint, in elements. Sizes of a part that is not there are 0.

    intermediate: width of a dense MLP; experts, experts_per_token, expert_intermediate, shared_intermediate: of a
    mixture-of-experts block. attention_layers + gdn_layers = all decoder layers, the drafter's mtp_layers apart.
    """

    hidden: int
    attention_layers: int
    gdn_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_kernel: int
    vocab: int
    max_context: int
    intermediate: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    mtp_layers: int = 0
    output_gate: bool = True
    tied_embeddings: bool = False
    state_dtype: StateDtype = "float32"
    vision: VisionDims | None = None

    @property
    def layers(self) -> int:
        """Decoder layers, without the drafter's."""
        return self.attention_layers + self.gdn_layers

    @property
    def is_moe(self) -> bool:
        """True for a mixture of experts."""
        return self.experts > 0


# transformers' Qwen3_5TextConfig and Qwen3_5MoeTextConfig: a saved config.json leaves out what equals these.
_TEXT_DEFAULTS: dict[str, int] = {
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
}
_DENSE_DEFAULTS = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32, "num_key_value_heads": 4}
_MOE_DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
_VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
}


def dims_from_config(config: Mapping[str, object]) -> Dims:
    """The dimensions that `config`, a parsed config.json, describes; keys it leaves out take transformers' defaults.

    The text part is `text_config` where there is one. Raises UsageError naming the key for another architecture, a
    value that is no positive integer, layer kinds that are not two, and a hybrid without attention or without GDN.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UsageError("config.json: model_type", seen=repr(model_type), expected=f"one of {', '.join(MODEL_TYPES)}")
    text = _section(config, "text_config") or config
    is_moe = "moe" in str(model_type)
    sizes = {**_TEXT_DEFAULTS, **(_MOE_DEFAULTS if is_moe else _DENSE_DEFAULTS)}
    value = {key: _count(text, key, default) for key, default in sizes.items()}
    attention_layers, gdn_layers = _layer_counts(config)
    return Dims(
        hidden=value["hidden_size"],
        attention_layers=attention_layers,
        gdn_layers=gdn_layers,
        q_heads=value["num_attention_heads"],
        kv_heads=value["num_key_value_heads"],
        head_dim=value["head_dim"],
        gdn_key_heads=value["linear_num_key_heads"],
        gdn_value_heads=value["linear_num_value_heads"],
        gdn_key_dim=value["linear_key_head_dim"],
        gdn_value_dim=value["linear_value_head_dim"],
        conv_kernel=value["linear_conv_kernel_dim"],
        vocab=value["vocab_size"],
        max_context=value["max_position_embeddings"],
        intermediate=value.get("intermediate_size", 0),
        experts=value.get("num_experts", 0),
        experts_per_token=value.get("num_experts_per_tok", 0),
        expert_intermediate=value.get("moe_intermediate_size", 0),
        shared_intermediate=value.get("shared_expert_intermediate_size", 0),
        mtp_layers=_count(text, "mtp_num_hidden_layers", 0, least=0),
        output_gate=bool(text.get("attn_output_gate", True)),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        state_dtype=_state_dtype(text),
        vision=_vision(config),
    )


def _section(config: Mapping[str, object], key: str) -> Mapping[str, object] | None:
    section = config.get(key)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise UsageError(f"config.json: {key}", seen=type(section).__name__, expected="an object")
    return section


def _count(section: Mapping[str, object], key: str, default: int, *, least: int = 1) -> int:
    seen = section.get(key)
    if seen is None:
        return default
    most = _MOST_LAYERS if "layers" in key or key == "depth" else _LARGEST
    if not isinstance(seen, int) or isinstance(seen, bool) or not least <= seen <= most:
        raise UsageError(f"config.json: {key}", seen=repr(seen)[:60], expected=f"an integer from {least} to {most:,}")
    return seen


def attention_pattern(config: Mapping[str, object]) -> tuple[bool, ...]:
    """For each decoder layer of a parsed config.json, whether it is attention (True) or GDN. Raises UsageError."""
    text = _section(config, "text_config") or config
    sizes = _MOE_DEFAULTS if "moe" in str(config.get("model_type")) else _DENSE_DEFAULTS
    layers = _count(text, "num_hidden_layers", sizes["num_hidden_layers"])
    kinds = text.get("layer_types")
    if kinds is None:
        interval = _count(text, "full_attention_interval", 4)
        return tuple((index + 1) % interval == 0 for index in range(layers))
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        expected = f"{layers} times linear_attention or full_attention"
        raise UsageError("config.json: layer_types", seen=repr(kinds)[:60], expected=expected)
    return tuple(kind == "full_attention" for kind in kinds)


def _layer_counts(config: Mapping[str, object]) -> tuple[int, int]:
    pattern = attention_pattern(config)
    attention, gdn = sum(pattern), len(pattern) - sum(pattern)
    if not attention or not gdn:
        seen = f"{attention} attention and {gdn} GDN layers"
        raise UsageError("config.json: layers", seen=seen, expected="at least one of each kind")
    return attention, gdn


def _state_dtype(text: Mapping[str, object]) -> StateDtype:
    seen = text.get("mamba_ssm_dtype", "float32")
    if seen == "float32":
        return "float32"
    if seen == "bfloat16":
        return "bfloat16"
    raise UsageError("config.json: mamba_ssm_dtype", seen=repr(seen), expected="float32 or bfloat16")


def _vision(config: Mapping[str, object]) -> VisionDims | None:
    section = _section(config, "vision_config")
    if section is None:
        return None
    value = {key: _count(section, key, default) for key, default in _VISION_DEFAULTS.items()}
    return VisionDims(
        depth=value["depth"],
        hidden=value["hidden_size"],
        intermediate=value["intermediate_size"],
        patch=value["patch_size"],
        temporal_patch=value["temporal_patch_size"],
        merge=value["spatial_merge_size"],
        channels=value["in_channels"],
        positions=value["num_position_embeddings"],
        out_hidden=value["out_hidden_size"],
    )
