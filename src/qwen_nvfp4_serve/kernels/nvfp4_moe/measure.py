"""Measures the mixture-of-experts block on this machine's card: correctness against FP64, then time, then vLLM's way.

python -m qwen_nvfp4_serve.kernels.nvfp4_moe.measure OUT.json [--shapes 35b …] [--tokens 1 2 …] [--commit C]

Times are medians of CUDA graph replays of a stack of layers, each with a shared expert and a router of its own and
with experts elected anew, so that no weight comes from the L2 cache. vLLM's kernels run the same stack if importable.
The file has the form of docs/results/moe-h200.json; engine and profile are filled in by other tools.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from qwen_nvfp4_serve.kernels import nvfp4_moe
from qwen_nvfp4_serve.kernels.graph_timing import graph_us
from qwen_nvfp4_serve.kernels.nvfp4_moe import check, launch
from qwen_nvfp4_serve.kernels.nvfp4_moe.check import Block

CHECKED_TOKENS = (1, 2, 3, 4, 8, 15, 16, 17, 32)
TIMED_TOKENS = (1, 2, 4, 8, 16, 32)
LAYERS = 32  # of the stack that is timed: 56 MB of shared experts and 32 MB of routers at the 35B's dimensions
DISTINCT_EXPERTS_BYTES = 2 * 2**30  # of the stack's routed experts, which layers take turns with
TIMED_SHAPES = ("35b", "35b/tp2")


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """Layers to be timed, one after another, and what each is given. x: bf16 [M, H]. chosen: ids and weights [M, k]."""

    layers: list[Block]
    x: list[torch.Tensor]
    chosen: list[tuple[torch.Tensor, torch.Tensor]]


def layers_of(block: Block) -> list[Block]:
    """LAYERS layers like `block`, which take turns with a few copies of its routed experts."""
    dims, generator = block.dims, torch.Generator("cuda").manual_seed(5)
    one = sum(tensor.numel() for tensor in block.experts.tensors())
    distinct = [block.experts]
    while len(distinct) < min(LAYERS, max(2, DISTINCT_EXPERTS_BYTES // one)):
        distinct.append(_copy(block.experts))
    layers = [
        dataclasses.replace(
            block,
            experts=distinct[i % len(distinct)],
            router=check.random_rows(dims.experts, dims.hidden, generator),
            shared=None if block.shared is None else _copy(block.shared),
        )
        for i in range(LAYERS)
    ]
    torch.cuda.synchronize()  # the kernels read weights before they wait for the work ahead of them
    return layers


def stack_of(layers: list[Block], tokens: int) -> Stack:
    """The layers with activations of their own and the experts that their routers elect for them."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = [torch.randn(tokens, layer.dims.hidden, device="cuda", generator=generator).bfloat16() for layer in layers]
    chosen = []
    for layer, given in zip(layers, x, strict=True):
        share, ids = nvfp4_moe.select_experts(given @ layer.router.T, layer.dims.top_k)
        chosen.append((ids, share))
    return Stack(layers, x, chosen)


def _copy(weights: nvfp4_moe.ExpertWeights) -> nvfp4_moe.ExpertWeights:
    return nvfp4_moe.ExpertWeights.of([tensor.clone() for tensor in weights.tensors()])


def stack_us(stack: Stack, call: Callable[[int], object]) -> float:
    """Microseconds a layer, for `call(layer)` over the stack in one graph."""
    return graph_us([lambda i=i: call(i) for i in range(len(stack.layers))])  # type: ignore[misc]


def time_ours(stack: Stack) -> dict[str, float]:
    """The block, its routed experts alone, and its router alone, in microseconds."""
    k = stack.layers[0].dims.top_k

    def block(i: int) -> object:
        layer = stack.layers[i]
        return nvfp4_moe.moe_block(
            stack.x[i], layer.router, layer.experts, top_k=k, shared=layer.shared, shared_gate=layer.shared_gate
        )

    def experts(i: int) -> object:
        return nvfp4_moe.moe_experts(stack.x[i], stack.layers[i].experts, *stack.chosen[i])

    def router(i: int) -> object:
        layer = stack.layers[i]
        return launch.route(stack.x[i], layer.router, k, True, layer.shared_gate)

    return {
        "ours_us": stack_us(stack, block),
        "experts_us": stack_us(stack, experts),
        "router_us": stack_us(stack, router),
    }


class Stock:
    """vLLM's kernels for the same layers."""

    def __init__(self, layers: list[Block]) -> None:
        from qwen_nvfp4_serve.kernels.nvfp4_moe import stock

        repacked: dict[int, stock.StockExperts] = {}
        for layer in layers:
            key = layer.experts.w13.data_ptr()
            if key not in repacked:
                repacked[key] = stock.StockExperts.of(layer.experts)
        self.experts = [repacked[layer.experts.w13.data_ptr()] for layer in layers]
        self.blocks = [stock.StockBlock.of(layer, self.experts[i]) for i, layer in enumerate(layers)]

    def time(self, stack: Stack) -> dict[str, float]:
        """The block and its routed experts alone, in microseconds."""
        return {
            "stock_us": stack_us(stack, lambda i: self.blocks[i](stack.x[i])),
            "stock_experts_us": stack_us(stack, lambda i: self.experts[i](stack.x[i], *stack.chosen[i])),
        }


