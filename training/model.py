"""The Qwen3.5 text model with its MTP layer, written for fast training on packed rows.

Parameter names below the top are those of the published checkpoints, so exporting is a matter of prefixes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import CONV_KERNEL, EPS, HEAD_DIM, LINEAR_HEAD_DIM, ROPE_THETA, ROTARY_DIM, ModelConfig
from training.gdn import gated_delta_rule
from training.quant import fake_quantize_activation, fake_quantize_cache


@dataclass(frozen=True, slots=True)
class Rows:
    """What a forward pass reads: tokens and documents [B, T], rotary cosine and sine [T, ROTARY_DIM].

    `boundaries` (int32, the start of every document in the flattened rows, then B * T repeated) is None on CPU, where
    attention takes a dense mask.
    """

    tokens: Tensor
    document: Tensor
    cos: Tensor
    sin: Tensor
    boundaries: Tensor | None = None


class Switches:
    """Settings of the forward pass that are no part of a layer.

    In training every other row is rounded, so that the same weights serve rounded and plain inputs alike.
    """

    quantize_activations = False
    quantize_cache = False
    every_other_row = False


def _rounded(values: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    if not Switches.every_other_row:
        return rounding(values)
    even = (torch.arange(values.shape[0], device=values.device) % 2 == 0).view(-1, *[1] * (values.ndim - 1))
    return torch.where(even, rounding(values), values)


def activation(values: Tensor) -> Tensor:
    """The input [B, T, …] of a quantized product."""
    return _rounded(values, fake_quantize_activation) if Switches.quantize_activations else values


def cached(values: Tensor) -> Tensor:
    """Keys or values [B, T, …] as the cache returns them."""
    return _rounded(values, fake_quantize_cache) if Switches.quantize_cache else values


class RmsNorm(nn.Module):
    """RMS norm that scales by (1 + weight)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, values: Tensor) -> Tensor:
        wide = values.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return (scaled * (1 + self.weight.float())).to(values.dtype)


class GatedNorm(nn.Module):
    """RMS norm that scales by weight, then by SiLU of a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, values: Tensor, gate: Tensor) -> Tensor:
        wide = values.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * self.weight.float()
        return (scaled * F.silu(gate.float())).to(values.dtype)


class CausalConv(nn.Module):
    """Depthwise convolution over the last four tokens of the same document; weight [channels, 1, 4]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, CONV_KERNEL))

    def forward(self, values: Tensor, document: Tensor) -> Tensor:
        weight = self.weight[:, 0].float()
        result = values.float() * weight[:, -1]
        for back in range(1, CONV_KERNEL):
            moved = F.pad(values, (0, 0, back, 0))[:, : values.shape[1]].float()
            same = F.pad(document, (back, 0), value=-1)[:, : values.shape[1]] == document
            result = result + moved * same.unsqueeze(-1) * weight[:, -1 - back]
        return F.silu(result).to(values.dtype)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        mixed = 2 * config.key_dim + config.value_dim
        self.in_proj_qkv = nn.Linear(config.hidden, mixed, bias=False)
        self.in_proj_z = nn.Linear(config.hidden, config.value_dim, bias=False)
        self.in_proj_b = nn.Linear(config.hidden, config.linear_value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden, config.linear_value_heads, bias=False)
        self.conv1d = CausalConv(mixed)
        self.dt_bias = nn.Parameter(torch.ones(config.linear_value_heads))
        self.A_log = nn.Parameter(torch.zeros(config.linear_value_heads))
        self.norm = GatedNorm(LINEAR_HEAD_DIM)
        self.out_proj = nn.Linear(config.value_dim, config.hidden, bias=False)

    def forward(self, hidden: Tensor, document: Tensor) -> Tensor:
        config = self.config
        narrow = activation(hidden)
        mixed = self.conv1d(self.in_proj_qkv(narrow), document)
        query, key, value = (
            part.unflatten(-1, (-1, LINEAR_HEAD_DIM))
            for part in mixed.split((config.key_dim, config.key_dim, config.value_dim), -1)
        )
        log_decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(hidden).float() + self.dt_bias.float())
        output = gated_delta_rule(
            query=query,
            key=key,
            value=value,
            log_decay=log_decay,
            beta=self.in_proj_b(hidden).float().sigmoid(),
            document=document,
        )
        gate = self.in_proj_z(narrow).unflatten(-1, (-1, LINEAR_HEAD_DIM))
        return self.out_proj(activation(self.norm(output, gate).flatten(-2)))


def rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`values` [B, T, H, HEAD_DIM] with their first ROTARY_DIM channels rotated; cos and sin [T, ROTARY_DIM]."""
    turned, rest = values[..., :ROTARY_DIM], values[..., ROTARY_DIM:]
    first, second = turned.chunk(2, -1)
    swapped = torch.cat((-second, first), -1)
    return torch.cat((turned * cos[:, None] + swapped * sin[:, None], rest), -1)


def _flash(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """Causal attention of flattened documents [B * T, H, HEAD_DIM]; boundaries int32."""
    result: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, boundaries, boundaries, longest, longest, 0.0, True, False, scale=HEAD_DIM**-0.5
    )[0]
    return result


def _attend(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    """Causal attention within documents, [B, T, H, HEAD_DIM] each, heads equal."""
    if rows.boundaries is None:
        document = rows.document
        mask = (document.unsqueeze(-1) == document.unsqueeze(-2)).tril().unsqueeze(1)
        parts = (part.transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2)
    flat = [part.flatten(0, 1) for part in (query, key, value)]
    return _flash(*flat, rows.boundaries, query.shape[1]).view_as(query)


class Attention(nn.Module):
    """Full attention with query and key norms, partial rotary embedding and an output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.hidden, config.heads * HEAD_DIM * 2, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(config.heads * HEAD_DIM, config.hidden, bias=False)
        self.q_norm = RmsNorm(HEAD_DIM)
        self.k_norm = RmsNorm(HEAD_DIM)

    def forward(self, hidden: Tensor, rows: Rows) -> Tensor:
        narrow = activation(hidden)
        query, gate = self.q_proj(narrow).unflatten(-1, (-1, 2 * HEAD_DIM)).chunk(2, -1)
        key = self.k_proj(narrow).unflatten(-1, (-1, HEAD_DIM))
        value = self.v_proj(narrow).unflatten(-1, (-1, HEAD_DIM))
        query = rotate(self.q_norm(query), rows.cos, rows.sin)
        key = rotate(self.k_norm(key), rows.cos, rows.sin)
        key, value = cached(key), cached(value)
        groups = self.config.heads // self.config.kv_heads
        output = _attend(query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2), rows)
        return self.o_proj(activation((output * gate.sigmoid()).flatten(-2)))


class Mlp(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, narrow: Tensor) -> Tensor:
        return self.down_proj(activation(F.silu(self.gate_proj(narrow)) * self.up_proj(narrow)))


