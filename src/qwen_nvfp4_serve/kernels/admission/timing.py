"""How long a candidate's calls take, on a card and on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from qwen_nvfp4_serve.kernels import graph_timing
from qwen_nvfp4_serve.kernels.graph_timing import Call
from qwen_nvfp4_serve.kernels.nvfp4_linear import launch

CPU_REPEATS = 5

Timer = Callable[[Sequence[Call]], float]


def cuda_timer(calls: Sequence[Call]) -> float:
    """Median microseconds that a call adds behind a small kernel; without our small kernel, of calls in a row."""
    found = graph_timing.behind_us(calls)
    if found is None:
        return bare_cuda_timer(calls)
    _drop_workspaces()
    return found


def bare_cuda_timer(calls: Sequence[Call]) -> float:
    """Median microseconds of a call in a CUDA graph of all of them, one after the other."""
    found = graph_timing.graph_us(calls)
    _drop_workspaces()
    return found


def _drop_workspaces() -> None:
    # Each measurement has a stream of its own, and every stream its workspaces.
    launch._partials.clear()
    launch._dequantized.clear()


def cpu_timer(calls: Sequence[Call]) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(CPU_REPEATS):
        begin = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - begin) * 1e6 / len(calls))
    return statistics.median(times)
