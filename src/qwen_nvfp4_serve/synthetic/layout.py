"""The tensors of a Qwen3.5 checkpoint: name, shape, role, and which matrices a server fuses. No tensor is made here.

Names follow the published checkpoints, as vLLM's qwen3_5.py, qwen3_next.py and qwen3_5_mtp.py load them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from qwen_nvfp4_serve.synthetic.spec import (
    CONV_KERNEL,
    GDN_HEAD_DIM,
    Architecture,
    CheckpointSpec,
    Kind,
    Precision,
    Style,
)

TEXT = "model.language_model"
PATCH, MERGE, TEMPORAL, CHANNELS = 16, 2, 2, 3


class Role(enum.Enum):
    """What decides a tensor's precision. KEPT_LINEAR is a linear module that every style leaves in BF16."""

    ATTENTION = "attention"
    GDN = "gdn"
    FFN = "ffn"
    LM_HEAD = "lm_head"
    KEPT_LINEAR = "kept"
    OTHER = "other"


class Init(enum.Enum):
    """How values are drawn. GEMMA_NORM multiplies by 1 + w, NORM by w."""

    LINEAR = "normal, gain / sqrt(inputs)"
    EMBEDDING = "normal"
    GEMMA_NORM = "near zero"
    NORM = "near one"
    ZERO = "zero"
    A_LOG = "log of uniform 1..16"
    DT_BIAS = "inverse softplus of 0.001..0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor of the BF16 checkpoint. `name` is whole, with `.weight`; `fused` names the group of matrices that a
    server runs as one; `stack` is set for experts: in BF16 they are stored stacked under that name, quantized ones
    apart; `stack_part` is the place in that stack: (expert, half).
    """

    name: str
    shape: tuple[int, ...]
    role: Role = Role.OTHER
    init: Init = Init.LINEAR
    gain: float = 1.0
    fused: str = ""
    stack: str = ""
    stack_part: tuple[int, int] = (0, 0)

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def group(self) -> str:
        """The fused group, or the module itself."""
        return self.fused or self.module

    def precision(self, style: Style) -> Precision:
        """How `style` stores it."""
        by_role = {
            Role.ATTENTION: style.attention,
            Role.GDN: style.gdn,
            Role.FFN: style.ffn,
            Role.LM_HEAD: style.lm_head,
        }
        return by_role.get(self.role, Precision.BF16)


def weights_of(spec: CheckpointSpec) -> Iterator[Weight]:
    """Every tensor of `spec`'s BF16 checkpoint, in file order; members of a fused group and of a stack are adjacent."""
    dims = spec.architecture
    yield Weight(name=f"{TEXT}.embed_tokens.weight", shape=(dims.vocab, dims.hidden), init=Init.EMBEDDING)
    for index, layer_type in enumerate(dims.layer_types):
        yield from _decoder_layer(dims, f"{TEXT}.layers.{index}", layer_type == "full_attention", kept=False)
    yield _gemma_norm(f"{TEXT}.norm", dims.hidden)
    yield Weight(name="lm_head.weight", shape=(dims.vocab, dims.hidden), role=Role.LM_HEAD, gain=3.0)
    if spec.mtp:
        yield from _mtp(dims)
    if spec.vision:
        yield from _vision(dims)


def _decoder_layer(dims: Architecture, prefix: str, full_attention: bool, *, kept: bool) -> Iterator[Weight]:
    mixer = _attention(dims, f"{prefix}.self_attn", kept) if full_attention else _gdn(dims, f"{prefix}.linear_attn")
    moe = dims.kind is Kind.MOE
    ffn = _moe(dims, f"{prefix}.mlp", kept) if moe else _mlp(f"{prefix}.mlp", dims.hidden, dims.intermediate, kept)
    yield _gemma_norm(f"{prefix}.input_layernorm", dims.hidden)
    yield from mixer
    yield _gemma_norm(f"{prefix}.post_attention_layernorm", dims.hidden)
    yield from ffn


def _attention(dims: Architecture, prefix: str, kept: bool) -> Iterator[Weight]:
    role = Role.KEPT_LINEAR if kept else Role.ATTENTION
    q_rows = 2 * dims.q_heads * dims.head_dim  # the query and its output gate, interleaved by head
    kv_rows = dims.kv_heads * dims.head_dim
    for part, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        yield _linear(f"{prefix}.{part}", rows, dims.hidden, role, fused=f"{prefix}.qkv_proj")
    yield _linear(f"{prefix}.o_proj", dims.hidden, dims.q_heads * dims.head_dim, role)
    yield _gemma_norm(f"{prefix}.q_norm", dims.head_dim)
    yield _gemma_norm(f"{prefix}.k_norm", dims.head_dim)


