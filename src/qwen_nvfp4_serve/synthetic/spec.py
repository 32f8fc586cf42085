"""What a synthetic checkpoint is: the architecture's dimensions, the quantization style, and the seed. Tables only."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from qwen_nvfp4_serve.errors import UsageError

# Sources of the real dimensions: config.json of Qwen3.5-35B-A3B and Qwen3.5-27B.
GDN_HEAD_DIM = 128
CONV_KERNEL = 4


class Kind(enum.Enum):
    """Which of the family's two model classes."""

    MOE = "moe"
    DENSE = "dense"


class Precision(enum.Enum):
    """How one linear module is stored."""

    BF16 = "bf16"
    FP8_TENSOR = "fp8-per-tensor"
    FP8_CHANNEL = "fp8-per-channel"
    NVFP4 = "nvfp4"
    NVFP4_A16 = "nvfp4-a16"

    @property
    def is_nvfp4(self) -> bool:
        """True for both 4-bit forms; they differ only in whether activations are quantized too."""
        return self in (Precision.NVFP4, Precision.NVFP4_A16)


class Writer(enum.Enum):
    """The tool whose tensor names and configuration a style follows."""

    PLAIN = "plain"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Which modules get which precision, and whose names the tensors carry. The router, shared_expert_gate, in_proj_a,
    in_proj_b, MTP and vision stay in BF16 in every style, as in all published checkpoints of this family.
    """

    name: str
    writer: Writer
    attention: Precision = Precision.BF16
    gdn: Precision = Precision.BF16
    ffn: Precision = Precision.BF16
    lm_head: Precision = Precision.BF16
    like: str


STYLES = (
    Style(name="bf16", writer=Writer.PLAIN, like="the models as Qwen publishes them"),
    Style(
        name="ct-w4a4",
        writer=Writer.COMPRESSED_TENSORS,
        attention=Precision.NVFP4,
        ffn=Precision.NVFP4,
        like="llm-compressor NVFP4 with GDN kept in BF16",
    ),
    Style(
        name="ct-w4a16",
        writer=Writer.COMPRESSED_TENSORS,
        attention=Precision.NVFP4_A16,
        ffn=Precision.NVFP4_A16,
        like="llm-compressor NVFP4A16 with GDN kept in BF16",
    ),
    Style(
        name="ct-mixed",
        writer=Writer.COMPRESSED_TENSORS,
        attention=Precision.FP8_CHANNEL,
        gdn=Precision.FP8_CHANNEL,
        ffn=Precision.NVFP4,
        lm_head=Precision.FP8_CHANNEL,
        like="unsloth's NVFP4 uploads",
    ),
    Style(
        name="modelopt-nvfp4",
        writer=Writer.MODELOPT,
        attention=Precision.NVFP4,
        ffn=Precision.NVFP4,
        like="Kbenkhaled's NVFP4 uploads",
    ),
    Style(
        name="modelopt-mixed",
        writer=Writer.MODELOPT,
        attention=Precision.FP8_TENSOR,
        gdn=Precision.FP8_TENSOR,
        ffn=Precision.NVFP4_A16,
        lm_head=Precision.NVFP4_A16,
        like="nvidia's NVFP4 uploads (MIXED_PRECISION)",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Dimensions of a Qwen3.5 model. Sizes count elements; `expert_intermediate` is one expert's width."""

    kind: Kind
    hidden: int
    layers: int
    attention_interval: int = 4
    q_heads: int
    kv_heads: int
    head_dim: int = 256
    gdn_k_heads: int
    gdn_v_heads: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    intermediate: int = 0
    vocab: int = 320
    max_position: int = 262144
    vision_depth: int = 2
    vision_hidden: int = 128
    vision_heads: int = 2
    vision_intermediate: int = 256
    vision_positions: int = 256

    @property
    def layer_types(self) -> tuple[str, ...]:
        """`full_attention` at every `attention_interval`-th layer, `linear_attention` (GDN) elsewhere."""
        every = self.attention_interval
        return tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(self.layers))


_REAL_VISION = {
    "vision_depth": 27,
    "vision_hidden": 1152,
    "vision_heads": 16,
    "vision_intermediate": 4304,
    "vision_positions": 2304,
}
_SMALL = {
    "hidden": 256,
    "layers": 4,
    "q_heads": 4,
    "kv_heads": 2,
    "gdn_k_heads": 2,
    "gdn_v_heads": 4,
}

