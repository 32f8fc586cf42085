"""Run vLLM as a supervised child: report its stages, forward signals, and end every process it started.

vLLM ends with exit code 0 when its engine dies, and hangs on SIGTERM while a stream is open (seen with 0.32 and 0.33,
vllm#48966). So this process remembers whether it asked for the end, watches the engine's own processes, and holds
deadlines of its own.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import FrameType

import psutil

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.stages import Report, Stage

EXIT_STOPPED, EXIT_FAILED = 0, 1
POLL_S = 0.1
READY_POLL_S = 0.5
PULSE_S = 30.0  # between two looks at a server that is READY
KILL_MARGIN_S = 10.0  # what vLLM takes to close down after its own shutdown timeout
START_STOP_S = 5.0  # a server that is not READY has nothing to drain
DRAIN_MARGIN_S = 5.0  # for a drain to end its last streams, before SIGTERM goes out all the same
ENGINE_GRACE_S = 4.0  # vLLM ends open streams with an error at once when its engine dies, and itself after 5 s
ENGINE_TITLE = "VLLM::"  # titles of the engine core and of the workers (vllm/utils/system_utils.py, 0.32 and 0.33)
REAP_S = 5.0
READ_S = 2.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Reads until its standard input ends, which this process holds open: so it outlives us, however we end, and no longer.
GUARD = 'trap "" HUP INT TERM; read -r _; kill -s KILL -- "-$1"; test -z "$2" || rm -rf -- "$2"'

# vLLM's own log lines that begin a stage (v1/worker/*, v1/engine/core.py of 0.32 and 0.33).
STAGE_LINES: tuple[tuple[re.Pattern[str], Stage, str], ...] = (
    (re.compile(r"Starting to load model|Loading safetensors checkpoint shards:\s+0%"), "load", "reading the weights"),
    (re.compile(r"Dynamo bytecode transform|torch\.compile takes|Compiling a graph"), "compile", "compiling the model"),
    (
        re.compile(r"Model loading took|Loading weights took"),
        "warm-up",
        "weights loaded; allocating the cache, warming up",
    ),
)
NO_CAUSE = ("Engine core initialization failed", "WARNING", "EngineDeadError")  # consequences and advice
CAUSE = re.compile(r"\b(\w*(?:Error|Exception|Interrupt)\b: .+)")


@dataclass(slots=True)
class Supervisor:
    """One supervised run.

    probe: True once the server answered a real request (it may block for seconds); raises QwenNvfp4Error when the
    answer shows that the server must not be used. pulse: True while the READY server works, or nothing can be said (it
    may block for seconds); without it for hang_timeout_s the child is ended. drain_signal: what makes the child finish
    its requests and end. scratch: a folder of the child's, removed should this process be killed outright.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    probe: Callable[[], bool]
    report: Report
    ready_message: str
    start_timeout_s: float
    shutdown_timeout_s: float
    pulse: Callable[[], bool] | None = None
    hang_timeout_s: float = math.inf
    drain_signal: signal.Signals = signal.SIGTERM
    scratch: str = ""
    on_ready: Callable[[tuple[str, ...]], None] | None = None
    _signals: list[int] = field(default_factory=list)
    _seen_stages: set[Stage] = field(default_factory=set)
    _tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=400))
    _ready: threading.Event = field(default_factory=threading.Event)
    _engines: tuple[psutil.Process, ...] = ()
    _fault: str | None = None
    _others: frozenset[int] = frozenset()

    def run(self) -> int:
        """Start, watch and end the child; 0 when stopped on request, 1 when it ended by itself or never got ready."""
        _become_subreaper()
        self._others = frozenset(other.pid for other in psutil.Process().children())
        handlers = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        began = time.monotonic()
        self.report("load", "starting vLLM")
        child = subprocess.Popen(
            self.argv,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_prepare_child,  # noqa: PLW1509 - no thread of ours runs yet
        )
        guard = _guard(child.pid, self.scratch)
        reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        reader.start()
        threading.Thread(target=self._await_ready, args=(child, began), daemon=True).start()
        try:
            return self._watch(child, reader)
        finally:
            end_all(child.pid, self._others)
            guard.wait()
            reader.join(timeout=1.0)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _watch(self, child: subprocess.Popen[str], reader: threading.Thread) -> int:
        deadline = time.monotonic() + self.start_timeout_s
        while child.poll() is None:
            if self._signals:
                return self._stop(child)
            if fault := self._fault or self._start_fault(deadline) or self._engine_fault(child):
                self.report("failed", fault)
                return EXIT_FAILED
            time.sleep(POLL_S)
        reader.join(timeout=READ_S)  # what it said last may be why; a process that outlives it holds the pipe open
        when = "while serving" if self._ready.is_set() else "before it was READY"
        self.report("failed", f"vLLM ended by itself {when} (its exit code {child.returncode}). {self._cause()}")
        return EXIT_FAILED

    def _start_fault(self, deadline: float) -> str | None:
        if self._ready.is_set() or time.monotonic() < deadline:
            return None
        return f"not READY after START_TIMEOUT_S={self.start_timeout_s:g}. Raise it for a slow disk or download."

    def _engine_fault(self, child: subprocess.Popen[str]) -> str | None:
        """Set a little after one of the engine's processes ended, so that vLLM can tell its clients first."""
        dead = next((process for process in self._engines if not _is_alive(process)), None)
        if dead is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=ENGINE_GRACE_S)
        return f"vLLM's engine (process {dead.pid}) ended by itself while serving. {self._cause()}"

    def _stop(self, child: subprocess.Popen[str]) -> int:
        drain_s = self.shutdown_timeout_s + KILL_MARGIN_S if self._ready.is_set() else START_STOP_S
        name = signal.Signals(self._signals[0]).name
        self.report(
            "stopping",
            f"{name}: running requests get {self.shutdown_timeout_s:g} s to finish; a second signal ends them",
        )
        self._drain(child, drain_s)
        if child.poll() is None:
            why = "a second signal" if len(self._signals) > 1 else f"still running after {drain_s:g} s"
            self.report("stopping", f"ending vLLM's processes: {why}")
        end_all(child.pid, self._others)
        self.report("stopped", "every process has ended")
        return EXIT_STOPPED

    def _drain(self, child: subprocess.Popen[str], drain_s: float) -> None:
        """Ask the child to end and wait; SIGTERM follows a drain that does not come to its end."""
        began = time.monotonic()
        is_draining = self._ready.is_set() and self.drain_signal != signal.SIGTERM
        child.send_signal(self.drain_signal if is_draining else signal.SIGTERM)
        while child.poll() is None and time.monotonic() < began + drain_s and len(self._signals) < 2:
            if is_draining and time.monotonic() > began + self.shutdown_timeout_s + DRAIN_MARGIN_S:
                child.terminate()
                is_draining = False
            time.sleep(POLL_S)

    def _read(self, child: subprocess.Popen[str]) -> None:
        for line in child.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            self._tail.append(line.rstrip())
            for pattern, stage, message in STAGE_LINES:
                if stage not in self._seen_stages and not self._ready.is_set() and pattern.search(line):
                    self._seen_stages.add(stage)
                    self.report(stage, message)

    def _await_ready(self, child: subprocess.Popen[str], began: float) -> None:
        while child.poll() is None and not self._signals:
            try:
                answered = self.probe()
            except QwenNvfp4Error as error:
                self._fault = str(error)
                return
            if answered and not self._signals:
                self._engines = _engine_processes(child.pid)
                self._ready.set()
                self.report("READY", f"in {time.monotonic() - began:.1f} s: {self.ready_message}")
                if self.on_ready is not None:
                    self.on_ready(self.log_tail)
                if self.pulse is not None:
                    self._watch_pulse(child, self.pulse)
                return
            time.sleep(READY_POLL_S)

    def _watch_pulse(self, child: subprocess.Popen[str], pulse: Callable[[], bool]) -> None:
        """Sets the fault once the server did nothing for hang_timeout_s. No single look counts for more than two
        intervals: a container that was frozen, or a host that slept, is no server that hangs."""
        still_s, looked = 0.0, time.monotonic()
        while child.poll() is None and not self._signals and self._fault is None:
            time.sleep(PULSE_S)
            works, now = pulse(), time.monotonic()
            still_s = 0.0 if works else still_s + min(now - looked, 2 * PULSE_S)
            looked = now
            if still_s >= self.hang_timeout_s:
                self._fault = (
                    f"vLLM has done nothing for {still_s:.0f} s although it was asked (HANG_TIMEOUT_S="
                    f"{self.hang_timeout_s:g}). {self._cause()}"
                )

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines that the child printed."""
        return tuple(self._tail)

    def _cause(self) -> str:
        causes = [
            match.group(1)
            for line in self._tail
            if (match := CAUSE.search(line)) and not any(word in line for word in NO_CAUSE)
        ]
        return f"The cause it gave: {causes[0][:600]}" if causes else "See its log above."

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)


def end_all(leader_pid: int, others: Collection[int] = ()) -> None:
    """Kill the process group of `leader_pid` and all below this process, and reap them; returns when they are gone.

    others: children that are not vLLM's, such as the tee of a shell's `serve > >(tee log)`.
    """
    me = psutil.Process()
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        _kill_group(leader_pid)
        left = [process for process in me.children(recursive=True) if process.pid not in others and _kill(process)]
        _reap()
        if not left:
            return
        psutil.wait_procs(left, timeout=0.2)


def _kill_group(leader_pid: int) -> None:
    try:
        os.killpg(leader_pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill(process: psutil.Process) -> bool:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _guard(group: int, scratch: str) -> subprocess.Popen[bytes]:
    """A shell that kills process group `group` and removes the folder `scratch`, if any, once this process is gone,
    even by SIGKILL; `end_all` ends it too.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", GUARD, "sh", str(group), scratch],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _become_subreaper() -> None:
    """Orphans of vLLM become our children, so that `end_all` still finds them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _engine_processes(leader_pid: int) -> tuple[psutil.Process, ...]:
    """The engine core and the workers below `leader_pid`: without any one of them nothing can be served."""
    try:
        below = psutil.Process(leader_pid).children(recursive=True)
        return tuple(process for process in below if process.name().startswith(ENGINE_TITLE))
    except psutil.NoSuchProcess:
        return ()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _prepare_child() -> None:
    """In the child: a drain signal before its handler is there does no harm."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
