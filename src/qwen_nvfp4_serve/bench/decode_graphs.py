"""How long vLLM's decode graphs take by themselves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib import import_module
from typing import Any

BATCHES, REPLAYS = 7, 8  # of a graph: half a second of steps of 10 ms each


def replay_us(runner: Any, tokens: Sequence[int]) -> dict[int, float]:
    """Microseconds of a replay of the graph that decodes so many tokens, with nothing between: what a step of the card
    is without the host, and without the head and sampling, which follow it.

    runner: vLLM's model runner. Empty where it has no graphs (on a CPU, eager), or keeps them elsewhere than 0.33 does.
    Replays write where the last step did.
    """
    cuda = import_module("torch").cuda
    graphs = getattr(getattr(runner, "cudagraph_manager", None), "graphs", None)
    if not cuda.is_available() or not isinstance(graphs, dict):
        return {}
    return {kind.num_tokens: median_us(cuda, graph) for kind, graph in graphs.items() if kind.num_tokens in tokens}


def median_us(cuda: Any, graph: Any) -> float:
    """Microseconds of a replay of a CUDA graph, many times over. cuda: torch.cuda."""
    times = []
    for _ in range(BATCHES):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPLAYS)
    return float(statistics.median(times))
