"""Bytes of the weights by module class, from dims and precision; and what one decoded token reads of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwen_nvfp4_serve.dims import Dims
from qwen_nvfp4_serve.models import Precision, Scheme

# NVFP4: half a byte a value and one E4M3 scale for 16 values. Per-tensor scales are too few to count.
BYTES_PER_PARAM: dict[Scheme, float] = {"BF16": 2.0, "FP8": 1.0, "NVFP4 W4A4": 0.5625, "NVFP4 W4A16": 0.5625}
NVFP4_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes by module class, all cards together. `ffn` is the routed experts or the dense MLP.

    small: what stays in BF16 everywhere: router, in_proj_b and in_proj_a, convolutions, shared-expert gate, norms.
    lm_head is 0 when the head is the embedding. ffn_per_token: the part of `ffn` that one token reads.
    """

    gdn: int
    attention: int
    ffn: int
    ffn_per_token: int
    shared_expert: int
    small: int
    embedding: int
    lm_head: int
    mtp: int
    vision: int

    @property
    def decoder(self) -> int:
        """Everything but embeddings, drafter and vision."""
        return self.gdn + self.attention + self.ffn + self.shared_expert + self.small

    @property
    def embeddings(self) -> int:
        """Token embedding and output head."""
        return self.embedding + self.lm_head

    @property
    def per_token(self) -> int:
        """Bytes that one decoded token reads: all but the unchosen experts and the rest of the embedding."""
        head = self.lm_head or self.embedding
        return self.gdn + self.attention + self.ffn_per_token + self.shared_expert + self.small + head

    @property
    def total(self) -> int:
        """Every weight of the checkpoint."""
        return self.decoder + self.embeddings + self.mtp + self.vision

    def on_card(self, cards: int) -> WeightBytes:
        """The share of one of `cards` tensor-parallel cards; the small ones are kept whole on each."""
        split = {
            name: -(-getattr(self, name) // cards)
            for name in ("gdn", "attention", "ffn", "ffn_per_token", "shared_expert", "embedding", "lm_head", "mtp")
        }
        return replace(self, **split)


def attention_params(dims: Dims) -> int:
    """Parameters of one attention layer's projections; the output gate doubles q_proj."""
    width = dims.q_heads * dims.head_dim
    gated = 2 * width if dims.output_gate else width
    return dims.hidden * (gated + 2 * dims.kv_heads * dims.head_dim + width)


def gdn_params(dims: Dims) -> int:
    """Parameters of one GDN layer's in_proj_qkv, in_proj_z and out_proj."""
    key, value = dims.gdn_key_heads * dims.gdn_key_dim, dims.gdn_value_heads * dims.gdn_value_dim
    return dims.hidden * (2 * key + value + value + value)


def ffn_params(dims: Dims) -> int:
    """Parameters of one layer's routed experts, or of its dense MLP."""
    return 3 * dims.hidden * (dims.experts * dims.expert_intermediate if dims.is_moe else dims.intermediate)


def mtp_params(dims: Dims) -> int:
    """Parameters of the drafter: its projection and, for each of its layers, one attention layer with its FFN."""
    if not dims.mtp_layers:
        return 0
    shared = 3 * dims.hidden * dims.shared_intermediate
    layer = attention_params(dims) + ffn_params(dims) + shared + dims.experts * dims.hidden
    return 2 * dims.hidden * dims.hidden + dims.mtp_layers * layer


def vision_params(dims: Dims) -> int:
    """Parameters of the vision tower and its merger, biases left out; 0 without one."""
    tower = dims.vision
    if tower is None:
        return 0
    block = 4 * tower.hidden * tower.hidden + 2 * tower.hidden * tower.intermediate
    patches = tower.channels * tower.temporal_patch * tower.patch * tower.patch * tower.hidden
    merged = tower.hidden * tower.merge * tower.merge
    return tower.depth * block + patches + tower.positions * tower.hidden + merged * (merged + tower.out_hidden)


def small_params(dims: Dims) -> int:
    """Parameters that no tool quantizes: router and its gates, in_proj_b and in_proj_a, convolution, norms."""
    channels = 2 * dims.gdn_key_heads * dims.gdn_key_dim + dims.gdn_value_heads * dims.gdn_value_dim
    per_gdn = channels * dims.conv_kernel + 2 * dims.gdn_value_heads * dims.hidden + 2 * dims.gdn_value_heads
    router = (dims.experts + 1) * dims.hidden if dims.is_moe else 0
    return dims.gdn_layers * per_gdn + dims.layers * (router + 2 * dims.hidden) + dims.hidden


def weight_bytes(dims: Dims, precision: Precision) -> WeightBytes:
    """The weights of a checkpoint with these dims whose module classes are each stored in one scheme."""

    def size(params: int, scheme: Scheme) -> int:
        return round(params * BYTES_PER_PARAM[scheme])

    ffn = size(ffn_params(dims) * dims.layers, precision.ffn)
    return WeightBytes(
        gdn=size(gdn_params(dims) * dims.gdn_layers, precision.gdn),
        attention=size(attention_params(dims) * dims.attention_layers, precision.attention),
        ffn=ffn,
        ffn_per_token=ffn * dims.experts_per_token // dims.experts if dims.is_moe else ffn,
        shared_expert=size(3 * dims.hidden * dims.shared_intermediate * dims.layers, precision.shared_expert),
        small=2 * small_params(dims),
        embedding=2 * dims.vocab * dims.hidden,
        lm_head=0 if dims.tied_embeddings else size(dims.vocab * dims.hidden, precision.lm_head),
        mtp=size(mtp_params(dims), precision.mtp),
        vision=2 * vision_params(dims),
    )
