"""The heap is frozen when a process ends, after everything else that is to happen then."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import atexit, gc
from qwen_nvfp4_patches import quick_exit
atexit.register(lambda: print("last", gc.get_freeze_count() > 0))
{apply}
atexit.register(lambda: print("before", gc.get_freeze_count() > 0))
"""


def at_exit(apply: str) -> list[str]:
    """What is seen around the patch's place among the things to do at the end."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(apply=apply)], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def test_heap_is_frozen_at_the_end_and_not_before() -> None:
    assert at_exit("quick_exit.PATCH.apply()") == ["before False", "last True"]
    assert at_exit("") == ["before False", "last False"]
