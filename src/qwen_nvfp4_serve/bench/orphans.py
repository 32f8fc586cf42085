"""No engine outlives the process that measures it, however that ends: it would wait for ever, and hold its card. Nor
does that process wait for an engine that is gone."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

from qwen_nvfp4_serve.errors import QwenNvfp4Error

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_EVERY_S = 0.2
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """This process, whatever program it becomes, is killed when the thread that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def bind_children() -> None:
    """Every process that this one forks from now on does so. One that is spawned has to do so itself: it imports its
    parent's main module as `__mp_main__` before all else."""
    parent = os.getpid()

    def bind() -> None:
        if os.getppid() == parent:  # children's children inherit the hook
            die_with_parent()

    os.register_at_fork(after_in_child=bind)


@contextmanager
def needing_children() -> Iterator[None]:
    """Ends this process with exit code 1 when one of the children that it has now ends meanwhile: vLLM 0.32 waits
    without end for the answer of a core that was killed, and nothing it can be told makes it stop."""
    ends = [child.sentinel for child in multiprocessing.active_children()]  # to look at one reaps nothing
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if wait(ends, LOOK_EVERY_S) and not over.is_set():
                expected = "it to live until it is measured"
                do = "Why is above; of a process that was killed, in the kernel's log."
                error = QwenNvfp4Error(
                    "engine bench, a process of the engine", seen="its end", expected=expected, do=do
                )
                print(f"error: {error}", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    if ends:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        if ends:
            watcher.join()
