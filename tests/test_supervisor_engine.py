"""The supervisor when the engine dies, answers wrongly, or is asked to drain, against small stand-ins for vLLM."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from qwen_nvfp4_serve import supervisor as module
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.stages import Stage
from qwen_nvfp4_serve.supervisor import EXIT_FAILED, EXIT_STOPPED, Supervisor

Rows = list[tuple[Stage, str]]


@pytest.fixture
def short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """These children know nothing of draining: what they are given for it would only be waited for."""
    monkeypatch.setattr(module, "DRAIN_MARGIN_S", 0.2)


# A child with an engine process below it, under the name that vLLM gives its own.
ENGINE = """
    import os, subprocess, sys, time
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'VLLM::EngineCor', 0, 0, 0); time.sleep(600)"
    engine = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(600)
"""


def supervised(
    code: str, *, shutdown_timeout_s: float = 5.0, probe: object = None, **more: Any
) -> tuple[Supervisor, Rows]:
    rows: Rows = []
    made = Supervisor(
        argv=(sys.executable, "-c", textwrap.dedent(code)),
        environment=dict(os.environ),
        probe=probe or (lambda: True),  # type: ignore[arg-type]
        report=lambda stage, message: rows.append((stage, message)),
        ready_message="here",
        start_timeout_s=30.0,
        shutdown_timeout_s=shutdown_timeout_s,
        drain_signal=signal.SIGUSR1,
        **more,
    )
    return made, rows


def once_ready(rows: Rows, action: object) -> threading.Thread:
    """Run `action` in a thread when READY was reported."""

    def wait() -> None:
        while not any(stage == "READY" for stage, _ in rows):
            time.sleep(0.05)
        action()  # type: ignore[operator]

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def engines() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.name().startswith(module.ENGINE_TITLE)]


def has_engine() -> bool:
    return bool(engines())


def test_run_engine_that_dies_ends_the_server_although_its_parent_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENGINE_GRACE_S", 0.3)
    made, rows = supervised(ENGINE, probe=has_engine)
    killed_at: list[float] = []

    def kill() -> None:
        engines()[0].kill()
        killed_at.append(time.monotonic())

    once_ready(rows, kill)
    assert made.run() == EXIT_FAILED
    assert time.monotonic() - killed_at[0] < 5
    assert rows[-1][0] == "failed"
    assert "engine" in rows[-1][1]
    assert not psutil.Process().children(recursive=True)


@pytest.mark.usefixtures("short_drain")
def test_run_engine_of_a_server_that_is_being_stopped_is_no_failure() -> None:
    made, rows = supervised(ENGINE, shutdown_timeout_s=0.1, probe=has_engine)
    once_ready(rows, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert made.run() == EXIT_STOPPED


def pulses(*beats: bool, seen: list[bool]) -> Callable[[], bool]:
    """A pulse that gives `beats` in turn and then the last one for ever, and notes each."""

    def pulse() -> bool:
        seen.append(beats[min(len(seen), len(beats) - 1)])
        return seen[-1]

    return pulse


def test_run_server_that_stands_still_too_long_is_ended_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULSE_S", 0.1)
    seen: list[bool] = []
    made, rows = supervised(ENGINE, probe=has_engine, pulse=pulses(True, False, seen=seen), hang_timeout_s=0.5)
    assert made.run() == EXIT_FAILED
    assert rows[-1][0] == "failed"
    assert "HANG_TIMEOUT_S=0.5" in rows[-1][1]
    assert 1 + 3 <= len(seen) <= 1 + 6  # a look counts for 0.1 s to 0.2 s
    assert not psutil.Process().children(recursive=True)


@pytest.mark.usefixtures("short_drain")
def test_run_server_that_beats_now_and_then_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULSE_S", 0.05)
    seen: list[bool] = []
    beats = (False, False, True) * 8
    made, _ = supervised(ENGINE, shutdown_timeout_s=0.1, probe=has_engine, pulse=pulses(*beats, True, seen=seen),
                         hang_timeout_s=0.35)  # fmt: skip
    threading.Thread(target=lambda: stop_after(seen, len(beats)), daemon=True).start()
    assert made.run() == EXIT_STOPPED


def stop_after(seen: list[bool], looks: int) -> None:
    while len(seen) < looks:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("short_drain")
def test_run_one_look_that_took_long_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that was frozen, or a host that slept: the clock ran on, the server was not asked."""
    monkeypatch.setattr(module, "PULSE_S", 0.05)
    seen: list[bool] = []

    def pulse() -> bool:
        if not seen:
            time.sleep(1.0)
        seen.append(len(seen) > 0)
        return seen[-1]

    made, _ = supervised(ENGINE, shutdown_timeout_s=0.1, probe=has_engine, pulse=pulse, hang_timeout_s=0.5)
    threading.Thread(target=lambda: stop_after(seen, 5), daemon=True).start()
    assert made.run() == EXIT_STOPPED


def test_run_wrong_first_answer_ends_the_start_with_its_reason() -> None:
    def wrong() -> bool:
        raise QwenNvfp4Error("the first answer", seen="!!!!", expected="8")

    made, rows = supervised("import time; time.sleep(600)", probe=wrong)
    assert made.run() == EXIT_FAILED
    assert rows[-1] == ("failed", "the first answer: seen !!!!, expected 8")


def test_run_stop_sends_the_drain_signal_and_waits_for_the_child() -> None:
    made, rows = supervised(
        """
        import signal, sys, time
        def drain(*_):
            time.sleep(0.5)
            sys.exit(0)
        signal.signal(signal.SIGUSR1, drain)
        signal.signal(signal.SIGTERM, lambda *_: time.sleep(600))
        time.sleep(600)
        """,
        probe=ready_after(0.5),
    )
    once_ready(rows, lambda: os.kill(os.getpid(), signal.SIGTERM))
    began = time.monotonic()
    assert made.run() == EXIT_STOPPED
    assert time.monotonic() - began < 5
    assert [stage for stage, _ in rows[-2:]] == ["stopping", "stopped"]


def test_run_stop_child_without_a_drain_handler_gets_sigterm_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_MARGIN_S", 0.2)
    made, rows = supervised("import time; time.sleep(600)", shutdown_timeout_s=0.3, probe=ready_after(0.5))
    asked: list[float] = []

    def stop() -> None:
        asked.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    once_ready(rows, stop)
    assert made.run() == EXIT_STOPPED
    assert 0.4 < time.monotonic() - asked[0] < 5  # not killed by SIGUSR1 at once, nor only by the last deadline
    assert not any("still running" in message for _, message in rows)


def ready_after(seconds: float) -> object:
    """A probe that says yes when the child has had time to set its handlers."""
    at = time.monotonic() + seconds
    return lambda: time.monotonic() > at


def test_cause_is_an_error_not_advice_or_a_consequence() -> None:
    made, _ = supervised("pass")
    made._tail.extend(
        [
            "WARNING Found ulimit of 20000 and failed with error OSError: too many files",
            "EngineDeadError: EngineCore encountered an issue",
            "torch.OutOfMemoryError: CUDA out of memory",
        ]
    )
    assert made._cause() == "The cause it gave: OutOfMemoryError: CUDA out of memory"
    made._tail.pop()
    assert made._cause() == "See its log above."
