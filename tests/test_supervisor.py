"""The supervisor against small stand-ins for vLLM: its exit code tells what happened and nothing is left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from qwen_nvfp4_serve.stages import Stage
from qwen_nvfp4_serve.supervisor import EXIT_FAILED, EXIT_STOPPED, Supervisor

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def supervisor(
    code: str, *, ready: bool = True, start_timeout_s: float = 30.0
) -> tuple[Supervisor, list[tuple[Stage, str]]]:
    rows: list[tuple[Stage, str]] = []
    made = Supervisor(
        argv=(sys.executable, "-c", textwrap.dedent(code)),
        environment=dict(os.environ),
        probe=lambda: ready,
        report=lambda stage, message: rows.append((stage, message)),
        ready_message="here",
        start_timeout_s=start_timeout_s,
        shutdown_timeout_s=0.5,
    )
    return made, rows


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(3)"])
def test_run_child_that_ends_by_itself_is_a_failure_whatever_its_exit_code(code: str) -> None:
    made, rows = supervisor(code, ready=False)
    assert made.run() == EXIT_FAILED
    assert rows[-1][0] == "failed"
    assert "before it was READY" in rows[-1][1]


def test_run_child_that_raises_is_reported_with_its_cause() -> None:
    made, rows = supervisor("raise ValueError('no such dtype')", ready=False)
    assert made.run() == EXIT_FAILED
    assert "ValueError: no such dtype" in rows[-1][1]


def test_run_child_that_never_gets_ready_is_ended_at_the_start_timeout() -> None:
    made, rows = supervisor("import time; time.sleep(600)", ready=False, start_timeout_s=0.5)
    began = time.monotonic()
    assert made.run() == EXIT_FAILED
    assert time.monotonic() - began < 10
    assert "START_TIMEOUT_S" in rows[-1][1]
    assert not psutil.Process().children(recursive=True)


def test_run_leaves_alone_what_was_below_it_before() -> None:
    """In `qwen-nvfp4 serve > >(tee log)` the shell makes tee a child of ours, and it must hear the end."""
    made, _ = supervisor("pass", ready=False)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as tee:
        made.run()
        still_there = tee.poll() is None
        tee.kill()
    assert still_there


DRIVER = """
import os, sys, time
from qwen_nvfp4_serve.supervisor import Supervisor
code, ready = sys.argv[1], sys.argv[2] == "ready"
made = Supervisor(argv=(sys.executable, "-c", code), environment=dict(os.environ), probe=lambda: ready,
    report=lambda stage, message: print(stage, message, flush=True), ready_message="here",
    start_timeout_s=60.0, shutdown_timeout_s=float(sys.argv[3]), scratch=sys.argv[4])
sys.exit(made.run())
"""


def start(code: str, *, ready: bool = True, shutdown_s: float = 0.5, scratch: Path | str = "") -> subprocess.Popen[str]:
    words = ["ready" if ready else "not", str(shutdown_s), str(scratch)]
    arguments = [sys.executable, "-c", DRIVER, textwrap.dedent(code), *words]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"{word!r} was never printed")


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def grown_family(process: subprocess.Popen[str], least: int) -> list[psutil.Process]:
    """The processes below `process` once there are at least `least` of them."""
    deadline = time.monotonic() + 20
    while len(below := family(process)) < least:
        assert time.monotonic() < deadline, f"only {len(below)} processes"
        time.sleep(0.05)
    return below


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_run_signal_stops_child_and_grandchildren_and_exits_0(number: signal.Signals) -> None:
    grandchild = "import time; time.sleep(600)"
    driver = start(
        f"""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", {grandchild!r}], start_new_session=True)
        print("up", flush=True)
        time.sleep(600)
        """
    )
    wait_for(driver, "READY")
    below = grown_family(driver, 2)
    driver.send_signal(number)
    assert driver.wait(timeout=20) == EXIT_STOPPED
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in below)


def test_run_second_signal_ends_a_stubborn_child_at_once() -> None:
    driver = start(STUBBORN, shutdown_s=300.0)
    wait_for(driver, "READY")
    below = family(driver)
    driver.terminate()
    wait_for(driver, "stopping")
    assert driver.poll() is None
    driver.terminate()
    assert driver.wait(timeout=10) == EXIT_STOPPED
    assert not any(process.is_running() for process in below)


def test_run_stubborn_child_is_killed_before_it_is_ready() -> None:
    driver = start(STUBBORN, ready=False)
    wait_for(driver, "up")
    driver.terminate()
    assert driver.wait(timeout=20) == EXIT_STOPPED


def test_run_supervisor_killed_outright_takes_the_whole_tree_along_within_5_s() -> None:
    driver = start(
        f"""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
        print("up", flush=True)
        time.sleep(600)
        """
    )
    wait_for(driver, "READY")
    below = grown_family(driver, 3)  # the child, its own child, and what watches over both
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not alive


def test_run_supervisor_killed_outright_takes_its_scratch_folder_along(tmp_path: Path) -> None:
    scratch = tmp_path / "with space"
    scratch.mkdir()
    (scratch / "vllm_dist_1").write_text("x")
    driver = start(STUBBORN, scratch=scratch)
    wait_for(driver, "READY")
    below = grown_family(driver, 2)
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not alive
    assert list(tmp_path.iterdir()) == []


def test_run_end_is_reported_after_everything_that_the_child_said() -> None:
    made, rows = supervisor("print('INFO Starting to load model /x...'); raise ValueError('last words')", ready=False)
    said = made.report

    def slowly(stage: Stage, message: str) -> None:
        if stage == "load":
            time.sleep(0.5)
        said(stage, message)

    dataclasses.replace(made, report=slowly).run()
    assert [stage for stage, _ in rows] == ["load", "load", "failed"]
    assert "last words" in rows[-1][1]


def test_run_stage_lines_of_vllm_are_reported_once_and_in_order() -> None:
    made, rows = supervisor(
        """
        print("INFO Starting to load model /x...")
        print("INFO Loading weights took 0.02 seconds")
        print("INFO Model loading took 1 GiB")
        """,
        ready=False,
    )
    made.run()
    stages = [stage for stage, _ in rows]
    assert stages == ["load", "load", "warm-up", "failed"]
