"""No engine outlives the process that measures it, however that ends: it would wait for ever, and hold its card."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """This process, whatever program it becomes, is killed when the thread that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def bind_children() -> None:
    """Every process that this one forks from now on is killed when the thread that forked it ends."""
    parent = os.getpid()

    def bind() -> None:
        if os.getppid() == parent:  # children's children inherit the hook
            die_with_parent()

    os.register_at_fork(after_in_child=bind)


def bind_to_parent() -> None:
    """The same from within a child of multiprocessing, which need not have been forked."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    die_with_parent()
    if os.getppid() != parent.pid:  # it was gone before
        os.kill(os.getpid(), signal.SIGKILL)
