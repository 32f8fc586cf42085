"""The whole command against a scripted endpoint: scores, every kind of failure, what is kept, and the exit codes."""

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
from typing import Any

import httpx
import jsonschema
import pytest
from tests.quality_stand_in import Json, Script, message_of, scripted

from qwen_nvfp4_serve import cli
from qwen_nvfp4_serve.bench.subject import subject_of
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.quality import client
from qwen_nvfp4_serve.quality.result import FILE, Outcome, Result, read_result, result_schema
from qwen_nvfp4_serve.quality.runner import NO_LOGPROBS, Order, run_quality
from qwen_nvfp4_serve.quality.task import Exam
from qwen_nvfp4_serve.smoke import connect

COMMAND = str(Path(sys.executable).parent / "qwen-nvfp4")
SMALL = Exam(
    lengths=(512, 1024),
    depths=(0, 100),
    needles=1,
    each=1,
    think_tokens=512,
    long_tokens=256,
    concurrency=4,
    timeout_s=20.0,
)
SUMS = replace(SMALL, families=("arithmetic",), thinking=("off",))
LONG = replace(SMALL, families=("long",), thinking=("off",))
Spoil = Callable[[Json, Json], tuple[int, Json | bytes]]
Cli = Callable[..., tuple[int, str, str]]


def ask(script: Script, exam: Exam) -> Result:
    script.exam = exam
    script.__post_init__()
    with scripted(script) as url:
        return run_quality(Order(exam=exam, subject=subject_of(connect(url, "key"), label="x")), lambda _: None)


def reasons(result: Result) -> set[str | None]:
    return {outcome.miss.reason if outcome.miss else None for outcome in result.outcomes}


def text(content: str) -> Callable[[Json, Json], tuple[int, Json]]:
    """Spoils the content of every answer but the first, which is no question."""

    def spoil(body: Json, reply: Json) -> tuple[int, Json]:
        message_of(reply)["content"] = content
        return 200, reply

    return spoil


def answers(status: int, reply: Json | bytes) -> Spoil:
    """Spoils by answering the same whatever was asked; status 0 hangs up."""
    return lambda *_: (status, reply)


def but_the_first(spoil: Spoil) -> Any:
    def spoilt(body: Json, reply: Json) -> tuple[int, Json | bytes]:
        return (200, reply) if body["max_tokens"] == 1 else spoil(body, reply)

    return spoilt


def test_run_right_endpoint_scores_everything() -> None:
    script = Script()
    result = ask(script, SMALL)
    assert [outcome for outcome in result.outcomes if not outcome.right] == []
    assert result.complete
    assert (result.right, result.asked, result.percent) == (44, 44, 100.0)
    assert result.notes == ()
    assert set(script.keys) == {"Bearer key"}
    questions = script.bodies[1:]
    assert all(body["temperature"] == 0.0 for body in questions)
    assert all(("tools" in body) == ("tool_choice" in body) for body in questions)
    assert {body["chat_template_kwargs"]["enable_thinking"] for body in questions} == {True, False}
    assert all(body.get("logprobs") is True for body in questions if "story" in str(body["messages"]))


def test_run_outcomes_keep_what_was_asked_and_said() -> None:
    result = ask(Script(), SMALL)
    first: Outcome = result.outcomes[0]
    assert first.task == "needle/512/0/0"
    assert (first.length, first.depth, first.thinking) == (512, 0, "off")
    assert first.question.startswith("what is the code for")
    assert first.content == first.expected
    assert first.prompt_tokens is not None
    assert 480 < first.prompt_tokens <= 512
    assert [one.task for one in result.outcomes].index("arithmetic/sum/0") == 8  # the order asked, not of arrival


def test_run_asks_several_at_once_and_no_more() -> None:
    script = Script(pause_s=0.05)
    ask(script, replace(SUMS, each=4, concurrency=3))
    assert script.busiest == 3


@pytest.mark.parametrize(
    ("spoil", "reason", "detail"),
    [
        (text("12345678901"), "wrong", "12345678901"),
        (text(""), "empty", "no content"),
        (text("I would rather not"), "not parsed", "no number"),
        (text("<think>\n1"), "leaked markup", "<think>"),
        (text("!" * 300), "degenerate", "300 times"),
        (answers(500, {"error": {"message": "engine died"}}), "HTTP error", "HTTP 500: engine died"),
        (answers(429, b"slow down"), "HTTP error", "HTTP 429: slow down"),
        (answers(200, b"<html>hello</html>"), "bad answer", "<html>"),
        (answers(200, b""), "bad answer", "not a chat answer"),
        (answers(0, b""), "dropped", ""),
    ],
)
def test_run_each_failure_is_a_miss_with_its_reason(spoil: Spoil, reason: str, detail: str) -> None:
    result = ask(Script(spoil=but_the_first(spoil)), replace(SUMS, concurrency=2))
    assert result.complete
    assert reasons(result) == {reason}
    assert all(outcome.miss and detail in outcome.miss.detail for outcome in result.outcomes)


def test_run_body_without_end_is_a_bad_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 5000)
    result = ask(Script(spoil=but_the_first(answers(200, b"x" * 6000))), SUMS)
    assert reasons(result) == {"bad answer"}
    assert result.complete


def test_lost_body_that_cannot_be_decoded_is_a_bad_answer() -> None:
    assert client._lost(httpx.DecodingError("not gzip")).reason == "bad answer"
    assert client._lost(httpx.ReadError("")).reason == "dropped"


