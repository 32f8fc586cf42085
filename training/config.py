"""Dimensions of the two reference models."""

from dataclasses import dataclass

HEAD_DIM = 256
ROTARY_DIM = 64
ROPE_THETA = 1e7
LINEAR_HEAD_DIM = 128
CONV_KERNEL = 4
EPS = 1e-6
CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions of one model; `experts` is 0 for the dense one.

    Attributes:
        intermediate: width of the dense feed-forward, or of one routed expert.
        shared_intermediate: width of the shared expert.
    """

    name: str
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    vocab: int = 1024
    experts: int = 0
    experts_per_token: int = 0
    intermediate: int = 0
    shared_intermediate: int = 0
    full_attention_interval: int = 4

    @property
    def key_dim(self) -> int:
        """Width of all linear-attention keys."""
        return self.linear_key_heads * LINEAR_HEAD_DIM

    @property
    def value_dim(self) -> int:
        """Width of all linear-attention values."""
        return self.linear_value_heads * LINEAR_HEAD_DIM

    def is_full_attention(self, layer: int) -> bool:
        """True for every `full_attention_interval`-th layer."""
        return (layer + 1) % self.full_attention_interval == 0


MOE = ModelConfig(name="moe", experts=16, experts_per_token=4, intermediate=64, shared_intermediate=128)
DENSE = ModelConfig(name="dense", intermediate=320, kv_heads=1)
MODELS = {config.name: config for config in (MOE, DENSE)}
TINY = ModelConfig(
    name="tiny",
    layers=2,
    full_attention_interval=2,
    heads=1,
    kv_heads=1,
    linear_key_heads=1,
    linear_value_heads=1,
    experts=4,
    experts_per_token=2,
    intermediate=64,
    shared_intermediate=64,
)
MODELS |= {TINY.name: TINY}
