"""Children of a killed process are gone with it, forked and spawned alike; of spawned ones their children too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import left_of, lives

PARENT = """
import multiprocessing, os, sys, time
from qwen_nvfp4_serve.bench import orphans

def core(method):
    if method == "spawn":
        multiprocessing.get_context(method).Process(target=work).start()
    else:
        print(os.getpid(), flush=True)
    time.sleep(600)

def work():
    print(os.getppid(), os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    orphans.bind_children()
    multiprocessing.get_context(sys.argv[1]).Process(target=core, args=(sys.argv[1],)).start()
    time.sleep(600)
elif __name__ == "__mp_main__":
    orphans.die_with_parent()
"""


@pytest.mark.parametrize(("method", "count"), [("fork", 1), ("spawn", 2)])
def test_killed_parent_takes_its_children_along(tmp_path: Path, method: str, count: int) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = list(map(int, parent.stdout.readline().split()))
        assert [lives(child) for child in children] == [True] * count
        parent.kill()
    assert not left_of(children, 10.0)
