"""A real server on the CPU backend for tests: started by the command people use, stopped as they stop it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import THREADS, WORKERS

COMMAND = Path(sys.executable).parent / "qwen-nvfp4"
READY_S, STOP_S = 240.0, 60.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Served:
    """A running `qwen-nvfp4 serve`."""

    process: subprocess.Popen[str]
    port: int
    log_file: Path

    @property
    def url(self) -> str:
        """Base URL with /v1."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def log(self) -> str:
        """Everything printed so far."""
        return self.log_file.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = READY_S) -> None:
        """Return when the log holds `text`; fail when the process ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log:
            assert self.process.poll() is None, self.log[-4000:]
            assert time.monotonic() < deadline, f"no {text!r} within {timeout_s} s:\n{self.log[-4000:]}"
            time.sleep(0.1)

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def end(self) -> None:
        """SIGTERM twice, since the second spares vLLM's own way down: ten seconds and more."""
        deadline = time.monotonic() + STOP_S
        while self.process.poll() is None and self.log.count("] stopping:") < 2 and time.monotonic() < deadline:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        self._wait()

    def _wait(self) -> int:
        try:
            return self.process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextmanager
def serve(folder: Path, **env: str) -> Iterator[Served]:
    """A server that is READY; its cache and working folder is `folder`. Eager unless ENFORCE_EAGER says otherwise.

    Beside other servers it has as many threads as a worker has cores: the threads that vLLM binds would share them."""
    port = free_port()
    base = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "PYTHON", "CXX")}
    base |= {"DEVICE": "cpu", "PORT": str(port), "CACHE_DIR": str(folder / "cache"), "ENFORCE_EAGER": "1"} | env
    if WORKERS > 1:
        base |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(THREADS)}
    log_file = folder / "serve.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [COMMAND, "serve"], cwd=folder, env=base, stdout=log, stderr=subprocess.STDOUT, text=True
        )
    served = Served(process, port, log_file)
    try:
        served.wait_for("] READY:")
        yield served
    finally:
        served.end()
