"""What a test may need of the machine, and a real server for those that talk to one."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.host import detect_gpus, run_probe

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
MOST_WORKERS = 4  # each takes about 1 GiB
THREADS = max(1, (os.cpu_count() or 1) // WORKERS)
if WORKERS > 1:  # before anything imports torch: threads of two workers that wait for each other take many times longer
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
# Files that go to one worker, by the beginning of their path: they share containers, an imported vLLM, or a server.
# The embedded model's server is there twice, so that two workers ask at once.
TOGETHER = {
    "tests/docker/": "docker",
    "tests/contracts/": "vllm",
    "tests/patches/": "vllm",
    "tests/e2e/test_agent.py": "embedded",
    "tests/e2e/test_bench_server.py": "embedded",
    "tests/e2e/test_clients.py": "embedded",
    "tests/e2e/test_clients_bad_input.py": "embedded again",
    "tests/e2e/test_quality_server.py": "embedded again",
    "tests/e2e/test_server.py": "embedded again",
    "tests/e2e/test_structured.py": "embedded again",
}


def _has_cpu_vllm() -> bool:
    from qwen_nvfp4_serve.preflight import installed_kind

    return installed_kind() == "cpu"


def harness(name: str) -> str | None:
    """The program of a peer's benchmark: that of scripts/peers, or one on PATH."""
    installed = Path(__file__).resolve().parents[1] / ".peers" / "bin"
    return shutil.which(name, path=str(installed)) or shutil.which(name)


PROBES: dict[str, tuple[Callable[[], bool], str]] = {
    "docker": (lambda: run_probe("docker", "info") is not None, "no container engine answers `docker info`"),
    "nvcc": (lambda: shutil.which("nvcc") is not None, "nvcc is not on PATH"),
    "gpu": (lambda: bool(detect_gpus()), "nvidia-smi shows no card"),
    "peers": (
        lambda: all(harness(name) for name in ("llama-benchy", "guidellm")),
        "llama-benchy and guidellm are not in .peers (scripts/peers) or on PATH",
    ),
    "server": (_has_cpu_vllm, "vLLM's CPU build is not installed"),
}


def missing(thing: str) -> str | None:
    """Why tests marked `thing` cannot run here; None when they can."""
    probe, reason = PROBES[thing]
    return None if probe() else reason


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full`: the slow tests too."""
    parser.addoption("--full", action="store_true", help="run the tests marked slow too")


def pytest_configure() -> None:
    """Refuses to start where something is missing that REQUIRE names (REQUIRE=docker,nvcc)."""
    # Who starts the tests in the background ignores it, and so would every command that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    required = {word.strip() for word in os.environ.get("REQUIRE", "").split(",") if word.strip()}
    if unknown := required - PROBES.keys():
        raise pytest.UsageError(f"REQUIRE names {sorted(unknown)}, expected some of {sorted(PROBES)}")
    for thing in sorted(required):
        if reason := missing(thing):
            raise pytest.UsageError(f"REQUIRE={thing}, but {reason}")


def pytest_xdist_auto_num_workers() -> int:
    """One for each core, and no more than memory is sure to hold."""
    return min(os.cpu_count() or 1, MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files are handed out whole, those of TOGETHER as one, in the order collected."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((name for start, name in TOGETHER.items() if file.startswith(start)), file)

    config.option.loadscopereorder = False
    return ByFile(config, log)


def _turn(item: pytest.Item) -> int:
    """Containers first, since they mostly wait; then without a server, with one of their own, with the shared one."""
    if item.get_closest_marker("docker"):
        return 0
    has = (item.get_closest_marker("server"), "embedded" in getattr(item, "fixturenames", ()))
    return 1 + sum(map(bool, has))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the order of turns, without what this machine cannot run."""
    items.sort(key=_turn)
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --full"))
    for thing in PROBES:
        marked = [item for item in items if item.get_closest_marker(thing)]
        reason = missing(thing) if marked else None
        if reason is None:
            continue
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    """Fails a test that leaves a stand-in's thread behind, which would take the time of every later one."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if "serve_forever" in thread.name]
    assert not left
