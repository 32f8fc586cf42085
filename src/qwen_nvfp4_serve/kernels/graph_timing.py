"""How long calls take in a CUDA graph: one after the other, or each behind a small kernel as in a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.kernels import bf16_linear, build

REPEATS = 5
SMALL_SHAPE = (64, 2048)  # rows and columns of what runs before a timed call: the smallest layer of a checkpoint
SMALL_CALLS = 48  # that are timed alone, so that what starting a graph takes is little of each
LEAST_US = 0.1  # no launch takes less, and times are divided by each other

Call = Callable[[], object]


def graph_us(calls: Sequence[Call]) -> float:
    """Median microseconds of one of `calls`, captured together in a CUDA graph and replayed."""
    stream = torch.cuda.Stream()
    times = []
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        for repeat in range(REPEATS + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if repeat >= 2:
                times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times))


def behind_us(calls: Sequence[Call]) -> float | None:
    """Median microseconds that a call adds to a CUDA graph in which it follows a small kernel, as layers do in a step.

    One after the other, calls would hide their ends behind each other's beginnings, which no step lets them do; and an
    H200's vendor GEMM takes 10 % longer behind a kernel that lets the next one start early. None without our small
    kernel.
    """
    between = small_kernel()
    if between is None:
        return None
    # Two launches are one call here: what is called before a capture begins makes the candidate's workspaces.
    both = graph_us([partial(_in_turn, between, call) for call in calls])
    return max(both - _alone_us(), LEAST_US)


def _in_turn(*calls: Call) -> None:
    for call in calls:
        call()


@cache
def _alone_us() -> float:
    """What the small kernel takes. Measured once: one number for all candidates changes nothing in their order."""
    between = small_kernel()
    return graph_us([between] * SMALL_CALLS) if between else 0.0


def try_small_kernel() -> None:
    """Runs it for the first time, so that what it does to the process is not done while something else is timed."""
    _alone_us()


@cache
def small_kernel() -> Call | None:
    """A launch on the current card that waits for the one ahead and lets the next one start; None where none runs.

    It is of another library than most candidates, which are not to be blamed for its faults.
    """
    if build.find(build.BF16_LINEAR) is None or bf16_linear.supports(torch.cuda.get_device_capability(), *SMALL_SHAPE):
        return None
    n, k = SMALL_SHAPE
    weight, x, y = (torch.zeros(size, dtype=torch.bfloat16, device="cuda") for size in ((n, k), (1, k), (1, n)))
    torch.cuda.synchronize()  # it reads weights before it waits
    call = partial(bf16_linear.small_m, x, weight, None, y)
    try:
        call()
    except (OSError, QwenNvfp4Error):  # a damaged file, or one that was built for other cards
        return None
    return call
