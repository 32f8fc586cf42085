"""Bytes of the weights by module class: from the headers, or from dims and the config where there are no shards."""

from __future__ import annotations

from collections.abc import Mapping

from qwen_nvfp4_serve.checkpoint.contents import Contents, Group
from qwen_nvfp4_serve.checkpoint.naming import Area, unit_of
from qwen_nvfp4_serve.checkpoint.schemes import PLAIN, Resolver, SplitError
from qwen_nvfp4_serve.dims import Dims, attention_pattern
from qwen_nvfp4_serve.planner.weights import (
    WeightBytes,
    attention_params,
    ffn_params,
    gdn_params,
    mtp_params,
    small_params,
    vision_params,
)

_BITS = {"BF16": 16.0, "FP8": 8.0, "MXFP8": 8.25, "NVFP4": 4.5, "MXFP4": 4.25, "INT8": 8.0, "INT4": 4.5}
_FFN = ("experts", "gate_up_proj", "down_proj")


def weights_of(
    contents: Contents, dims: Dims | None, resolver: Resolver, config: Mapping[str, object]
) -> WeightBytes | None:
    """The weights by class. None without dims; computed from them when shards of some class are not there."""
    if dims is None:
        return None
    stored = _stored(contents, dims)
    if stored.gdn and stored.attention and stored.ffn and stored.embedding:
        return stored
    return _computed(dims, resolver, config)


def _stored(contents: Contents, dims: Dims) -> WeightBytes:
    sums = dict.fromkeys(
        ("gdn", "attention", "ffn", "shared_expert", "small", "embedding", "lm_head", "mtp", "vision"), 0
    )
    for group in contents.groups.values():
        sums[_class_of(group)] += group.size_bytes
    per_token = sums["ffn"] * dims.experts_per_token // dims.experts if dims.is_moe else sums["ffn"]
    return WeightBytes(ffn_per_token=per_token, **sums)


def _class_of(group: Group) -> str:
    unit = group.unit
    if unit.area is not Area.LANGUAGE:
        return "mtp" if unit.area is Area.MTP else "vision"
    if unit.leaf in ("lm_head", "embed_tokens"):
        return "lm_head" if unit.leaf == "lm_head" else "embedding"
    if unit.kind.startswith("shared_expert."):
        return "shared_expert"
    if unit.leaf in ("in_proj_qkvz", "out_proj"):
        return "gdn"
    if unit.leaf in ("qkv_proj", "o_proj"):
        return "attention"
    return "ffn" if unit.leaf in _FFN else "small"


def _computed(dims: Dims, resolver: Resolver, config: Mapping[str, object]) -> WeightBytes:
    """As if every layer had all its modules, each in the scheme that the config gives it."""
    root = "model.language_model.layers"
    ffn = "mlp.experts" if dims.is_moe else "mlp.down_proj"
    sums = {"gdn": 0.0, "attention": 0.0, "ffn": 0.0, "shared_expert": 0.0}
    for index, is_attention in enumerate(attention_pattern(config)):
        if is_attention:
            sums["attention"] += attention_params(dims) * _bytes(resolver, f"{root}.{index}.self_attn.o_proj")
        else:
            sums["gdn"] += gdn_params(dims) * _bytes(resolver, f"{root}.{index}.linear_attn.out_proj")
        sums["ffn"] += ffn_params(dims) * _bytes(resolver, f"{root}.{index}.{ffn}")
        shared = 3 * dims.hidden * dims.shared_intermediate
        sums["shared_expert"] += shared * _bytes(resolver, f"{root}.{index}.mlp.shared_expert.down_proj")
    total = {name: round(value) for name, value in sums.items()}
    head = 0 if dims.tied_embeddings else dims.vocab * dims.hidden * _bytes(resolver, "lm_head")
    return WeightBytes(
        **total,
        ffn_per_token=total["ffn"] * dims.experts_per_token // dims.experts if dims.is_moe else total["ffn"],
        small=2 * small_params(dims),
        embedding=2 * dims.vocab * dims.hidden,
        lm_head=round(head),
        mtp=round(mtp_params(dims) * _bytes(resolver, f"mtp.layers.0.{ffn}")),
        vision=2 * vision_params(dims),
    )


def _bytes(resolver: Resolver, module: str) -> float:
    """Bytes of one parameter of `module`; a split unit counts as BF16, since it cannot be served anyway."""
    try:
        label = resolver.scheme(unit_of(module))
    except SplitError:
        label = PLAIN
    return _BITS.get(label.partition(" ")[0], 16.0) / 8
