"""Children of a killed process are gone with it, forked and spawned alike; its own children's children too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import left_of, lives

PARENT = """
import multiprocessing, os, sys, time
from qwen_nvfp4_serve.bench import orphans

def core(method, bound):
    if bound:
        orphans.bind_to_parent()
    worker = multiprocessing.get_context(method).Process(target=work)
    worker.start()
    time.sleep(600)

def work():
    orphans.bind_to_parent()
    print(os.getppid(), os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    method = sys.argv[1]
    if method == "fork":
        orphans.bind_children()
    multiprocessing.get_context(method).Process(target=core, args=(method, method == "spawn")).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_killed_parent_takes_its_children_along(tmp_path: Path, method: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        core, worker = map(int, parent.stdout.readline().split())
        assert lives(core)
        assert lives(worker)
        parent.kill()
    assert not left_of((core, worker), 10.0)
