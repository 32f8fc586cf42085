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
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from tests import stock_gdn

from qwen_nvfp4_serve.bench.decode_graphs import median_us
from qwen_nvfp4_serve.bench.kernel_times import apart_on_card
from qwen_nvfp4_serve.dims import Dims, dims_from_config
from qwen_nvfp4_serve.kernels import bf16_linear, gdn_decode
from qwen_nvfp4_serve.kernels.admission import bf16
from qwen_nvfp4_serve.kernels.admission.shapes import layers_of
from qwen_nvfp4_serve.kernels.gdn_decode.check import Form, moved, random_step
from qwen_nvfp4_serve.kernels.nvfp4_linear import launch
from qwen_nvfp4_serve.kernels.nvfp4_linear.marlin import MarlinWeight
from qwen_nvfp4_serve.kernels.nvfp4_linear.measure import random_weight
from qwen_nvfp4_serve.kernels.nvfp4_linear.shapes import LinearShape
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec
from qwen_nvfp4_serve.synthetic.config import model_config

SIZES = {"27b": "27b", "35b": "35b-a3b"}
DELTA_NET = ("gdn_qkvz", "gdn_ba", "gdn_out")  # which a checkpoint of llm-compressor's kind leaves in BF16
ATTENTION, BOTH = ("attn_qkv", "attn_o"), ("gate_up", "down")
PROFILED = 3
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """Its layers by kind, [N, K] of each linear layer by its role, and widths of what stands between them."""

    kinds: tuple[str, ...]
    sizes: dict[str, tuple[int, int]]
    attention: int
    form: Form

    @property
    def conv(self) -> int:
        """Channels of the convolution."""
        return (2 + self.form.group) * self.form.key_heads * gdn_decode.HEAD


