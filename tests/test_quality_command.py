"""`qwen-nvfp4 quality` against a scripted endpoint: its files, its words and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from tests.quality_spoilt import SUMS, answers, but_the_first, reasons, text
from tests.quality_stand_in import Script, scripted

from qwen_nvfp4_serve import cli
from qwen_nvfp4_serve.quality.result import FILE, read_result, result_schema

COMMAND = str(Path(sys.executable).parent / "qwen-nvfp4")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs `qwen-nvfp4 quality …` here: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["qwen-nvfp4", "quality", *words])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return int(str(code or 0)), said.out, said.err

    return run


ONCE = ("--families", "arithmetic,needle", "--thinking", "off", "--lengths", "512", "--depths", "50", "--each", "1")


def test_cli_writes_result_page_and_chart_and_exits_0(run_cli: Cli, tmp_path: Path) -> None:
    with scripted(Script(exam=replace(SUMS, each=1))) as url:
        code, out, err = run_cli("--base-url", url, "--out", "run", "--label", "one", *ONCE)
    assert code == 0, err
    assert "8 of 8 right (100.0 %)" in out
    result = read_result(tmp_path / "run")
    assert (result.label, result.complete, result.exam.each) == ("one", True, 1)
    jsonschema.validate(json.loads((tmp_path / "run" / FILE).read_text()), result_schema())
    assert (tmp_path / "run" / "quality.png").stat().st_size > 10_000
    page = (tmp_path / "run" / "quality.md").read_text()
    assert "![quality](quality.png)" in page
    assert "| arithmetic: sum | off | 1/1 | 100 |" in page


def test_cli_low_score_exits_0_and_at_least_makes_it_1(run_cli: Cli) -> None:
    with scripted(Script(spoil=text("no idea"))) as url:
        code, out, _ = run_cli("--base-url", url, "--out", "run", *ONCE)
        assert code == 0
        assert "0 of 8 right" in out
        code, _, err = run_cli("--base-url", url, "--out", "again", "--at-least", "12.5", *ONCE)
        assert code == 1
        assert "too few right answers: seen 0 of 8 right, 0.0 %, expected --at-least 12.5 %" in err
    assert read_result(Path("again")).complete


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--lengths", "1k"), "--lengths"),
        (("--lengths", ""), "--lengths"),
        (("--depths", "0,50%"), "--depths"),
        (("--families", "needle,sums"), "--families"),
        (("--thinking", "maybe"), "--thinking"),
        (("--each", "0"), "--each"),
        (("--timeout-s", "nan"), "--timeout-s"),
        (("--at-least", "101"), "--at-least"),
        (("--at-least", "nan"), "--at-least"),
        (("--model", "no-such"), "serves m, expected one of those"),
        (("--api-key", "two\nlines"), "--api-key"),
        (("--api-key", "schlüssel"), "--api-key"),
        (("--base-url", "http://user:pw@127.0.0.1:1/v1"), "--base-url"),
        (("--base-url", "http://127.0.0.1:1/v1?key=k"), "--base-url"),
        (("--env-file", "none.env"), "none.env"),
        (("--server-log", "none.log"), "none.log"),
    ],
)
def test_cli_wrong_use_is_one_line_and_2(run_cli: Cli, words: tuple[str, str], says: str) -> None:
    with scripted(Script()) as url:
        code, out, err = run_cli("--base-url", url, "--out", "run", *words)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert words[0] != "--api-key" or words[1].split()[-1] not in err
    assert not Path("run", FILE).exists()


def test_cli_out_is_needed_new_and_a_folder(run_cli: Cli) -> None:
    assert run_cli()[0] == 2
    Path("file").write_text("x")
    assert run_cli("--out", "file")[0] == 2
    assert run_cli("--out", "n" * 5000)[0] == 2
    Path("kept").mkdir()
    Path("kept", FILE).write_text("{}")
    code, _, err = run_cli("--out", "kept")
    assert code == 2
    assert "Name another folder" in err


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:9", "no OpenAI endpoint answers"),
        ("localhost:8000", "no OpenAI endpoint answers"),
        ("http://", "no OpenAI endpoint answers"),
        ("http://[::1", "no OpenAI endpoint answers"),
    ],
)
def test_cli_nothing_there_is_one_line_and_1(run_cli: Cli, url: str, says: str) -> None:
    code, out, err = run_cli("--base-url", url, "--out", "run")
    assert (code, out) == (1, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(("status", "says"), [(401, "VLLM_API_KEY"), (404, "HTTP 404"), (301, "HTTP 301")])
def test_cli_models_refused_is_one_line_and_1(run_cli: Cli, status: int, says: str) -> None:
    with scripted(Script(models_status=status)) as url:
        code, _, err = run_cli("--base-url", url, "--out", "run")
    assert code == 1
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_cli_asks_the_model_named_with_the_key_given(run_cli: Cli) -> None:
    script = Script(exam=SUMS, models=("first", "second"))
    with scripted(script) as url:
        code, _, err = run_cli("--base-url", url, "--out", "run", "--model", "second", "--api-key", "k1", *ONCE)
    assert code == 0, err
    assert {body["model"] for body in script.bodies} == {"second"}
    assert set(script.keys) == {"Bearer k1"}
    assert "k1" not in Path("run", FILE).read_text()


def test_cli_ctrl_c_keeps_what_came_marked_as_interrupted(tmp_path: Path) -> None:
    script = Script(exam=replace(SUMS, each=8), pause_s=0.2)
    with scripted(script) as url:
        words = ["--families", "arithmetic", "--thinking", "off", "--concurrency", "1"]
        process = subprocess.Popen(
            [COMMAND, "quality", "--base-url", url, "--out", "run", *words],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name in ("PATH", "HOME")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while len(script.bodies) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert not (tmp_path / "run" / FILE).exists()
    result = read_result(tmp_path / "run" / "quality-interrupted.json")
    assert not result.complete
    assert result.stopped == "it was interrupted"
    assert 2 <= len(result.outcomes) < result.asked == 48
    assert reasons(result) == {None}


def test_cli_server_gone_keeps_what_came_and_exits_1(run_cli: Cli) -> None:
    spoil = but_the_first(answers(0, b""))
    with scripted(Script(exam=SUMS, spoil=spoil)) as url:
        code, out, err = run_cli("--base-url", url, "--out", "run", *ONCE[:-1], "8")
    assert code == 1
    assert "the run was given up: seen the server did not answer" in err
    assert "quality-interrupted.json" in out
    assert not read_result(Path("run", "quality-interrupted.json")).complete


def test_cli_report_makes_the_same_page_again(run_cli: Cli) -> None:
    with scripted(Script(exam=SUMS)) as url:
        assert run_cli("--base-url", url, "--out", "run", *ONCE)[0] == 0
    before = Path("run", "quality.md").read_bytes()
    Path("run", "quality.md").unlink()
    code, out, _ = run_cli("report", "run")
    assert code == 0
    assert Path("run", "quality.md").read_bytes() == before
    assert re.search(r"wrote run/quality\.md and quality\.png", out)


def test_cli_report_of_another_file_is_one_line_and_2(run_cli: Cli) -> None:
    for name, content in (("a.json", "{}"), ("b.json", '{"format": "qwen-nvfp4-bench/1"}'), ("c.json", "\x00")):
        Path(name).write_text(content)
        code, _, err = run_cli("report", name)
        assert code == 2
        assert "`qwen-nvfp4 quality` wrote" in err
        assert len(err.strip().splitlines()) == 1


def test_cli_schema_is_json(run_cli: Cli) -> None:
    code, out, _ = run_cli("schema")
    assert code == 0
    assert json.loads(out)["properties"]["format"]["const"] == "qwen-nvfp4-quality/1"
