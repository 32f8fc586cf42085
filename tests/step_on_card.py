"""Where the time of a decode step goes, without an engine: python -m tests.step_on_card OUT.json [--size 27b]

Not a test. All layers of a model in one CUDA graph, each with weights of its own, without attention itself: the delta
net, the NVFP4 and BF16 layers, norms and gates. By our kernels, and where --marlin names vLLM's _C_stable_libtorch and
vLLM is there, by its own. A kernel that is fast alone may be slow here, or slow those after it. In the place of experts
the 35B has an NVFP4 gate_up and down of as many weights as its tokens elect at random.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from qwen_nvfp4_serve.bench.decode_graphs import median_us
from qwen_nvfp4_serve.bench.kernel_times import apart
from qwen_nvfp4_serve.kernels import bf16_linear, gdn_decode, nvfp4_linear
from qwen_nvfp4_serve.kernels.nvfp4_linear import launch
from qwen_nvfp4_serve.kernels.nvfp4_linear.marlin import MarlinWeight
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec
from qwen_nvfp4_serve.synthetic.config import model_config

SIZES = {"27b": "27b", "35b": "35b-a3b"}
HEAD, SCALE, PROFILED = 128, 2.9e-3, 3
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Dims:
    """Of a model: layers by kind; [N, K] of each linear layer by its role, of NVFP4 and of BF16."""

    kinds: tuple[str, ...]
    hidden: int
    attention: int
    value_heads: int
    key_heads: int
    nvfp4: dict[str, tuple[int, int]]
    bf16: dict[str, tuple[int, int]]

    @property
    def conv(self) -> int:
        """Channels of the convolution."""
        return (2 * self.key_heads + self.value_heads) * HEAD


def dims_of(text: dict[str, Any], tokens: int) -> Dims:
    """From a config's text part; tokens: how many elect experts."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"] * text["head_dim"]
    columns = text.get("intermediate_size") or elected_columns(text, tokens)
    key, value = text["linear_num_key_heads"], text["linear_num_value_heads"]
    projections = 2 * heads + 2 * text["num_key_value_heads"] * text["head_dim"]  # queries and their gate, keys, values
    return Dims(
        kinds=tuple(text["layer_types"]),
        hidden=hidden,
        attention=heads,
        value_heads=value,
        key_heads=key,
        nvfp4={
            "attn_qkv": (projections, hidden),
            "attn_o": (hidden, heads),
            "gate_up": (2 * columns, hidden),
            "down": (hidden, columns),
        },
        bf16={
            "gdn_qkvz": ((2 * key + 2 * value) * HEAD, hidden),
            "gdn_ba": (2 * value, hidden),
            "gdn_out": (hidden, value * HEAD),
        },
    )


def elected_columns(text: dict[str, Any], tokens: int) -> int:
    """Columns of all experts that so many tokens elect at random, the shared one with them."""
    experts, each = text["num_experts"], text["moe_intermediate_size"]
    elected = experts * (1 - (1 - text["num_experts_per_tok"] / experts) ** tokens)
    return round(elected) * each + int(text["shared_expert_intermediate_size"])


@dataclass
class Layer:
    """Weights by role, and what a delta net layer keeps."""

    kind: str
    weights: dict[str, Any]
    delta: dict[str, Any] = field(default_factory=dict)