class Experts(nn.Module):
    """Routed experts: gate_up_proj [E, 2 I, H], down_proj [E, H, I]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * config.intermediate, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.hidden, config.intermediate))

    def activations(self, narrow: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up products of all experts, [B, T, E, I] each."""
        experts, double, _ = self.gate_up_proj.shape
        both = F.linear(narrow, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (experts, 2, double // 2))
        return both[..., 0, :], both[..., 1, :]

    def forward(self, narrow: Tensor, weight: Tensor) -> Tensor:
        """All experts on all tokens, weighted: with few small experts this beats gathering. weight: [B, T, E]."""
        gate, up = self.activations(narrow)
        inner = activation(F.silu(gate) * up) * weight.unsqueeze(-1)
        return F.linear(inner.flatten(-2), self.down_proj.permute(1, 0, 2).flatten(1))


class SparseMoe(nn.Module):
    """Top-k routed experts and a gated shared one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = Mlp(config.hidden, config.shared_intermediate)
        self.shared_expert_gate = nn.Linear(config.hidden, 1, bias=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed output, and the load-balance loss (1 when even)."""
        narrow = activation(hidden)
        chances = self.gate(hidden).float().softmax(-1)
        best, index = chances.topk(self.config.experts_per_token, -1)
        chosen = torch.zeros_like(chances).scatter(-1, index, 1.0)
        weight = chances * chosen / best.sum(-1, keepdim=True)
        share = chosen.flatten(0, -2).mean(0) / self.config.experts_per_token
        balance = self.config.experts * (share.detach() * chances.flatten(0, -2).mean(0)).sum()
        routed = self.experts(narrow, weight.to(hidden.dtype))
        shared = self.shared_expert(narrow) * self.shared_expert_gate(hidden).sigmoid()
        return routed + shared, balance


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, *, full_attention: bool) -> None:
        super().__init__()
        self.full_attention = full_attention
        self.input_layernorm = RmsNorm(config.hidden)
        self.post_attention_layernorm = RmsNorm(config.hidden)
        if full_attention:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = SparseMoe(config) if config.experts else Mlp(config.hidden, config.intermediate)

    def forward(self, hidden: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The next hidden states and the balance loss, 0 for a dense layer."""
        normed = self.input_layernorm(hidden)
        if self.full_attention:
            hidden = hidden + self.self_attn(normed, rows)
        else:
            hidden = hidden + self.linear_attn(normed, rows.document)
        normed = self.post_attention_layernorm(hidden)
        if isinstance(self.mlp, SparseMoe):
            output, balance = self.mlp(normed)
            return hidden + output, balance
        return hidden + self.mlp(activation(normed)), hidden.new_zeros((), dtype=torch.float32)


class Mtp(nn.Module):
    """The multi-token prediction layer: hidden state of a token and embedding of the next give the one after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.layers = nn.ModuleList([Block(config, full_attention=True)])
        self.norm = RmsNorm(config.hidden)
        self.pre_fc_norm_hidden = RmsNorm(config.hidden)
        self.pre_fc_norm_embedding = RmsNorm(config.hidden)

    def forward(self, hidden: Tensor, embedding: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Normed hidden states for the head and for the next draft step, and the balance loss."""
        joined = torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), -1)
        output, balance = self.layers[0](self.fc(joined), rows)
        return self.norm(output), balance


class ReferenceModel(nn.Module):
    """Trunk, head and MTP layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(
            [Block(config, full_attention=config.is_full_attention(index)) for index in range(config.layers)]
        )
        self.norm = RmsNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.mtp = Mtp(config)

    def trunk(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Normed hidden states [B, T, H], and the sum of the layers' balance losses."""
        hidden = self.embed_tokens(rows.tokens)
        balance = torch.zeros((), device=hidden.device)
        for layer in self.layers:
            hidden, extra = layer(hidden, rows)
            balance = balance + extra
        return self.norm(hidden), balance

    def draft(self, hidden: Tensor, rows: Rows, step: int) -> tuple[Tensor, Tensor]:
        """Hidden states of draft step 1 or 2: position t then predicts token t + 1 + step."""
        following = rows.tokens.roll(-step, -1)
        return self.mtp(hidden, self.embed_tokens(following), rows)


def rotary(length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, ROTARY_DIM]; for text the three MRoPE positions agree, so this is plain RoPE."""
    rates = 1.0 / ROPE_THETA ** (torch.arange(0, ROTARY_DIM, 2, dtype=torch.float32) / ROTARY_DIM)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rates
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@torch.no_grad()
def initialize(model: ReferenceModel, seed: int) -> None:
    """Fill the parameters from a seed: small normal matrices, quiet residual outputs, decays from fast to slow."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape)
        if name.endswith("A_log"):
            value.uniform_(0.5, 8.0, generator=generator).log_()
        elif name.endswith("dt_bias"):
            step = torch.exp(value.uniform_(-6.9, -2.3, generator=generator))
            value = step + torch.log(-torch.expm1(-step))
        elif parameter.ndim < 2:
            continue
        elif "conv1d" in name:
            value.uniform_(-0.5, 0.5, generator=generator)
        elif "embed_tokens" in name:
            value.normal_(0, 1.0, generator=generator)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            value.normal_(0, 0.3 * parameter.shape[-1] ** -0.5, generator=generator)
        else:
            value.normal_(0, 0.7 * parameter.shape[-1] ** -0.5, generator=generator)
        parameter.copy_(value)