ARCHITECTURES: dict[str, Architecture] = {
    "embedded": Architecture(
        kind=Kind.MOE,
        experts=16,
        experts_per_token=4,
        expert_intermediate=128,
        shared_intermediate=128,
        **_SMALL,
    ),
    "embedded-dense": Architecture(kind=Kind.DENSE, intermediate=768, **_SMALL),
    "35b-a3b": Architecture(
        kind=Kind.MOE,
        hidden=2048,
        layers=40,
        q_heads=16,
        kv_heads=2,
        gdn_k_heads=16,
        gdn_v_heads=32,
        experts=256,
        experts_per_token=8,
        expert_intermediate=512,
        shared_intermediate=512,
        vocab=248320,
        **_REAL_VISION,
    ),
    "27b": Architecture(
        kind=Kind.DENSE,
        hidden=5120,
        layers=64,
        q_heads=24,
        kv_heads=4,
        gdn_k_heads=16,
        gdn_v_heads=48,
        intermediate=17408,
        vocab=248320,
        **_REAL_VISION,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Everything that decides a checkpoint's bytes.

    seed: gives every underlying BF16 weight, the same in every style. dequantized: write in BF16 what the quantized
    checkpoint of this style means, so that a server can be compared on both. unequal_scales: every matrix keeps its own
    global scale, also inside q/k/v, gate/up and qkv+z; otherwise one per group, as servers that fuse them need.
    gdn, lm_head: another precision than the style's. shard_bytes: a new file is begun beyond this size.
    """

    architecture: Architecture = ARCHITECTURES["embedded"]
    style: str = "ct-w4a4"
    seed: int = 0
    mtp: bool = True
    vision: bool = False
    dequantized: bool = False
    unequal_scales: bool = False
    gdn: Precision | None = None
    lm_head: Precision | None = None
    shard_bytes: int = 4 * 1024**3

    def rules(self) -> Style:
        """The style with this spec's own choices applied. Raises UsageError for an unknown style or an odd choice."""
        style = find_style(self.style)
        chosen = {name: value for name, value in (("gdn", self.gdn), ("lm_head", self.lm_head)) if value is not None}
        for name, precision in chosen.items():
            allowed = PRECISIONS[style.writer]
            if precision not in allowed:
                raise UsageError(
                    f"{name} precision of a {style.name} checkpoint",
                    seen=precision.value,
                    expected=", ".join(item.value for item in allowed),
                )
        return dataclasses.replace(style, gdn=self.gdn or style.gdn, lm_head=self.lm_head or style.lm_head)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as written to `synthetic.json`; equal for equal specs."""
        values = dataclasses.asdict(self)
        values["architecture"]["kind"] = self.architecture.kind.value
        for name in ("gdn", "lm_head"):
            values[name] = values[name].value if values[name] else None
        return values


# What each tool can write for a module.
PRECISIONS: dict[Writer, tuple[Precision, ...]] = {
    Writer.PLAIN: (Precision.BF16,),
    Writer.COMPRESSED_TENSORS: (
        Precision.BF16,
        Precision.FP8_CHANNEL,
        Precision.NVFP4,
        Precision.NVFP4_A16,
    ),
    Writer.MODELOPT: (Precision.BF16, Precision.FP8_TENSOR, Precision.NVFP4, Precision.NVFP4_A16),
}


def find_style(name: str) -> Style:
    """The style called `name`, or UsageError with all names."""
    for style in STYLES:
        if style.name == name:
            return style
    raise UsageError("checkpoint style", seen=name, expected="one of " + ", ".join(style.name for style in STYLES))


def check_architecture(dims: Architecture) -> None:
    """Raises UsageError naming the first dimension that no NVFP4 checkpoint of this family could have."""
    faults = [
        ("hidden", dims.hidden, dims.hidden > 0 and dims.hidden % 16 == 0, "a positive multiple of 16"),
        ("layers", dims.layers, dims.layers > 0, "at least 1"),
        ("attention_interval", dims.attention_interval, dims.attention_interval > 0, "at least 1"),
        ("head_dim", dims.head_dim, dims.head_dim > 0 and dims.head_dim % 16 == 0, "a positive multiple of 16"),
        ("q_heads", dims.q_heads, dims.kv_heads > 0 and dims.q_heads % dims.kv_heads == 0, "a multiple of kv_heads"),
        (
            "gdn_v_heads",
            dims.gdn_v_heads,
            dims.gdn_k_heads > 0 and dims.gdn_v_heads % dims.gdn_k_heads == 0,
            "a multiple of gdn_k_heads",
        ),
        ("vocab", dims.vocab, dims.vocab >= 288, "at least 288, for the bytes and the family's special tokens"),
    ]
    if dims.kind is Kind.MOE:
        width, shared = dims.expert_intermediate, dims.shared_intermediate
        faults += [
            ("expert_intermediate", width, width > 0 and width % 16 == 0, "a positive multiple of 16"),
            ("shared_intermediate", shared, shared > 0 and shared % 16 == 0, "a positive multiple of 16"),
            (
                "experts_per_token",
                dims.experts_per_token,
                0 < dims.experts_per_token <= dims.experts,
                "between 1 and experts",
            ),
        ]
    else:
        wide = dims.intermediate
        faults.append(("intermediate", wide, wide > 0 and wide % 16 == 0, "a positive multiple of 16"))
    for name, seen, holds, expected in faults:
        if not holds:
            raise UsageError(f"architecture's {name}", seen=str(seen), expected=expected)
