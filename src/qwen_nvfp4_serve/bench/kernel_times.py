"""Where a step's time goes, kernel by kernel, when kernels start before the one ahead of them has ended."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any


def apart(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, int]]:
    """Each kernel's name, microseconds and calls, so that no moment counts twice.

    A call's time is from the end of what ran before it to its own end: what it waited for the kernel ahead is that
    kernel's, and all add up to the time that the card was busy.

    spans: name, begin and end of each call in microseconds, in any order, of all streams of one card.
    """
    sums: dict[str, tuple[float, int]] = {}
    busy_until = float("-inf")
    for name, begin, end in sorted(spans, key=lambda span: (span[1], span[2])):
        us, calls = sums.get(name, (0.0, 0))
        sums[name] = (us + max(0.0, end - max(begin, busy_until)), calls + 1)
        busy_until = max(busy_until, end)
    return [(name, us, calls) for name, (us, calls) in sums.items()]


def apart_on_card(trace: Any) -> list[tuple[str, float, int]]:
    """The same of what a profile of torch's has of cards."""
    on_card = import_module("torch.autograd").DeviceType.CUDA
    events = (event for event in trace.events() if event.device_type == on_card)
    return apart((str(event.name), event.time_range.start, event.time_range.end) for event in events)
