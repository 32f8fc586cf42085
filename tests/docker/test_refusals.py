"""What is wrong around the container is refused at its start, in one line that says what to type."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import docker, need, run
from stack import Stack

pytestmark = pytest.mark.docker


@pytest.fixture
def project(tmp_path: Path, cpu_image: str) -> Iterator[Stack]:
    """A project of its own, to be changed freely."""
    tmp_path.chmod(0o755)
    made = Stack(tmp_path, f"qwen-nvfp4-refusals-{os.getpid()}", 8000)
    yield made
    made.compose("--profile", "*", "down", "--volumes")


def refusal(project: Stack, *options: str, **environment: str) -> str:
    """What the server says when it refuses to start; asserts that it is one line and exit code 2."""
    done = project.compose("run", "--rm", *options, "cpu", more=environment)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(lines) == 1
    return lines[0]


def test_cache_owned_by_root_names_the_chown(project: Stack) -> None:
    volume = f"{project.name}-rootcache"
    need(docker(), "volume", "create", volume)
    try:
        need(docker(), "run", "--rm", "--user", "0", "--entrypoint", "chown", "-v", f"{volume}:/cache",
             "qwen-nvfp4-test:cpu", "-R", "0:0", "/cache")  # fmt: skip
        line = refusal(project, "-v", f"{volume}:/cache")
        assert "/cache cannot be written" in line
        assert "seen owner 0" in line
        typed = (
            "docker compose run --rm --user 0 --cap-add CHOWN --cap-add DAC_OVERRIDE "
            "--entrypoint chown cpu -R 1000:1000 /cache"
        )
        assert typed in line
        words = typed.split()[2:]
        repaired = project.compose(*words[:2], "-v", f"{volume}:/cache", *words[2:])
        assert repaired.returncode == 0, repaired.stderr
        owner = need(docker(), "run", "--rm", "--entrypoint", "stat", "-v", f"{volume}:/cache", "qwen-nvfp4-test:cpu",
                     "-c", "%u", "/cache")  # fmt: skip
        assert owner.strip() == "1000"
    finally:
        need(docker(), "volume", "rm", volume)


def test_hub_cache_folder_of_another_user_names_the_chown(project: Stack, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir(mode=0o755)
    line = refusal(project, HF_HOME=str(hub))
    typed = line[line.index("docker compose run") : line.index(" (or give HF_HOME")]
    assert typed.endswith("-R 1000:1000 /cache/huggingface")
    assert project.compose(*typed.split()[2:], more={"HF_HOME": str(hub)}).returncode == 0
    assert hub.stat().st_uid == 1000


def test_folder_of_root_below_the_volume_names_the_chown(project: Stack) -> None:
    """What an earlier run as root left there; vLLM or a compiler would stumble over it much later."""
    made = project.compose("run", "--rm", "--user", "0", "--cap-add", "DAC_OVERRIDE", "--entrypoint", "mkdir", "cpu",
                           "/cache/triton", "/cache/huggingface/hub")  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "-R 1000:1000 /cache/triton" in refusal(project)
    typed = "run --rm --user 0 --cap-add CHOWN --cap-add DAC_OVERRIDE --entrypoint chown cpu -R 1000:1000 /cache/triton"
    assert project.compose(*typed.split()).returncode == 0
    assert "-R 1000:1000 /cache/huggingface/hub" in refusal(project)


def test_read_only_volume_is_not_called_a_matter_of_owners(project: Stack) -> None:
    volume = f"{project.name}-readonly"
    need(docker(), "volume", "create", volume)
    try:
        line = refusal(project, "-v", f"{volume}:/cache:ro")
    finally:
        need(docker(), "volume", "rm", volume)
    assert "seen a read-only mount" in line
    assert "chown" not in line


def test_no_temporary_folder_names_the_option(cpu_image: str) -> None:
    done = run(docker(), "run", "--rm", "--read-only", cpu_image)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--tmpfs /tmp:exec" in done.stderr
    assert "Traceback" not in done.stderr


def test_small_shm_with_tensor_parallelism_names_the_size(project: Stack) -> None:
    line = refusal(project, QWEN_NVFP4_SHM_SIZE="64m", TENSOR_PARALLEL="2")
    assert "seen 64 MiB" in line
    assert "QWEN_NVFP4_SHM_SIZE=8gb" in line


def test_missing_secret_file_names_the_command(project: Stack) -> None:
    line = refusal(project, VLLM_API_KEY_FILE="secrets/key")
    assert "seen no file secrets/key" in line
    assert "printf %s 'YOUR-SECRET' > secrets/key" in line


def test_key_exported_in_the_shell_is_not_lost_silently(project: Stack) -> None:
    line = refusal(project, VLLM_API_KEY="sk-exported")
    assert "Put VLLM_API_KEY=… into .env" in line
    assert "sk-exported" not in line


def test_grace_period_too_short_for_the_shutdown_timeout_names_the_value(project: Stack) -> None:
    line = refusal(project, SHUTDOWN_TIMEOUT_S="120")
    assert "QWEN_NVFP4_STOP_GRACE=140s" in line


def test_misspelt_knob_in_env_file_is_refused(project: Stack, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MAX_MODEL_LENGTH=4096\n")
    assert "MAX_MODEL_LEN" in refusal(project)


def test_other_addresses_are_refused_without_a_key(project: Stack) -> None:
    assert "VLLM_API_KEY" in refusal(project, BIND_HOST="0.0.0.0")


def test_env_file_of_another_user_names_the_chown(project: Stack, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MAX_NUM_SEQS=4\n")
    (tmp_path / ".env").chmod(0o600)
    assert "sudo chown 1000 .env" in refusal(project)
    tmp_path.chmod(0o700)
    assert "sudo chmod o+x ." in refusal(project)


def test_model_folder_of_the_host_names_the_lines_and_is_then_seen(project: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / ".env").write_text("MODEL=/data/elsewhere/mine\n")
    line = refusal(project)
    assert "QWEN_NVFP4_MODELS=/data/elsewhere and MODEL=/models/mine into .env" in line
    (tmp_path / ".env").write_text(f"QWEN_NVFP4_MODELS={folder.parent}\nMODEL=/models/mine\n")
    assert "/models/mine: seen no config.json" in refusal(project)