def distance_to_stock(block: Block, tokens: int) -> float:
    """|ours - vLLM's| / |ours| over routed experts whose gates and ups share a global scale, which vLLM needs."""
    from qwen_nvfp4_serve.kernels.nvfp4_moe import stock

    experts = dataclasses.replace(block.experts, up_scale=block.experts.gate_scale)
    generator = torch.Generator("cuda").manual_seed(9)
    x = torch.randn(tokens, block.dims.hidden, device="cuda", generator=generator).bfloat16()
    share, ids = check.election("uniform", tokens, block.dims, generator)
    ours = nvfp4_moe.moe_experts(x, experts, ids, share).float()
    return float((ours - stock.StockExperts.of(experts)(x, ids, share).float()).norm() / ours.norm())


def check_shape(block: Block) -> dict[int, float]:
    """For each M of CHECKED_TOKENS, the largest error as a fraction of what is allowed, over all kinds of elections."""
    generator = torch.Generator("cuda").manual_seed(1)
    worst = dict.fromkeys(CHECKED_TOKENS, 0.0)
    for m in CHECKED_TOKENS:
        x = torch.randn(m, block.dims.hidden, device="cuda", generator=generator).bfloat16()
        for kind in check.ELECTIONS:
            share, ids = check.election(kind, m, block.dims, generator)
            found = check.worst_error(block, x, ids, share, with_shared=block.shared is not None)
            worst[m] = max(worst[m], found)
    return worst


def measure_shape(name: str, tokens: Sequence[int], with_stock: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything about one shape, in values that JSON takes."""
    block = check.random_block(check.SHAPES[name])
    worst = check_shape(block)
    say(f"{name}: worst {max(worst.values()):.3f} of the bound")
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(512, block.dims.hidden, device="cuda", generator=generator).bfloat16()
    moved = [check.moved_elections(block, part) for part in x.split(nvfp4_moe.KERNEL_TOKENS)]
    result: dict[str, Any] = {
        "shape": name,
        **dataclasses.asdict(block.dims),
        "max_err": worst,
        "elections": {"tokens": 512, "moved": sum(m for m, _ in moved), "unexplained": sum(u for _, u in moved)},
        "block": [],
    }
    if name not in TIMED_SHAPES:
        return result
    layers = layers_of(block)
    stock = None
    if with_stock:
        result["distance_to_stock"] = distance_to_stock(block, 4)
        stock = Stock(layers)
    for m in tokens:
        stack = stack_of(layers, m)
        elected = [int(ids.unique().numel()) for ids, _ in stack.chosen]
        row = {"M": m, **time_ours(stack), "stock_us": None, "stock_experts_us": None}
        row |= stock.time(stack) if stock else {}
        row |= {"max_err": worst.get(m), "elected": sum(elected) / len(elected)}
        result["block"].append(row)
        say(line_of(row))
    return result


HEADER = "   M  block us  stock us  ratio  experts us  stock us  router us  elected  max err"


def line_of(row: dict[str, Any]) -> str:
    """A row of the table under HEADER."""
    ratio = f"{row['stock_us'] / row['ours_us']:.2f}" if row["stock_us"] else "-"
    numbers = [row["ours_us"], row["stock_us"], ratio, row["experts_us"], row["stock_experts_us"], row["router_us"]]
    shown = ["-" if n is None else n if isinstance(n, str) else f"{n:.1f}" for n in numbers]
    widths = (9, 9, 6, 11, 9, 10)
    cells = " ".join(text.rjust(width) for text, width in zip(shown, widths, strict=True))
    return f"{row['M']:4d} {cells} {row['elected']:8.1f} {row['max_err'] or 0:8.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes OUT.json after every shape, so that a cut run leaves what it has; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=list(check.SHAPES), default=["embedded", "35b", "35b/tp2"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TIMED_TOKENS))
    parser.add_argument("--no-stock", action="store_true", help="leave vLLM's kernels out")
    parser.add_argument("--commit", help="of this project, for the record")
    chosen = parser.parse_args(arguments)
    with_stock = not chosen.no_stock and importlib.util.find_spec("vllm") is not None
    version = None
    if with_stock:
        from qwen_nvfp4_serve.kernels.nvfp4_moe import stock

        stock.load_ops()
        version = stock.version()
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "commit": chosen.commit,
        "vllm": version,
        "torch": torch.__version__,
        "block": [],
        "shapes": [],
        "engine": None,
        "profile_before": None,
        "profile_after": None,
    }
    began = time.monotonic()
    print(HEADER)
    for name in chosen.shapes:
        shape = measure_shape(
            name,
            chosen.tokens,
            with_stock,
            lambda text: print(f"{text}   [{time.monotonic() - began:.0f} s]", flush=True),
        )
        result["shapes"].append(shape)
        if name == TIMED_SHAPES[0]:
            result["block"] = shape["block"]
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(result, indent=1))
    print(table_of(result))
    wrong = [s for s in result["shapes"] if max(s["max_err"].values()) > 1 or s["elections"]["unexplained"]]
    return int(bool(wrong))


def table_of(result: dict[str, Any]) -> str:
    """The short table that ends a run."""
    lines = []
    for shape in result["shapes"]:
        elections = shape["elections"]
        lines.append(
            f"{shape['shape']}: error {max(shape['max_err'].values()):.3f} of the bound; elections moved "
            f"{elections['moved']} of {elections['tokens']}, unexplained {elections['unexplained']}; "
            f"distance to stock {shape.get('distance_to_stock')}"
        )
        if shape["block"]:
            lines += [HEADER, *(line_of(row) for row in shape["block"])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
