"""Stage lines for people and for machines, and what a download says while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve import model_files
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.fetch import Fetched, Progress
from qwen_nvfp4_serve.launch import Model
from qwen_nvfp4_serve.settings import Settings
from qwen_nvfp4_serve.stages import duration, progress_message, reporter

HUB = Model(source="owner/name", ids=("name",), revision="a" * 40, local=False)


def test_reporter_text_is_one_line_with_stage_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    reporter("text")("load", "reading the weights")
    assert capsys.readouterr().out.endswith("s] load: reading the weights\n")


def test_reporter_json_is_one_object_a_line_also_for_messages_of_several_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter("json")("READY", "here\n  curl …")
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert (row["stage"], row["message"]) == ("READY", "here\n  curl …")
    assert row["elapsed_s"] >= 0


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (60, "1 min 00 s"), (184, "3 min 04 s")])
def test_duration_is_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_progress_message_gives_amount_rate_and_time_left() -> None:
    assert progress_message(Progress(3_200_000_000, 23_400_000_000, 110e6, 184)) == (
        "3.2 of 23.4 GB, 110 MB/s, 3 min 04 s left"
    )
    assert progress_message(Progress(0, 23_400_000_000, 0.0, None)) == "0.0 of 23.4 GB, 0 MB/s"


def test_download_reports_progress_and_verification_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> Fetched:
        asked.update(options, name=name)
        options["on_progress"](Progress(1_000_000_000, 2_000_000_000, 50e6, 20))
        return Fetched(folder=tmp_path, commit="b" * 40, downloaded_bytes=2, notice="the hub is away")

    monkeypatch.setattr(model_files, "fetch", fetch)
    monkeypatch.setattr(model_files, "inspected", lambda folder, *_: asked.update(inspected=folder))
    rows: list[tuple[str, str]] = []
    model_files.download(HUB, Settings(HF_HOME="/hub", HF_TOKEN="hf_x"), lambda stage, text: rows.append((stage, text)))  # type: ignore[call-arg]
    assert [stage for stage, _ in rows] == ["download", "download", "notice", "verify"]
    assert "1.0 of 2.0 GB, 50 MB/s, 20 s left" in rows[1][1]
    assert "bbbbbbbbbbbb" in rows[-1][1]
    assert (asked["name"], asked["revision"], asked["token"]) == ("owner/name", "a" * 40, "hf_x")
    assert asked["cache"] == Path("/hub/hub")
    assert asked["inspected"] == tmp_path


def test_download_offline_without_a_copy_says_so(tmp_path: Path) -> None:
    settings = Settings(HF_HOME=str(tmp_path), HF_HUB_OFFLINE=True)  # type: ignore[call-arg]
    with pytest.raises(QwenNvfp4Error, match="owner/name is not complete"):
        model_files.download(HUB, settings, lambda *_: None)