def model_of(size: str, tokens: int) -> Model:
    """One of SIZES; tokens: how many elect experts."""
    config = model_config(CheckpointSpec(architecture=ARCHITECTURES[SIZES[size]], style="ct-w4a4"))
    dims = dims_from_config(config)
    if dims.is_moe:
        dims = replace(dims, intermediate=elected_columns(dims, tokens))
    layers = layers_of(dims)
    return Model(
        kinds=tuple(config["text_config"]["layer_types"]),
        sizes={role: (layers[role].n, layers[role].k) for role in (*DELTA_NET, *ATTENTION, *BOTH)},
        attention=dims.q_heads * dims.head_dim,
        form=Form(dims.gdn_key_heads, dims.gdn_value_heads // dims.gdn_key_heads),
    )


def elected_columns(dims: Dims, tokens: int) -> int:
    """Columns of all experts that so many tokens elect at random, the shared one with them."""
    elected = dims.experts * (1 - (1 - dims.experts_per_token / dims.experts) ** tokens)
    return round(elected) * dims.expert_intermediate + dims.shared_intermediate


@dataclass(frozen=True)
class Layer:
    """Weights by role, and of a delta net layer a step that keeps its states."""

    kind: str
    weights: dict[str, Any]
    step: gdn_decode.Step | None


class Kernels(Protocol):
    """Whose kernels compute. Each gives new rows; the delta net fills its step's outputs."""

    def linear(self, layer: Layer, role: str, x: torch.Tensor) -> torch.Tensor: ...
    def projections(self, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def delta_net(self, step: gdn_decode.Step) -> None: ...
    def norm(self, h: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor: ...
    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...
    def gated_norm(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor: ...


def decode_step(model: Model, layers: list[Layer], kernels: Kernels, first: torch.Tensor, h: torch.Tensor) -> None:
    """One step of all layers; h is overwritten with `first` and what the layers add to it."""
    h.copy_(first)
    delta: torch.Tensor | None = None
    half, width = model.sizes["down"][1], model.attention
    for layer in layers:
        y = kernels.norm(h, delta)
        if layer.step is not None:
            qkvz, ba = kernels.projections(layer, y)
            heads = ba.shape[1] // 2
            step = replace(layer.step, x=qkvz[:, : model.conv], a=ba[:, heads:], b=ba[:, :heads])
            kernels.delta_net(step)
            o = kernels.gated_norm(step.out.flatten(1), qkvz[:, model.conv :])
            delta = kernels.linear(layer, "gdn_out", o)
        else:
            qkv = kernels.linear(layer, "attn_qkv", y)
            delta = kernels.linear(layer, "attn_o", kernels.gate(qkv[:, width : 2 * width], qkv[:, :width]))
        gate_up = kernels.linear(layer, "gate_up", kernels.norm(h, delta))
        delta = kernels.linear(layer, "down", kernels.gate(gate_up[:, :half], gate_up[:, half:]))


class Ours:
    """Our kernels, launched dependently."""

    def __init__(self, model: Model, tokens: int, glue: Any) -> None:
        self.model = model
        self.counts = gdn_decode.counters("cuda", tokens, model.form.key_heads)  # left zero by each layer
        self.norm, self.gate, self.gated_norm = glue.norm, glue.gate, glue.gated_norm

    def linear(self, layer: Layer, role: str, x: torch.Tensor) -> torch.Tensor:
        """By the small-M kernels."""
        y = torch.empty(x.shape[0], self.model.sizes[role][0], dtype=BF16, device=x.device)
        weight = layer.weights[role]
        if role in DELTA_NET:
            bf16_linear.small_m(x, weight, None, y)
        else:
            launch.small_m(x, weight.packed, weight.scales, weight.row_scale, None, y)
        return y

    def projections(self, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As one product."""
        qkvz, ba = layer.weights["gdn_qkvz"], layer.weights["gdn_ba"]
        weight = bf16.joined(qkvz, ba)
        assert weight is not None
        y = torch.empty(x.shape[0], weight.shape[0], dtype=BF16, device=x.device)
        bf16_linear.small_m(x, weight, None, y)
        return y[:, : qkvz.shape[0]], y[:, qkvz.shape[0] :]

    def delta_net(self, step: gdn_decode.Step) -> None:
        """In one launch, as an engine does."""
        gdn_decode.decode(step, self.counts, early=True)


class Stock:
    """vLLM's: Marlin, torch's products, its two launches for the delta net."""

    def __init__(self, glue: Any, marlin: Path) -> None:
        self.norm, self.gate, self.gated_norm = glue.norm, glue.gate, glue.gated_norm
        torch.ops.load_library(str(marlin))

    def repacked(self, layer: Layer) -> Layer:
        """The layer with a second copy of its NVFP4 weights, in Marlin's layout, which has one scale for all rows."""
        packs = {
            role: one if role in DELTA_NET else MarlinWeight.pack(one.packed, one.scales, one.shard_scales[0])
            for role, one in layer.weights.items()
        }
        return replace(layer, weights=packs)

    def linear(self, layer: Layer, role: str, x: torch.Tensor) -> torch.Tensor:
        """By Marlin, or by torch where weights are BF16."""
        weight = layer.weights[role]
        return torch.nn.functional.linear(x, weight) if role in DELTA_NET else weight(x)

    def projections(self, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As two."""
        return self.linear(layer, "gdn_qkvz", x), self.linear(layer, "gdn_ba", x)

    def delta_net(self, step: gdn_decode.Step) -> None:
        """What was x of the projections is overwritten."""
        stock_gdn.decode(step)


def random_layers(model: Model, tokens: int) -> list[Layer]:
    """Layers of random weights on the card, with states for so many tokens."""
    states = random_step(model.form, tuple(range(1, tokens + 1)), slots=tokens + 1)  # slot 0 is nobody's
    layers = []
    for kind in model.kinds:
        recurrent = kind == "linear_attention"
        weights = {role: random_weight_of(model, role) for role in (*(("gdn_out",) if recurrent else ATTENTION), *BOTH)}
        if recurrent:
            weights |= random_projections(model)
        layers.append(Layer(kind, weights, moved(states, "cuda") if recurrent else None))
    return layers


def random_weight_of(model: Model, role: str) -> Any:
    """BF16 or NVFP4, as the role has it."""
    n, k = model.sizes[role]
    if role in DELTA_NET:
        return torch.randn(n, k, device="cuda").to(BF16) * 0.02
    return random_weight(LinearShape("step", role, n, k))


def random_projections(model: Model) -> dict[str, torch.Tensor]:
    """The delta net's two of its input, which lie behind each other as in an engine."""
    roles = DELTA_NET[:2]
    rows, k = [model.sizes[role][0] for role in roles], model.sizes[roles[0]][1]
    both = torch.randn(sum(rows), k, device="cuda").to(BF16) * 0.02
    return dict(zip(roles, both.split(rows), strict=True))


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
    return {
        name[:120]: {"us": us / PROFILED, "calls": calls / PROFILED}
        for name, us, calls in sorted(apart_on_card(trace), key=lambda row: -row[1])
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
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "size": chosen.size,
        "tokens": chosen.tokens,
        "us": defaultdict(list),
        "kernels": {},
    }
    for tokens in chosen.tokens:
        model = model_of(chosen.size, tokens)
        layers = random_layers(model, tokens)
        first = torch.randn(tokens, model.sizes["down"][0], device="cuda").to(BF16)
        forms: dict[str, tuple[list[Layer], Kernels]] = {"ours": (layers, Ours(model, tokens, glue(dependent=True)))}
        if chosen.marlin:
            stock = Stock(glue(dependent=False), chosen.marlin)
            forms["stock"] = ([stock.repacked(layer) for layer in layers], stock)
        for whose, (own, kernels) in forms.items():
            step = partial(decode_step, model, own, kernels, first, torch.empty_like(first))
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
