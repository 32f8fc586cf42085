"""No engine outlives the process that measures it, however that ends: it would wait for ever, and hold its card."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h
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
