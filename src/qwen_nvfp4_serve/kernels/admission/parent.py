"""The parent of an admission: runs the trials in child processes and survives what they do. No torch.

One child tries all candidates. Where it dies or falls silent, the candidate at work is left out with the reason, and
another child goes on with the ones after it; or without the small kernel of `graph_timing`, if that was at work.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qwen_nvfp4_serve.kernels.admission.table import NUMBERS, Finding, Shape, Verdict, finding_from_json

TRIAL = "qwen_nvfp4_serve.kernels.admission.trial"
SMALL_KERNEL = "small kernel"  # the stage in which a child tries what runs before each timed call
WORDS = 300  # characters of a dead child's last line that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds. start: until a child has imported torch. silence: between two of its reports. total: for everything.

    Of the total about 15 s are for Triton to compile our tiled GEMM, the first time on a machine.
    """

    start_s: float = 25.0
    silence_s: float = 10.0
    total_s: float = 45.0


class Child(Protocol):
    """A running trial."""

    def receive(self, timeout_s: float) -> Mapping[str, Any] | None:
        """Its next report, None if there was none in time. Raises EOFError once it has ended."""

    def stop(self) -> str:
        """Ends it if it still runs, with all that it started; how it ended, in words."""


class Process:
    """A trial in a process group of its own."""

    def __init__(self, request: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", TRIAL, json.dumps(request)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)
        self._rest = b""

    def receive(self, timeout_s: float) -> Mapping[str, Any] | None:
        """See Child."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(self._pipe.fileno(), 65536)
            if not chunk:
                raise EOFError
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        report: Mapping[str, Any] = json.loads(line)
        return report

    def stop(self) -> str:
        """See Child."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._selector.close()
        self._pipe.close()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        self._errors.close()
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"{end}, {lines[-1].strip()[:WORDS]}" if lines else end


@dataclass(slots=True)
class _Run:
    """What has been found so far, and where the child at work is."""

    names: list[str]
    shapes: Sequence[Shape]
    findings: dict[tuple[str, Shape], Finding] = field(default_factory=dict)
    spaced: bool = True  # timed calls follow a small kernel
    at: Mapping[str, Any] = field(default_factory=dict)

    def take(self, report: Mapping[str, Any]) -> None:
        if "step" in report:
            self.at = report["step"]
        elif "finding" in report:
            found = finding_from_json(report["finding"])
            self.findings[found.candidate, found.shape] = found
            if all((found.candidate, shape) in self.findings for shape in self.shapes):
                self.names = [name for name in self.names if name != found.candidate]

    def leave_out(self, name: str, verdict: Verdict, reason: str) -> None:
        """Every shape: a candidate that ends a process once is not trusted with any. Want of time undoes no finding."""
        for shape in self.shapes:
            if verdict is Verdict.NOT_READY and (name, shape) in self.findings:
                continue
            self.findings[name, shape] = Finding(candidate=name, shape=shape, verdict=verdict, reason=reason)
        self.names = [other for other in self.names if other != name]


def try_all(
    names: Sequence[str],
    shapes: Sequence[Shape],
    *,
    start: Callable[..., Child],
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Finding, ...]:
    """A finding for every candidate and shape, candidate by candidate.

    start: begins a child that tries the candidates named, with `spaced=False` once the small kernel has ended one. A
    candidate that ends its child is CRASHED, one that falls silent HUNG, or NOT_READY where it is a library that may be
    compiling; so are those that time does not suffice for.
    """
    limits = limits or Limits()
    run, deadline = _Run(list(names), shapes), clock() + limits.total_s
    while run.names and clock() < deadline:
        run.at = {"stage": "start"}
        child = start(run.names) if run.spaced else start(run.names, spaced=False)
        verdict, seen = _follow(child, run, limits, deadline, clock)
        words = child.stop()
        if verdict is None:
            break
        if run.at["stage"] == SMALL_KERNEL:  # blames no candidate
            run.spaced = False
            continue
        name = run.at.get("candidate")
        numbers = (run.at.get(number, default) for number, default in NUMBERS.items())
        where = f" at {Shape(*numbers)} in its {run.at['stage']} stage" if name else ""
        if verdict is Verdict.CRASHED:
            seen = f"ended the process{where}: {words}"
        if name is None:
            for waiting in list(run.names):
                run.leave_out(waiting, Verdict.NOT_READY, f"the trial did not start: {seen}")
        elif name in run.names:  # else it had finished, and what died was the step to the next one
            run.leave_out(name, verdict, seen if verdict is Verdict.CRASHED else f"{seen}{where}")
    for name in list(run.names):
        run.leave_out(name, Verdict.NOT_READY, f"not tried in {limits.total_s:g} s")
    return tuple(run.findings[name, shape] for name in names for shape in shapes)


def _follow(
    child: Child, run: _Run, limits: Limits, deadline: float, clock: Callable[[], float]
) -> tuple[Verdict | None, str]:
    """Reads a child's reports to its end: None when it finished, else what became of it."""
    while True:
        allowed_s = limits.start_s if run.at["stage"] == "start" else limits.silence_s
        allowed_s = min(allowed_s, max(0.0, deadline - clock()))
        try:
            report = child.receive(allowed_s)
        except EOFError:
            return Verdict.CRASHED, ""
        if report is None:
            # A library that may be compiling, or whoever was cut off by the end of the time, is not judged.
            patient = run.at.get("compiles", False) or allowed_s < limits.silence_s
            return (Verdict.NOT_READY if patient else Verdict.HUNG), f"no report for {allowed_s:.3g} s"
        if report.get("done"):
            return None, ""
        run.take(report)
