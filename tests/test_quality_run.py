"""A whole run against a scripted endpoint: scores, every kind of failure, and what is kept."""

from __future__ import annotations

import time
from dataclasses import replace

import httpx
import pytest
from tests.quality_spoilt import LONG, SMALL, SUMS, Spoil, answers, ask, but_the_first, reasons, text
from tests.quality_stand_in import Json, Script, message_of

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.quality import client
from qwen_nvfp4_serve.quality.result import Outcome
from qwen_nvfp4_serve.quality.runner import NO_LOGPROBS, SMALL_MODEL


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


def test_run_of_a_model_of_ours_says_that_a_low_score_is_normal() -> None:
    assert SMALL_MODEL in ask(Script(exam=SUMS, root="/elsewhere/reference/moe"), SUMS).notes
    assert SMALL_MODEL not in ask(Script(exam=SUMS, root="/elsewhere/moe"), SUMS).notes


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
