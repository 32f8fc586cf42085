"""The linear layers that the models have: N outputs, K inputs, after vLLM's fusions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One layer's weight [n, k]. model: "27b" or "35b" (dimensions from their config.json)."""

    model: str
    layer: str
    n: int
    k: int

    @property
    def name(self) -> str:
        """`model/layer`."""
        return f"{self.model}/{self.layer}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes and block scales, without padding."""
        return self.n * self.k * 9 // 16


SHAPES = (
    LinearShape("27b", "gate_up", 34816, 5120),
    LinearShape("27b", "down", 5120, 17408),
    LinearShape("27b", "attn_qkv", 14336, 5120),
    LinearShape("27b", "attn_o", 5120, 6144),
    LinearShape("27b", "gdn_qkvz", 16384, 5120),
    LinearShape("27b", "gdn_ba", 96, 5120),
    LinearShape("27b", "lm_head", 248320, 5120),
    LinearShape("35b", "attn_qkv", 9216, 2048),
    LinearShape("35b", "attn_o", 2048, 4096),
    LinearShape("35b", "gdn_qkvz", 12288, 2048),
    LinearShape("35b", "gdn_ba", 64, 2048),
    LinearShape("35b", "shared_gate_up", 1024, 2048),
    LinearShape("35b", "shared_down", 2048, 512),
    LinearShape("35b", "lm_head", 248320, 2048),
)
