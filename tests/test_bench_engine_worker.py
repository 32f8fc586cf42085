"""The engine bench's worker and command on a stand-in engine with a known speed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.bench_engine_stand_in import before_all, install_stand_in
from tests.processes import descendants, left_of

from qwen_nvfp4_serve.bench.engine import (
    EngineSpec,
    Kernel,
    dump_spec,
    read_engine,
)


def run_worker(folder: Path, spec: EngineSpec, **variables: str) -> subprocess.CompletedProcess[str]:
    """The worker, to its end, in a folder with the stand-in; it leaves engine.json there."""
    (folder / "spec.json").write_bytes(dump_spec(spec))
    worker = [sys.executable, "-m", "qwen_nvfp4_serve.bench.engine_worker", "spec.json", "engine.json"]
    environment = os.environ | {"PYTHONPATH": before_all(folder)} | variables
    return subprocess.run(worker, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_engine_worker_measures_each_configuration(tmp_path: Path) -> None:
    install_stand_in(tmp_path)
    spec = EngineSpec(
        model_folder="m",
        configurations={"slow": {}, "fast": {"fast": True}},
        streams=(1, 2),
        short=4,
        long=68,
        prefills=(64,),
        depths=(512,),
        rounds=2,
        profile_tokens=8,
        profile_streams=(1, 8),
    )
    done = run_worker(tmp_path, spec)
    assert done.returncode == 0, done.stderr
    slow, fast = read_engine(tmp_path / "engine.json").runs
    assert slow.decode[1].median == pytest.approx(200, rel=0.1)
    assert fast.decode[2].median == pytest.approx(800, rel=0.1)
    assert fast.depths[512].prefill == pytest.approx(1000)
    assert fast.depths[512].decode == pytest.approx(67 / 68 * 400)
    assert slow.kernels == (Kernel(name="marlin_gemm", us=102.0, calls=2.0),)  # nothing of the prefill
    assert slow.kernels_at == {8: (Kernel(name="marlin_gemm", us=116.0, calls=2.0),)}
    assert slow.prefill_steps == {"decode 2": (1, 1, 1, 1), "profile 8": (1, 1)}
    assert slow.core_process is False
    assert "vLLM's own dummy weights" in done.stdout  # the stand-in fills nothing
    assert slow.options["load_format"] == "dummy"
    assert slow.model_bytes == 3 << 30
    assert (slow.cold, slow.side_by_side, slow.restart_s) == (False, False, ())


def test_engine_worker_samples_the_card_of_each_rate_and_leaves_no_sampler(tmp_path: Path) -> None:
    smi = """#!/bin/sh
