"""Regular expressions out of a checkpoint, which may try for ever: one that takes too long on a name is given up.

Python looks for signals while it matches, so a timer can end what nothing else can. It counts time of this process
alone, so that a busy machine makes no expression slow.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TICK_S = 0.5  # a match that is under way at two of these in a row is given up; an honest one takes microseconds

_begun = 0  # matches so far
_running: int | None = None  # the number of the one under way
_seen: int | None = None  # the one that was under way at the last tick


class SlowMatchError(Exception):
    """An expression was still trying."""


@contextmanager
def limited() -> Iterator[None]:
    """Within, `matches` gives up. Only in the main thread, which alone can have a timer; elsewhere it never does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, TICK_S, TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def matches(expression: re.Pattern[str], name: str) -> bool:
    """Whether `expression` matches the beginning of `name`. Raises SlowMatchError where it takes too long to say."""
    global _begun, _running
    _begun += 1
    _running = _begun
    try:
        return expression.match(name) is not None
    finally:
        _running = None


def _tick(_number: int, _frame: FrameType | None) -> None:
    global _seen
    slow = _running is not None and _running == _seen
    _seen = _running
    if slow:
        raise SlowMatchError
