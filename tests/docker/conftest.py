"""One engine, one build and one running stack for all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import bases
import pytest
from engine import STAMP, TOOLS
from stack import KEY, Stack, build, free_port

sys.path.append(str(TOOLS))  # compose_spec, installed by scripts/docker-engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A build and a start take minutes on two cores; each test here shares them."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    is_required = "docker" in os.environ.get("REQUIRE", "")
    lacks = None if STAMP.exists() or is_required else pytest.mark.skip(reason="run scripts/docker-engine first")
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1500))
        if lacks:
            item.add_marker(lacks)


@pytest.fixture(scope="session")
def cpu_image() -> str:
    """The CPU target, built on a base that can be had here."""
    return build("cpu", {"CPU_BASE": bases.cpu_base()})


@pytest.fixture(scope="session")
def tools_image() -> str:
    """The target of `smoke` and `bench`."""
    return build("tools", {"CPU_BASE": bases.cpu_base()})


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """A project folder with a `.env` and a key in a file, nothing started."""
    folder = tmp_path_factory.mktemp("project")
    folder.chmod(0o755)
    port = free_port()
    (folder / "secrets").mkdir()
    (folder / "secrets" / "key").write_text(KEY + "\n")
    knobs = {"VLLM_API_KEY_FILE": "secrets/key", "LOG_FORMAT": "json", "SHUTDOWN_TIMEOUT_S": 12, "HANG_TIMEOUT_S": 60}
    (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in {"PORT": port, **knobs}.items()))
    return Stack(folder, f"qwen-nvfp4-test-{os.getpid()}", port)


@pytest.fixture(scope="session")
def stack(project: Stack, cpu_image: str, tools_image: str) -> Iterator[Stack]:
    """The CPU service, up and healthy."""
    try:
        done = project.up("cpu")
        assert done.returncode == 0, f"{done.stderr[-2000:]}\n{project.logs()[-3000:]}"
        yield project
    finally:
        project.compose("--profile", "*", "down", "--volumes", "--timeout", "20")
