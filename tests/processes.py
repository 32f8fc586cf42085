"""What the kernel knows of processes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def lives(process: int) -> bool:
    """A zombie does not: it holds nothing, and nobody may be there to reap it."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def left_of(processes: Iterable[int], within_s: float) -> list[int]:
    """Those that still live after that time, or none as soon as none does."""
    deadline = time.monotonic() + within_s
    while (left := [process for process in processes if lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def descendants(process: int) -> set[int]:
    """Of a process that lives, as the kernel lists them."""
    found: set[int] = set()
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found |= {child} | descendants(child)
    return found