class Kernels(Protocol):
    """Whose kernels compute. Each gives a new row for every token."""

    def linear(self, layer: Layer, role: str, x: torch.Tensor) -> torch.Tensor: ...
    def delta_net(self, layer: Layer, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor: ...
    def norm(self, h: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor: ...
    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...
    def gated_norm(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor: ...


def decode_step(dims: Dims, layers: list[Layer], kernels: Kernels, first: torch.Tensor, h: torch.Tensor) -> None:
    """One step of all layers; h is overwritten with `first` and what the layers add to it."""
    h.copy_(first)
    delta: torch.Tensor | None = None
    half = dims.nvfp4["down"][1]
    for layer in layers:
        y = kernels.norm(h, delta)
        if layer.kind == "linear_attention":
            qkvz, ba = kernels.linear(layer, "gdn_qkvz", y), kernels.linear(layer, "gdn_ba", y)
            o = kernels.gated_norm(kernels.delta_net(layer, qkvz, ba), qkvz[:, dims.conv :])
            delta = kernels.linear(layer, "gdn_out", o)
        else:
            qkv = kernels.linear(layer, "attn_qkv", y)
            queries, gates = qkv[:, : dims.attention], qkv[:, dims.attention : 2 * dims.attention]
            delta = kernels.linear(layer, "attn_o", kernels.gate(gates, queries))
        gate_up = kernels.linear(layer, "gate_up", kernels.norm(h, delta))
        delta = kernels.linear(layer, "down", kernels.gate(gate_up[:, :half], gate_up[:, half:]))


def delta_net_step(dims: Dims, layer: Layer, qkvz: torch.Tensor, ba: torch.Tensor) -> gdn_decode.Step:
    """The layer's step for these projections, each token with a slot of its own."""
    heads, m, own = dims.value_heads, qkvz.shape[0], layer.delta
    return gdn_decode.Step(
        x=qkvz[:, : dims.conv],
        weight=own["weight"],
        bias=None,
        a=ba[:, heads:],
        b=ba[:, :heads],
        a_log=own["a_log"],
        dt_bias=own["dt_bias"],
        indices=own["indices"][:m],
        conv_state=own["conv_state"],
        state=own["state"],
        out=own["out"][:m],
    )


class Ours:
    """Our kernels, launched dependently."""

    def __init__(self, dims: Dims, glue: Any) -> None:
        self.dims = dims
        self.norm, self.gate, self.gated_norm = glue.norm, glue.gate, glue.gated_norm

    def linear(self, layer: Layer, role: str, x: torch.Tensor) -> torch.Tensor:
        """By the small-M kernels."""
        n = (self.dims.nvfp4.get(role) or self.dims.bf16[role])[0]
        y = torch.empty(x.shape[0], n, dtype=BF16, device=x.device)
        weight = layer.weights[role]
        if role in self.dims.nvfp4:
            launch.small_m(x, weight.packed, weight.scales, weight.row_scale, None, y)
        else:
            bf16_linear.small_m(x, weight, None, y)
        return y

    def delta_net(self, layer: Layer, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        """In one launch."""
        step = delta_net_step(self.dims, layer, qkvz, ba)
        gdn_decode.decode(step, layer.delta["counts"])
        return step.out.flatten(1)


class Stock:
    """vLLM's: Marlin, torch's products, its two launches for the delta net."""

    def __init__(self, dims: Dims, glue: Any, marlin: Path) -> None:
        self.dims = dims
        self.norm, self.gate, self.gated_norm = glue.norm, glue.gate, glue.gated_norm
        torch.ops.load_library(str(marlin))
        layers = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
        self.convolve = import_module(layers).causal_conv1d_update
        delta = import_module("vllm.third_party.flash_linear_attention.ops")
        self.recur = delta.fused_recurrent_gated_delta_rule_packed_decode

    def repacked(self, layer: Layer) -> Layer:
        """The layer with a second copy of its NVFP4 weights, in Marlin's layout."""
        packs = {
            role: MarlinWeight.pack(weight.packed, weight.scales, SCALE) if role in self.dims.nvfp4 else weight
            for role, weight in layer.weights.items()
        }
        return Layer(layer.kind, packs, layer.delta)

    def linear(self, layer: Layer, role: str, x: torch.Tensor) -> torch.Tensor:
        """By Marlin, or by torch where weights are BF16."""
        weight = layer.weights[role]
        return weight(x) if role in self.dims.nvfp4 else torch.nn.functional.linear(x, weight)

    def delta_net(self, layer: Layer, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        """As vLLM's layer does; what was x of the projections is overwritten."""
        step = delta_net_step(self.dims, layer, qkvz, ba)
        states = step.conv_state.transpose(-1, -2)
        slots = {"conv_state_indices": step.indices, "validate_data": False}
        mixed = self.convolve(step.x, states, step.weight, None, "silu", **slots)
        self.recur(
            mixed_qkv=mixed,
            a=step.a.contiguous(),
            b=step.b.contiguous(),
            A_log=step.a_log,
            dt_bias=step.dt_bias,
            scale=step.scale,
            initial_state=step.state,
            out=step.out.unsqueeze(1),
            ssm_state_indices=step.indices,
            use_qk_l2norm_in_kernel=True,
        )
        return step.out.flatten(1)


def random_layer(dims: Dims, kind: str, tokens: int, device: str) -> Layer:
    """A layer of random weights, with room for the states of so many tokens."""
    recurrent = kind == "linear_attention"
    roles = ["gate_up", "down", *(["gdn_qkvz", "gdn_ba", "gdn_out"] if recurrent else ["attn_qkv", "attn_o"])]
    layer = Layer(kind, {role: random_weight(dims, role, device) for role in roles})
    if recurrent:
        heads, slots = dims.value_heads, tokens + 1  # slot 0 is nobody's
        layer.delta = {
            "weight": torch.randn(dims.conv, 4, device=device).to(BF16) * 0.5,
            "a_log": torch.randn(heads, device=device) * 0.3,
            "dt_bias": torch.randn(heads, device=device) * 0.3,
            "indices": torch.arange(1, slots, dtype=torch.int32, device=device),
            "conv_state": torch.zeros(slots, 3, dims.conv, dtype=BF16, device=device),
            "state": torch.zeros(slots, heads, HEAD, HEAD, device=device),
            "out": torch.zeros(tokens, heads, HEAD, dtype=BF16, device=device),
            "counts": gdn_decode.counters(device, tokens, dims.key_heads),
        }
    return layer


def random_weight(dims: Dims, role: str, device: str) -> Any:
    """BF16, or NVFP4 with scales of 1 to 4."""
    if role in dims.bf16:
        return torch.randn(dims.bf16[role], device=device).to(BF16) * 0.02
    n, k = dims.nvfp4[role]
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(56, 73, (n, k // 16), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return nvfp4_linear.prepare_weight(packed, scales, (n,), (SCALE,))


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The step as a graph; it has run once before, for workspaces and what is compiled."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.synchronize()
    return graph


def profiled(graph: torch.cuda.CUDAGraph) -> dict[str, dict[str, float]]:
    """Own microseconds and calls of each kernel of a replay, by its name, the dearest first."""
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    on_card = torch.autograd.DeviceType.CUDA
    events = (event for event in trace.events() if event.device_type == on_card)
    rows = apart((str(event.name), event.time_range.start, event.time_range.end) for event in events)
    return {
        name[:120]: {"us": us / PROFILED, "calls": calls / PROFILED}
        for name, us, calls in sorted(rows, key=lambda row: -row[1])
    }


def main() -> None:
    """Writes {card, torch, size, tokens, us: {ours, stock}, kernels} and prints the times."""
    parser = argparse.ArgumentParser(prog="step_on_card", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="27b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--marlin", type=Path, help="vLLM's _C_stable_libtorch, for its kernels beside ours")
    chosen = parser.parse_args()
    glue = import_module("tests.step_glue").Glue
    text = model_config(CheckpointSpec(architecture=ARCHITECTURES[SIZES[chosen.size]], style="ct-w4a4"))["text_config"]
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "size": chosen.size,
        "tokens": chosen.tokens,
        "us": defaultdict(list),
        "kernels": {},
    }
    for tokens in chosen.tokens:
        dims = dims_of(text, tokens)
        layers = [random_layer(dims, kind, tokens, "cuda") for kind in dims.kinds]
        first = torch.randn(tokens, dims.hidden, device="cuda").to(BF16)
        forms: dict[str, tuple[list[Layer], Kernels]] = {"ours": (layers, Ours(dims, glue(dependent=True)))}
        if chosen.marlin:
            stock = Stock(dims, glue(dependent=False), chosen.marlin)
            forms["stock"] = ([stock.repacked(layer) for layer in layers], stock)
        for whose, (own, kernels) in forms.items():
            step = partial(decode_step, dims, own, kernels, first, torch.empty_like(first))
            graph = captured(step)
            us = median_us(torch.cuda, graph)
            result["us"][whose].append(us)
            result["kernels"][f"{whose}, M={tokens}"] = profiled(graph)
            chosen.out.write_text(json.dumps(result, indent=1))
            print(f"{chosen.size}, {tokens} tokens, {whose}: {us:,.0f} us", flush=True)
        del layers, forms, graph, step, own, kernels
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
