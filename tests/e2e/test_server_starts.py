"""Starts and ends of a real server: without a compiler, of what an earlier start compiled, stopped and killed."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from tests.e2e.serving import Served, serve

from qwen_nvfp4_serve.smoke import connect, run_checks
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec, write_checkpoint

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]
KEY = "key-1"


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """A temporary folder; pytest's are too deep for the addresses of sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, short: Path) -> Iterator[Served]:
    """A server on a machine without a compiler, with a key and little patience; the second test here stops it."""
    folder = tmp_path_factory.mktemp("bare")
    tools = folder / "bin"
    tools.mkdir()
    for name in ("sh", "env", "uname", "lscpu", "python3"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    env = {"PATH": str(tools), "HOME": str(folder), "TMPDIR": str(short), "VLLM_API_KEY": KEY}
    with serve(folder, ENFORCE_EAGER="0", SHUTDOWN_TIMEOUT_S="1", **env) as served:
        yield served


def test_server_without_a_compiler_answers_eagerly_with_one_warning(bare: Served) -> None:
    assert bare.log.count("no C++ compiler") == 1
    checks = run_checks(connect(bare.url, KEY))
    assert all(check.ok for check in checks), checks


def test_sigterm_with_a_stream_open_leaves_no_process_no_port_and_no_socket(bare: Served, short: Path) -> None:
    assert httpx.get(f"{bare.url}/models").status_code == 401
    family = psutil.Process(bare.process.pid).children(recursive=True)
    assert len(family) >= 3
    started = threading.Event()
    reader = threading.Thread(target=_read_long_stream, args=(bare.url, started), daemon=True)
    reader.start()
    assert started.wait(60)
    assert bare.stop() == 0
    assert not [path for path in short.rglob("*") if path.is_socket()]
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert not [
        c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == bare.port and c.status == "LISTEN"
    ]
    assert KEY not in bare.log
    reader.join(timeout=10)
    assert not reader.is_alive()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A server that found what `first`, the log of an earlier start, says it compiled; `temporary` is its TMPDIR."""

    first: str
    server: Served
    temporary: Path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """Of a model with one layer of each kind, which compiles in a fraction of the time; the second test kills it."""
    folder = tmp_path_factory.mktemp("compiled")
    dims = dataclasses.replace(ARCHITECTURES["embedded"], layers=2, attention_interval=2)
    checkpoint = write_checkpoint(folder / "model", CheckpointSpec(architecture=dims, style="ct-w4a4"))
    with tempfile.TemporaryDirectory() as temporary:
        env = {"ENFORCE_EAGER": "0", "HOME": str(folder), "TMPDIR": temporary, "MODEL": str(checkpoint)}
        with serve(folder, **env) as served:
            first = served.log
        with serve(folder, **env) as served:
            yield Compiled(first, served, Path(temporary))


def test_second_start_loads_what_the_first_one_compiled(compiled: Compiled) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++: nothing is compiled")
    loaded = "Directly load AOT compilation"
    assert (loaded in compiled.first, loaded in compiled.server.log) == (False, True)
    assert "load failure" not in compiled.first + compiled.server.log


def test_server_killed_outright_leaves_neither_sockets_nor_files_behind(compiled: Compiled) -> None:
    def left() -> list[Path]:
        ours = ("vllm_dist_", "qwen-nvfp4-")  # torch's own folder is a cache, which stays
        found = compiled.temporary.rglob("*")
        return [path for path in found if path.is_socket() or (path.name.startswith(ours) and path.suffix != ".json")]

    assert any(path.is_socket() for path in left())
    assert any(path.name.startswith("vllm_dist_") for path in left())
    compiled.server.process.kill()
    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == []


def _read_long_stream(url: str, started: threading.Event) -> None:
    body = {"model": "embedded", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    try:
        with httpx.stream("POST", f"{url}/completions", json=body, headers=headers, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    started.set()
    except httpx.HTTPError:
        return
