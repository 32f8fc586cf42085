"""A Compose project of our docker-compose.yml in a folder of its own, so that a developer's `.env` plays no part."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from engine import BUILDKIT, docker, need, run

ROOT = Path(__file__).resolve().parents[2]
TAGS = {target: f"qwen-nvfp4-test:{target}" for target in ("cpu", "gpu", "tools")}
SETTABLE = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG")
KEY = "sk-test-4f1c9a77"


@dataclass(slots=True)
class Stack:
    """One project: its folder, which the containers see as /config, its port, and the environment of Compose."""

    folder: Path
    name: str
    port: int
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The published endpoint."""
        return f"http://127.0.0.1:{self.port}/v1"

    def compose(self, *words: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`docker compose WORDS` in this project."""
        base = {name: os.environ[name] for name in SETTABLE if name in os.environ}
        images = {f"QWEN_NVFP4_{target.upper()}_IMAGE": tag for target, tag in TAGS.items()}
        environment = base | images | self.environment | dict(more or {})
        file = str(ROOT / "docker-compose.yml")
        return run(
            docker(), "compose", "-p", self.name, "--project-directory", str(self.folder), "-f", file, *words,
            env=environment,
        )  # fmt: skip

    def config(self, *words: str, more: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The resolved project, all profiles."""
        done = self.compose("--profile", "*", "config", "--format", "json", *words, more=more)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def up(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`up -d --wait --no-build`: the images are built by `build`, since Compose's own way needs buildx."""
        return self.compose("up", "-d", "--wait", "--no-build", *words)

    def container(self, service: str = "cpu") -> str:
        """The id of the service's container, running or not."""
        return self.compose("ps", "-a", "-q", service).stdout.strip()

    def inspect(self, service: str = "cpu") -> dict[str, Any]:
        """What the engine knows of the service's container."""
        return dict(json.loads(need(docker(), "inspect", self.container(service)))[0])

    def health(self, service: str = "cpu") -> str:
        """`starting`, `healthy` or `unhealthy`."""
        return str(self.inspect(service)["State"]["Health"]["Status"])

    def execute(self, *words: str, service: str = "cpu") -> subprocess.CompletedProcess[str]:
        """A command inside the running container."""
        return self.compose("exec", "-T", service, *words)

    def logs(self, service: str = "cpu") -> str:
        """What the container printed, of all its lives."""
        done = run(docker(), "logs", self.container(service))
        return done.stdout + done.stderr

    def stages(self) -> list[dict[str, Any]]:
        """The JSON stage lines in the log."""
        return [json.loads(line) for line in self.logs().splitlines() if line.startswith('{"stage"')]

    def post(self, body: Mapping[str, Any], *, timeout_s: float = 60.0) -> httpx.Response:
        """A completion request with the key."""
        return httpx.post(
            f"{self.url}/completions", json={"model": "embedded", **body}, timeout=timeout_s, trust_env=False,
            headers={"Authorization": f"Bearer {KEY}"},
        )  # fmt: skip


def build(target: str, arguments: Mapping[str, str]) -> str:
    """Build `target` as docker-compose.yml says, with other build arguments; its tag."""
    words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    tag = TAGS[target]
    before = image_id(tag)
    need(docker(), "build", "--target", target, "--tag", tag, *words, str(ROOT), env=BUILDKIT)
    if before and before != image_id(tag):
        run(docker(), "rmi", before)  # gigabytes that nothing names any more; another project may still run on them
    return tag


def image_id(tag: str) -> str:
    """The id behind a tag, "" when there is none."""
    return run(docker(), "image", "inspect", "--format", "{{.Id}}", tag).stdout.strip()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(what: str, holds: Any, *, within_s: float, every_s: float = 0.5) -> float:
    """Seconds until `holds()` is true. Fails the test after `within_s`."""
    began = time.monotonic()
    while not holds():
        waited = time.monotonic() - began
        assert waited < within_s, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)
    return time.monotonic() - began
