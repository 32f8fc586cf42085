"""Secrets from files, and what is said when they are not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.secret_files import opened, read_secret_files
from qwen_nvfp4_serve.settings import load_settings


def test_read_secret_files_reads_each_named_file_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1\r\n")
    assert read_secret_files({"VLLM_API_KEY_FILE": str(tmp_path / "key")}) == {"VLLM_API_KEY": "sk-1"}
    assert read_secret_files({}) == {}


def test_load_settings_takes_the_key_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1")
    settings = load_settings(None, {"VLLM_API_KEY_FILE": str(tmp_path / "key")}).settings
    assert settings.vllm_api_key is not None
    assert settings.vllm_api_key.get_secret_value() == "sk-1"


def test_read_secret_files_missing_names_the_line_to_type(tmp_path: Path) -> None:
    line = r"seen no file secrets/key.*Type: mkdir -p secrets && printf %s 'YOUR-SECRET' > secrets/key"
    with pytest.raises(UsageError, match=line):
        read_secret_files({"HF_TOKEN_FILE": "secrets/key"})
    with pytest.raises(UsageError, match=r"Type: printf [^&]*/absent.*as HF_TOKEN_FILE=secrets/absent\.$"):
        read_secret_files({"HF_TOKEN_FILE": str(tmp_path / "absent")})


def test_read_secret_files_empty_or_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    with pytest.raises(UsageError, match="which is empty"):
        read_secret_files({"VLLM_API_KEY_FILE": str(tmp_path / "key")})
    with pytest.raises(UsageError, match="VLLM_API_KEY_FILE"):
        read_secret_files({"VLLM_API_KEY_FILE": str(tmp_path)})


def test_read_secret_files_unreadable_names_the_chown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path, _mode: str) -> str:
        raise PermissionError

    (tmp_path / "key").write_text("sk-1")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match="sudo chown"):
        read_secret_files({"VLLM_API_KEY_FILE": str(tmp_path / "key")})


def test_opened_names_the_first_folder_that_may_not_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    may_enter = {".": True, "secrets": False, "secrets/mine": False}
    monkeypatch.setattr(os, "access", lambda path, _mode: may_enter[str(path)])
    assert opened(Path("secrets/mine/key")) == "sudo chmod o+x secrets"
    assert opened(Path(".env")) == f"sudo chown {os.getuid()} .env"


def test_read_secret_files_folder_is_not_to_be_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which is no file") as caught:
        read_secret_files({"VLLM_API_KEY_FILE": str(tmp_path)})
    assert "printf" not in str(caught.value)


@pytest.mark.timeout(10)
def test_read_secret_files_without_an_end_or_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which is no file"):
        read_secret_files({"VLLM_API_KEY_FILE": "/dev/zero"})
    (tmp_path / "key").write_text("k" * 5000)
    with pytest.raises(UsageError, match="longer than 4096 bytes"):
        read_secret_files({"VLLM_API_KEY_FILE": str(tmp_path / "key")})


def test_read_secret_files_set_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="both set"):
        read_secret_files({"VLLM_API_KEY": "sk-secret", "VLLM_API_KEY_FILE": "x"})