echo $$ >> smi
case "$*" in *loop-ms*) lines=9999 ;; *) lines=1 ;; esac
while [ $lines -gt 0 ]; do echo "1980, 3201, 500.5, 60, 0x4"; sleep 0.01; lines=$((lines - 1)); done
"""
    install_stand_in(tmp_path, **{"nvidia-smi": smi})
    (tmp_path / "nvidia-smi").chmod(0o755)
    spec = EngineSpec(
        model_folder="m",
        configurations={"one": {}, "two": {}},
        streams=(1, 2),
        short=1,
        long=81,
        prefills=(),  # the stand-in takes no time for them
        depths=(512,),
        rounds=1,
        profile_tokens=0,
    )
    (tmp_path / "spec.json").write_bytes(dump_spec(spec))
    worker = [sys.executable, "-m", "qwen_nvfp4_serve.bench.engine_worker", "spec.json", "engine.json"]
    environment = os.environ | {"PYTHONPATH": before_all(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    subprocess.run(worker, cwd=tmp_path, env=environment, check=True)
    one, two = read_engine(tmp_path / "engine.json").runs
    assert list(one.clocks) == list(two.clocks) == ["decode 1", "decode 2", "behind 512"]
    for clocks in (*one.clocks.values(), *two.clocks.values()):
        assert (clocks.sm_mhz, clocks.power_w_high, clocks.reasons) == (1980.0, 500.5, ("sw_power_cap",))
    started = list(map(int, (tmp_path / "smi").read_text().split()))
    assert len(started) == 5  # to see what it says and then to sample, for each; and for the cards
    assert not left_of(started, 0.0)


def test_engine_worker_asks_for_the_graphs_of_its_streams_and_does_without(tmp_path: Path) -> None:
    install_stand_in(tmp_path)
    spec = EngineSpec(
        model_folder="a-model",
        configurations={"with": {"graphs": True}, "without": {}, "changed": {"graphs": False}},
        streams=(1, 8),
        short=2,
        long=10,
        prefills=(),
        rounds=1,
        profile_tokens=0,
    )
    done = run_worker(tmp_path, spec)
    assert done.returncode == 0, done.stderr
    found = {run.label: run.graph_us for run in read_engine(tmp_path / "engine.json").runs}
    assert found == {"with": {1: 1000.0, 8: 8000.0}, "without": {}, "changed": {}}
    assert done.stdout.count("decode graphs not timed: ") == 1


def test_engine_worker_starts_again_from_the_caches_of_its_first_start(tmp_path: Path) -> None:
    install_stand_in(tmp_path)
    spec = EngineSpec(
        model_folder="m",
        configurations={"one": {}, "two": {"fast": True}},
        streams=(1,),
        short=1,
        long=5,
        prefills=(),
        profile_tokens=0,
        restarts=2,
    )
    done = run_worker(tmp_path, spec, VLLM_CACHE_ROOT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    one, two = read_engine(tmp_path / "engine.json").runs
    assert (one.cold, two.cold) == (True, False)  # the second finds what the first compiled
    assert one.load_s > 1.0
    assert len(one.restart_s) == len(two.restart_s) == 2
    assert max(one.restart_s + two.restart_s) < 1.0


def test_engine_worker_measures_our_kernels_beside_stock_whatever_the_environment_says(tmp_path: Path) -> None:
    install_stand_in(tmp_path)
    named = {backend: {"nvfp4_backend": backend} for backend in ("stock", "hybrid")}
    spec = EngineSpec(
        model_folder="m",
        configurations=named | {"as told": {}},
        streams=(1,),
        short=1,
        long=41,
        prefills=(),
        profile_tokens=0,
        restarts=1,
    )
    done = run_worker(tmp_path, spec, QWEN_NVFP4_BACKEND="hybrid")
    assert done.returncode == 0, done.stderr
    stock, hybrid, told = read_engine(tmp_path / "engine.json").runs
    for run, rate in ((stock, 200), (hybrid, 400), (told, 400)):
        assert run.decode[1].median == pytest.approx(rate, rel=0.1)
        assert len(run.restart_s) == 1
    assert [run.options.get("nvfp4_backend") for run in (stock, hybrid, told)] == ["stock", "hybrid", None]
    assert [run.cold for run in (stock, hybrid, told)] == [True, False, False]


def test_engine_worker_ends_where_the_process_of_a_configuration_fails(tmp_path: Path) -> None:
    install_stand_in(tmp_path)
    options = {"nvfp4_backend": "hybrid", "wrong": "no such thing"}
    done = run_worker(tmp_path, EngineSpec(model_folder="m", configurations={"ours": options}))
    assert done.returncode == 1
    *_, first, last = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert first.startswith("error: engine bench: seen ValueError: no such thing")
    assert last == "error: the engine of ours: seen exit code 1. Its output is above."
    assert not (tmp_path / "engine.json").exists()


def test_engine_worker_waits_at_its_gate(tmp_path: Path) -> None:
    install_stand_in(tmp_path)
    spec = EngineSpec(
        model_folder="m", configurations={"one": {}}, streams=(1,), short=1, long=5, prefills=(), profile_tokens=0
    )
    (tmp_path / "spec.json").write_bytes(dump_spec(spec))
    worker = [sys.executable, "-m", "qwen_nvfp4_serve.bench.engine_worker", "spec.json", "engine.json", "gate"]
    with subprocess.Popen(worker, cwd=tmp_path, env=os.environ | {"PYTHONPATH": before_all(tmp_path)}) as running:
        deadline = time.monotonic() + 60
        while not (tmp_path / "gate.ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (tmp_path / "gate.ready").exists()
        time.sleep(0.5)  # as long as it would take
        assert running.poll() is None
        assert not (tmp_path / "engine.json").exists()
        (tmp_path / "gate.go").touch()
        assert running.wait(60) == 0
    (run,) = read_engine(tmp_path / "engine.json").runs
    assert (run.label, run.side_by_side) == ("one", True)


def test_engine_worker_ends_on_ctrl_c_while_its_engine_starts(tmp_path: Path) -> None:
    install_stand_in(tmp_path)
    (tmp_path / "spec.json").write_bytes(dump_spec(EngineSpec(model_folder="m", configurations={"a": {"deaf": True}})))
    worker = [sys.executable, "-m", "qwen_nvfp4_serve.bench.engine_worker", "spec.json", "engine.json"]
    with subprocess.Popen(worker, cwd=tmp_path, env=os.environ | {"PYTHONPATH": before_all(tmp_path)}) as running:
        deadline = time.monotonic() + 60
        while not (tmp_path / "deaf").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        try:
            assert running.wait(10) == -signal.SIGINT
        finally:
            running.kill()


MODEL = Path(__file__).resolve().parent.parent / "src" / "qwen_nvfp4_serve" / "data" / "reference" / "moe"
CLI = "from qwen_nvfp4_serve.cli import main; main()"


def start_command(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """`qwen-nvfp4 bench engine` in a folder with the stand-in, without a profile."""
    install_stand_in(folder)
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            CLI,
            "bench",
            "engine",
            str(MODEL),
            "--out",
            "out",
            "--profile",
            "0",
            "--prefill",
            "64",
            *words,
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": before_all(folder)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_engine_command_that_is_ended_takes_its_worker_along(tmp_path: Path, end: signal.Signals) -> None:
    with start_command(tmp_path, "--config", 'a={"max_model_len": 2048, "deaf": true}') as running:
        deadline = time.monotonic() + 60
        while not (tmp_path / "deaf").exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        below = descendants(running.pid)
        assert below
        running.send_signal(end)
        left = left_of(below, 5.0)
        for process in left:
            os.kill(process, signal.SIGKILL)
    assert not left


def test_engine_command_fails_when_the_core_that_it_waits_for_is_gone(tmp_path: Path) -> None:
    (tmp_path / "ask-core").touch()
    with start_command(tmp_path, "--config", 'a={"max_model_len": 2048, "apart": true}') as running:
        deadline = time.monotonic() + 60
        while not (tmp_path / "asked").exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        below = descendants(running.pid)
        os.kill(int((tmp_path / "asked").read_text()), signal.SIGKILL)
        try:
            output, _ = running.communicate(timeout=10)
        finally:
            running.kill()
    assert running.returncode == 1
    assert "engine bench, a process of the engine: seen its end" in output
    assert "Traceback" not in output
    assert not left_of(below, 5.0)


@pytest.mark.parametrize(
    ("config", "last"),
    [
        ('{"wrong": "1 validation error\\n  no such thing\\n    For further information visit x"}', "no such thing"),
        ('{"wrong": "no\\nmemory"}', "memory"),
    ],
)
def test_engine_command_ends_with_what_vllm_said_last(tmp_path: Path, config: str, last: str) -> None:
    with start_command(tmp_path, "--config", f'a={{"max_model_len": 2048, {config[1:]}') as running:
        output, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    *_, said, ended = output.splitlines()
    assert said == f"error: engine bench: seen ValueError: {last}"
    assert ended.startswith("error: the engine bench failed: seen exit code 1")
    assert "Traceback" in output  # for who wants more


def test_engine_command_that_fails_leaves_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = ("--streams", "1", "--rounds", "1")
    fine = ("--config", 'a={"max_model_len": 2048}', *words)
    with start_command(tmp_path, *fine, TMPDIR=str(temporary)) as running:
        output, _ = running.communicate(timeout=60)
    assert running.returncode == 0, output
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert sorted(before) == ["README.md", "engine.json"]
    wrong = ("--config", 'b={"max_model_len": 2048, "wrong": "no"}', *words)
    with start_command(tmp_path, *wrong, TMPDIR=str(temporary)) as running:
        output, _ = running.communicate(timeout=60)
    assert running.returncode == 1, output
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert not list(temporary.iterdir())


def test_engine_command_that_is_interrupted_leaves_no_files(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    config = ("--config", 'a={"max_model_len": 2048, "deaf": true}')
    with start_command(tmp_path, *config, "--restarts", "1", TMPDIR=str(temporary)) as running:
        deadline = time.monotonic() + 60
        while not (tmp_path / "deaf").exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        below = descendants(running.pid)
        for process in (running.pid, *below):  # as a terminal does
            os.kill(process, signal.SIGINT)
        output, _ = running.communicate(timeout=20)
    assert running.returncode == 130, output
    assert not left_of(below, 5.0)
    assert not list(temporary.iterdir())
    assert not list((tmp_path / "out").iterdir())


def test_engine_commands_at_once_do_not_mix(tmp_path: Path) -> None:
    words = ("--streams", "1", "--rounds", "1")
    running = [
        start_command(tmp_path, "--config", f'{label}={{"max_model_len": 2048}}', *words) for label in ("one", "two")
    ]
    printed = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], printed
    for label, page in zip(("one", "two"), printed, strict=True):
        assert f"{label}: decode 1 streams" in page
        assert f"| {label} |" in page


def test_engine_worker_says_what_is_wrong_with_its_spec_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    worker = [sys.executable, "-m", "qwen_nvfp4_serve.bench.engine_worker", "spec.json", "engine.json"]
    done = subprocess.run(worker, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: engine bench, model_folder")
    assert done.stderr.count("\n") == 1


def test_engine_worker_measures_an_engine_with_a_core_of_its_own(tmp_path: Path) -> None:
    words = (
        "--config",
        'a={"max_model_len": 2048, "apart": true}',
        "--config",
        'b={"max_model_len": 2048, "apart": true}',
        "--streams",
        "1",
        "--rounds",
        "1",
        "--model",
        "qwen3.5-27b",
    )
    with start_command(tmp_path, *words) as running:
        output, _ = running.communicate(timeout=60)
    assert running.returncode == 0, output
    assert "No share of the byte roofline: Qwen3.5-27B" in output
    assert "and the engines loaded 3.00 GiB, 3.00 GiB." in output
    assert [run.core_process for run in read_engine(tmp_path / "out" / "engine.json").runs] == [True, True]


@pytest.mark.parametrize("option", ["late", "silent"])
def test_engine_command_says_what_it_knows_of_streams_that_do_not_begin_together(tmp_path: Path, option: str) -> None:
    words = ("--config", f'a={{"max_model_len": 2048, "{option}": true}}', "--streams", "1,2", "--rounds", "2")
    with start_command(tmp_path, *words) as running:
        output, _ = running.communicate(timeout=60)
    assert running.returncode == 0, output
    (run,) = read_engine(tmp_path / "out" / "engine.json").runs
    if option == "late":
        assert set(run.prefill_steps) == {"decode 2"}
        assert sorted(run.prefill_steps["decode 2"]) == [1, 1, 2, 2]
        assert "did not begin alike: decode 2 of a in 1 to 2 steps." in output
    else:
        assert run.prefill_steps == {}
        assert "did not begin alike" not in output