def test_run_cut_answer_is_truncated() -> None:
    def cut(body: Json, reply: Json) -> tuple[int, Json]:
        reply["choices"][0]["finish_reason"] = "length"
        return 200, reply

    assert reasons(ask(Script(spoil=but_the_first(cut)), SUMS)) == {"truncated"}


def test_run_slow_answers_time_out() -> None:
    def slow(body: Json, reply: Json) -> tuple[int, Json]:
        time.sleep(2.0)
        return 200, reply

    result = ask(Script(spoil=but_the_first(slow)), replace(SUMS, timeout_s=1.0, concurrency=6))
    assert reasons(result) == {"timeout"}


def test_run_token_without_probability_degenerates_a_long_answer() -> None:
    def impossible(body: Json, reply: Json) -> tuple[int, Json]:
        if body.get("logprobs"):
            reply["choices"][0]["logprobs"]["content"][0]["logprob"] = None
        return 200, reply

    result = ask(Script(spoil=but_the_first(impossible)), LONG)
    assert reasons(result) == {"degenerate"}


def test_run_one_token_for_ever_degenerates_though_words_hide_it() -> None:
    def stuck(body: Json, reply: Json) -> tuple[int, Json]:
        message_of(reply)["content"] = "ab" * 15 + " and more"
        reply["choices"][0]["logprobs"] = {"content": [{"token": "ab", "logprob": -0.0}] * 30}
        return 200, reply

    assert reasons(ask(Script(spoil=but_the_first(stuck)), LONG)) == {"degenerate"}


def test_run_server_without_logprobs_is_asked_without_and_said() -> None:
    script = Script(knows_logprobs=False)
    result = ask(script, LONG)
    assert reasons(result) == {None}
    assert NO_LOGPROBS in result.notes
    assert not any(body.get("logprobs") for body in script.bodies[1:])


def test_run_without_tokenize_counts_by_usage() -> None:
    result = ask(Script(has_tokenize=False), replace(SMALL, families=("needle",)))
    assert reasons(result) == {None}
    for outcome in result.outcomes:
        assert outcome.length is not None
        assert outcome.prompt_tokens is not None
        assert 0.85 * outcome.length < outcome.prompt_tokens <= outcome.length


def test_run_lengths_beyond_the_context_are_left_out_with_a_sentence() -> None:
    result = ask(Script(max_model_len=1400), replace(SMALL, families=("needle",)))
    assert {(one.length, one.thinking) for one in result.outcomes} == {(512, "off"), (512, "on"), (1024, "off")}
    (note,) = result.notes
    assert "1,024 tokens with thinking on" in note
    assert "limit of 1,400" in note
    assert reasons(result) == {None}


def test_run_no_limit_known_leaves_nothing_out() -> None:
    result = ask(Script(max_model_len=None), SMALL)
    assert result.percent == 100.0
    assert len(result.outcomes) == 44


def test_run_nothing_fits_is_one_sentence() -> None:
    with pytest.raises(QwenNvfp4Error, match=r"nothing to ask.*limit of 300"):
        ask(Script(max_model_len=300), replace(SMALL, families=("needle",)))


def test_run_thinking_switch_that_does_nothing_is_said() -> None:
    result = ask(Script(knows_thinking=False), replace(SMALL, families=("arithmetic",)))
    assert any("enable_thinking" in note for note in result.notes)

    def always(body: Json, reply: Json) -> tuple[int, Json]:
        message_of(reply)["reasoning"] = "hm"
        return 200, reply

    failed = ask(Script(spoil=but_the_first(answers(500, {}))), replace(SMALL, families=("arithmetic",)))
    assert failed.notes == ()
    result = ask(Script(spoil=always), SUMS)
    assert result.notes == ("6 answers thought although thinking was off",)


def test_run_thinking_default_sends_no_switch() -> None:
    script = Script()
    ask(script, replace(SUMS, thinking=("default",)))
    assert not any("chat_template_kwargs" in body for body in script.bodies)


@pytest.mark.parametrize("status", [0, 200])
def test_run_server_that_goes_away_stops_the_run_and_keeps_the_rest(status: int) -> None:
    seen = 0

    def dies(body: Json, reply: Json) -> tuple[int, Json]:
        nonlocal seen
        seen += 1
        if seen > 5 and status:
            time.sleep(1.5)
        return (0, {}) if seen > 5 and not status else (200, reply)

    result = ask(Script(spoil=dies), replace(SUMS, each=6, concurrency=1, timeout_s=1.0))
    assert not result.complete
    assert result.stopped == "the server did not answer 8 requests in a row"
    assert (result.right, len(result.outcomes), result.asked) == (4, 12, 36)


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "VLLM_API_KEY"), (403, "key"), (404, "--model"), (500, "HTTP 500"), (400, "--thinking default")],
)
def test_run_first_question_refused_is_one_sentence(status: int, says: str) -> None:
    with pytest.raises(QwenNvfp4Error, match=says) as caught:
        ask(Script(spoil=answers(status, {"error": {"message": "no"}})), SUMS)
    assert len(str(caught.value).splitlines()) == 1
    assert f"HTTP {status}: no" in str(caught.value)


def test_run_first_question_unanswered_is_one_sentence() -> None:
    with pytest.raises(QwenNvfp4Error, match=r"no whole answer within 0.2 s.*--timeout-s"):
        ask(Script(pause_s=1.0), replace(SUMS, timeout_s=0.2))


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
