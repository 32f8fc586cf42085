"""What a start is doing, one line a stage: for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Literal, Protocol

Stage = Literal[
    "install",
    "preflight",
    "download",
    "verify",
    "load",
    "compile",
    "warm-up",
    "READY",
    "stopping",
    "stopped",
    "failed",
    "notice",
]
Report = Callable[[Stage, str], None]


class Transfer(Protocol):
    """How far a download is; `fetch.Progress` is one."""

    @property
    def done_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def rate_bytes_per_s(self) -> float: ...
    @property
    def eta_s(self) -> float | None: ...


def text_report(began: float | None = None) -> Report:
    """A reporter that writes `[qwen-nvfp4 12.3s] load: …` to standard output; `began` is a time.monotonic() reading."""
    start = time.monotonic() if began is None else began

    def report(stage: Stage, message: str) -> None:
        sys.stdout.write(f"[qwen-nvfp4 {time.monotonic() - start:6.1f}s] {stage}: {message}\n")
        sys.stdout.flush()

    return report


def json_report(began: float | None = None) -> Report:
    """A reporter that writes `{"stage": …, "elapsed_s": …, "message": …}` lines to standard output."""
    start = time.monotonic() if began is None else began

    def report(stage: Stage, message: str) -> None:
        row = {"stage": stage, "elapsed_s": round(time.monotonic() - start, 2), "message": message}
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    return report


def reporter(log_format: Literal["text", "json"]) -> Report:
    """The reporter that LOG_FORMAT asks for, its clock starting now."""
    return json_report() if log_format == "json" else text_report()


def progress_message(transfer: Transfer) -> str:
    """`3.2 of 23.4 GB, 110 MB/s, 3 min 04 s left`; decimal units, as the hub shows sizes."""
    left = "" if transfer.eta_s is None else f", {duration(transfer.eta_s)} left"
    done, total = transfer.done_bytes / 1e9, transfer.total_bytes / 1e9
    return f"{done:.1f} of {total:.1f} GB, {transfer.rate_bytes_per_s / 1e6:.0f} MB/s{left}"


def duration(seconds: float) -> str:
    """`3 min 04 s`, or `12 s` below a minute."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