def _gdn(dims: Architecture, prefix: str) -> Iterator[Weight]:
    key, value = dims.gdn_k_heads * GDN_HEAD_DIM, dims.gdn_v_heads * GDN_HEAD_DIM
    fused = f"{prefix}.in_proj_qkvz"
    yield _linear(f"{prefix}.in_proj_qkv", 2 * key + value, dims.hidden, Role.GDN, fused=fused)
    yield _linear(f"{prefix}.in_proj_z", value, dims.hidden, Role.GDN, fused=fused)
    yield _linear(f"{prefix}.in_proj_b", dims.gdn_v_heads, dims.hidden, Role.KEPT_LINEAR)
    yield _linear(f"{prefix}.in_proj_a", dims.gdn_v_heads, dims.hidden, Role.KEPT_LINEAR)
    yield Weight(name=f"{prefix}.conv1d.weight", shape=(2 * key + value, 1, CONV_KERNEL))
    yield Weight(name=f"{prefix}.A_log", shape=(dims.gdn_v_heads,), init=Init.A_LOG)
    yield Weight(name=f"{prefix}.dt_bias", shape=(dims.gdn_v_heads,), init=Init.DT_BIAS)
    yield Weight(name=f"{prefix}.norm.weight", shape=(GDN_HEAD_DIM,), init=Init.NORM)
    yield _linear(f"{prefix}.out_proj", dims.hidden, value, Role.GDN)


def _moe(dims: Architecture, prefix: str, kept: bool) -> Iterator[Weight]:
    yield _linear(f"{prefix}.gate", dims.experts, dims.hidden, Role.KEPT_LINEAR, gain=2.0)
    role = Role.KEPT_LINEAR if kept else Role.FFN
    width, hidden = dims.expert_intermediate, dims.hidden
    for expert in range(dims.experts):
        one = f"{prefix}.experts.{expert}"
        for half, part in enumerate(("gate_proj", "up_proj")):
            yield Weight(
                name=f"{one}.{part}.weight",
                shape=(width, hidden),
                role=role,
                fused=f"{one}.gate_up_proj",
                stack=f"{prefix}.experts.gate_up_proj",
                stack_part=(expert, half),
            )
        yield Weight(
            name=f"{one}.down_proj.weight",
            shape=(hidden, width),
            role=role,
            stack=f"{prefix}.experts.down_proj",
            stack_part=(expert, 0),
        )
    yield from _mlp(f"{prefix}.shared_expert", hidden, dims.shared_intermediate, kept)
    yield _linear(f"{prefix}.shared_expert_gate", 1, hidden, Role.KEPT_LINEAR)


def _mlp(prefix: str, hidden: int, width: int, kept: bool) -> Iterator[Weight]:
    role = Role.KEPT_LINEAR if kept else Role.FFN
    for part in ("gate_proj", "up_proj"):
        yield _linear(f"{prefix}.{part}", width, hidden, role, fused=f"{prefix}.gate_up_proj")
    yield _linear(f"{prefix}.down_proj", hidden, width, role)


def _mtp(dims: Architecture) -> Iterator[Weight]:
    yield _linear("mtp.fc", dims.hidden, 2 * dims.hidden, Role.KEPT_LINEAR)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        yield _gemma_norm(f"mtp.{name}", dims.hidden)
    yield from _decoder_layer(dims, "mtp.layers.0", True, kept=True)


def _vision(dims: Architecture) -> Iterator[Weight]:
    root, hidden, wide = "model.visual", dims.vision_hidden, dims.vision_intermediate
    yield Weight(name=f"{root}.patch_embed.proj.weight", shape=(hidden, CHANNELS, TEMPORAL, PATCH, PATCH))
    yield Weight(name=f"{root}.patch_embed.proj.bias", shape=(hidden,), init=Init.ZERO)
    yield Weight(name=f"{root}.pos_embed.weight", shape=(dims.vision_positions, hidden), init=Init.EMBEDDING)
    for index in range(dims.vision_depth):
        block = f"{root}.blocks.{index}"
        yield from _layer_norm(f"{block}.norm1", hidden)
        yield from _layer_norm(f"{block}.norm2", hidden)
        yield from _biased(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from _biased(f"{block}.attn.proj", hidden, hidden)
        yield from _biased(f"{block}.mlp.linear_fc1", wide, hidden)
        yield from _biased(f"{block}.mlp.linear_fc2", hidden, wide)
    merged = hidden * MERGE * MERGE
    yield from _layer_norm(f"{root}.merger.norm", hidden)
    yield from _biased(f"{root}.merger.linear_fc1", merged, merged)
    yield from _biased(f"{root}.merger.linear_fc2", dims.hidden, merged)


def _linear(module: str, rows: int, columns: int, role: Role, *, fused: str = "", gain: float = 1.0) -> Weight:
    return Weight(name=f"{module}.weight", shape=(rows, columns), role=role, fused=fused, gain=gain)


def _biased(module: str, rows: int, columns: int) -> Iterator[Weight]:
    yield _linear(module, rows, columns, Role.KEPT_LINEAR)
    yield Weight(name=f"{module}.bias", shape=(rows,), init=Init.ZERO)


def _gemma_norm(module: str, size: int) -> Weight:
    return Weight(name=f"{module}.weight", shape=(size,), init=Init.GEMMA_NORM)


def _layer_norm(module: str, size: int) -> Iterator[Weight]:
    yield Weight(name=f"{module}.weight", shape=(size,), init=Init.NORM)
    yield Weight(name=f"{module}.bias", shape=(size,), init=Init.ZERO)
