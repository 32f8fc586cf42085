"""What is checked around a container, as pure questions; tests/docker asks them of real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qwen_nvfp4_serve import container
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.units import MIB


def test_check_cache_writable_or_not_there_yet_passes(tmp_path: Path) -> None:
    container.check_cache(tmp_path, uid=1000, gid=1000, service="cpu")
    container.check_cache(tmp_path / "later" / "on", uid=1000, gid=1000, service="cpu")


def test_check_cache_read_only_names_owner_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError) as caught:
        container.check_cache(tmp_path, uid=1000, gid=1001, service="gpu")
    assert f"seen owner {tmp_path.stat().st_uid}, expected owner 1000" in str(caught.value)
    assert f"--entrypoint chown gpu -R 1000:1001 {tmp_path}" in str(caught.value)


@pytest.mark.parametrize(("mib", "cards", "fits"), [(64, 1, True), (64, 2, False), (1024, 2, True), (None, 2, True)])
def test_check_shm_small_is_refused_only_with_several_workers(mib: int | None, cards: int, fits: bool) -> None:
    size = None if mib is None else mib * MIB
    if fits:
        container.check_shm(size, cards)
        return
    with pytest.raises(UsageError, match="seen 64 MiB, expected at least 1024 MiB"):
        container.check_shm(size, cards)


@pytest.mark.parametrize(("grace", "timeout_s", "fits"), [("60s", 20, True), ("60s", 40, True), ("60s", 41, False),
    ("1m30s", 70, True), (None, 3600, True), ("soon", 3600, True)])  # fmt: skip
def test_check_stop_grace_must_cover_the_shutdown(grace: str | None, timeout_s: int, fits: bool) -> None:
    if fits:
        container.check_stop_grace(grace, timeout_s)
        return
    with pytest.raises(UsageError, match="QWEN_NVFP4_STOP_GRACE=61s"):
        container.check_stop_grace(grace, timeout_s)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1m30s", 90), ("1h", 3600), ("1.5m", 90), ("90", None), ("", None)]
)
def test_duration_s_reads_compose_notation(text: str, seconds: float | None) -> None:
    assert container.duration_s(text) == seconds


def test_check_secrets_arrived_names_the_lost_one() -> None:
    container.check_secrets_arrived(["VLLM_API_KEY"], {"VLLM_API_KEY": True, "HF_TOKEN": False})
    with pytest.raises(UsageError, match="HF_TOKEN is set in the shell"):
        container.check_secrets_arrived(["HF_TOKEN"], {"VLLM_API_KEY": True, "HF_TOKEN": False})
