"""What a test may need of the machine, and a real server for those that talk to one."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen_nvfp4_serve.host import detect_gpus, run_probe


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, or fail it when REQUIRE names it (REQUIRE=docker,nvcc)."""
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --full"))
    required = {word.strip() for word in os.environ.get("REQUIRE", "").split(",") if word.strip()}
    unknown = required - PROBES.keys()
    if unknown:
        raise pytest.UsageError(f"REQUIRE names {sorted(unknown)}, expected some of {sorted(PROBES)}")
    for thing in PROBES:
        marked = [item for item in items if item.get_closest_marker(thing)]
        reason = missing(thing) if marked else None
        if reason is None:
            continue
        if thing in required:
            raise pytest.UsageError(f"REQUIRE={thing}, but {reason}")
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    """Fails a test that leaves a stand-in's thread behind, which would take the time of every later one."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if "serve_forever" in thread.name]
    assert not left
