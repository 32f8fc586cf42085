"""What is checked around a container, as pure questions; tests/docker asks them of real ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen_nvfp4_serve import container
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.settings import load_settings
from qwen_nvfp4_serve.units import MIB


def test_check_cache_writable_or_not_there_yet_passes(tmp_path: Path) -> None:
    container.check_cache(tmp_path, uid=1000, gid=1000, service="cpu")
    container.check_cache(tmp_path / "later" / "on", uid=1000, gid=1000, service="cpu")


def test_check_cache_read_only_names_owner_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    other = os.getuid() + 1
    with pytest.raises(UsageError) as caught:
        container.check_cache(tmp_path, uid=other, gid=1001, service="gpu")
    assert f"seen owner {os.getuid()}, mode 700, expected owner {other}" in str(caught.value)
    assert f"--entrypoint chown gpu -R {other}:1001 {tmp_path}" in str(caught.value)


def test_check_cache_of_this_user_without_the_mode_names_chmod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match=rf"--entrypoint chmod cpu -R u\+rwX {tmp_path}"):
        container.check_cache(tmp_path, uid=os.getuid(), gid=0, service="cpu")


def test_check_cache_on_a_read_only_mount_names_the_mount_not_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(UsageError, match="seen a read-only mount") as caught:
        container.check_cache(tmp_path, uid=os.getuid() + 1, gid=0, service="cpu")
    assert "chown" not in str(caught.value)


def test_cache_folders_are_those_below_the_volumes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "huggingface", "mine/models"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(container, "CACHE_ROOT", tmp_path)
    settings = load_settings(None, {"HF_HOME": str(tmp_path / "mine")}).settings
    found = container.cache_folders(settings, {"VLLM_CACHE_ROOT": "/cache/vllm"})
    assert {tmp_path, tmp_path / "triton", Path("/cache/vllm"), tmp_path / "mine", tmp_path / "mine/hub"} <= set(found)
    assert tmp_path / "mine/models" not in found


def test_check_temporary_nowhere_to_write_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError

    container.check_temporary()
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(UsageError, match="--tmpfs /tmp:exec"):
        container.check_temporary()


@pytest.mark.parametrize(("mib", "cards", "fits"), [(64, 1, True), (64, 2, False), (1024, 2, True), (None, 2, True)])
def test_check_shm_small_is_refused_only_with_several_workers(mib: int | None, cards: int, fits: bool) -> None:
    size = None if mib is None else mib * MIB
    if fits:
        container.check_shm(size, cards, "gpu")
        return
    with pytest.raises(UsageError, match="seen 64 MiB, expected at least 1024 MiB"):
        container.check_shm(size, cards, "gpu")


@pytest.mark.parametrize(("grace", "timeout_s", "fits"), [("60s", 20, True), ("60s", 40, True), ("60s", 41, False),
    ("1m30s", 70, True), (None, 3600, True), ("soon", 3600, True)])  # fmt: skip
def test_check_stop_grace_must_cover_the_shutdown(grace: str | None, timeout_s: int, fits: bool) -> None:
    if fits:
        container.check_stop_grace(grace, timeout_s, "cpu")
        return
    with pytest.raises(UsageError, match=r"QWEN_NVFP4_STOP_GRACE=61s into \.env and type: docker compose up -d cpu"):
        container.check_stop_grace(grace, timeout_s, "cpu")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1m30s", 90), ("1h", 3600), ("1.5m", 90), ("90", None), ("", None)]
)
def test_duration_s_reads_compose_notation(text: str, seconds: float | None) -> None:
    assert container.duration_s(text) == seconds


def test_check_secrets_arrived_refuses_a_lost_key_and_tells_of_a_lost_token() -> None:
    """A token in the shell is common, and no model of the catalogue needs one."""
    has_key = {"VLLM_API_KEY": True, "HF_TOKEN": False}
    assert container.check_secrets_arrived(["VLLM_API_KEY"], has_key) == ()
    (notice,) = container.check_secrets_arrived(["HF_TOKEN"], has_key)
    assert "HF_TOKEN is set in the shell" in notice
    assert "Put HF_TOKEN=… into .env" in notice
    with pytest.raises(UsageError, match="VLLM_API_KEY is set in the shell"):
        container.check_secrets_arrived(["VLLM_API_KEY"], {"VLLM_API_KEY": False, "HF_TOKEN": True})


@pytest.mark.parametrize(
    ("model", "folder", "inside"),
    [
        ("/data/models/mine", "/data/models", "/models/mine"),
        ("~/models/mine", "~/models", "/models/mine"),
        ("../mine/", "..", "/models/mine"),
    ],
)
def test_check_model_folder_of_the_host_names_the_two_lines(model: str, folder: str, inside: str) -> None:
    with pytest.raises(UsageError, match="is not in the container") as caught:
        container.check_model_folder(model, "gpu")
    assert f"QWEN_NVFP4_MODELS={folder} and MODEL={inside} into .env" in str(caught.value)


def test_check_model_folder_leaves_names_and_folders_that_are_seen_to_others(tmp_path: Path) -> None:
    for model in (None, "embedded", "owner/name", str(tmp_path), "/models/not-there"):
        container.check_model_folder(model, "gpu")
