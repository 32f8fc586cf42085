"""What counts as right, and the reason for each miss; texts that degenerate and texts that only look dull."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.quality_stand_in import STORY

from qwen_nvfp4_serve.quality import degenerate
from qwen_nvfp4_serve.quality.answer import Answer, Failure, RawCall, read_answer
from qwen_nvfp4_serve.quality.degenerate import text_fault, token_fault
from qwen_nvfp4_serve.quality.scoring import is_same, score
from qwen_nvfp4_serve.quality.task import Call, Calls, Code, Number, Prose, Says, Want, Words

WEATHER = Calls((Call("get_weather", {"city": "paris", "days": 3, "loud": True}),))
PAIR = Calls((Call("a", {"x": 1}), Call("b", {"y": "z"})))


def says(content: str, **more: Any) -> Answer:
    return Answer(content=content, finish_reason="stop", completion_tokens=5, **more)


def called(*calls: tuple[str, object], **more: Any) -> Answer:
    raw = tuple(RawCall(name, text if isinstance(text, str) else json.dumps(text)) for name, text in calls)
    return Answer(calls=raw, finish_reason="tool_calls", **more)


@pytest.mark.parametrize(
    ("want", "answer"),
    [
        (Number(827), says("827")),
        (Number(827), says("854 - 27 = **827**.")),
        (Number(-466), says("The result is −466")),
        (Number(5882199), says("5,882,199")),
        (Number(1234), says("$1{,}234$")),
        (Number(827), says("854-27=827")),
        (Number(50), says("50.0")),
        (Code("5255"), says("the code for cold fish is 5255.")),
        (Says("616"), says("The result is 616.")),
        (Words(("fox", "owl")), says("Fox,\nowl.")),
        (Prose(), says(STORY)),
        (Prose(), Answer(content="cut short", finish_reason="length")),
        (Prose(), Answer(reasoning="all of the room went into thinking", finish_reason="length")),
        (WEATHER, called(("get_weather", {"days": 3, "loud": True, "city": "paris"}))),
        (PAIR, called(("b", {"y": "z"}), ("a", {"x": 1}))),
        (WEATHER, called(("get_weather", {"city": "paris", "days": 3, "loud": True}), content="I will look.")),
    ],
)
def test_score_right_answer_counts(want: Want, answer: Answer) -> None:
    assert score(want, answer) is None


@pytest.mark.parametrize(
    ("want", "answer", "reason", "detail"),
    [
        (Number(827), says("828"), "wrong", "828"),
        (Number(827), says("827 or 828"), "wrong", "828"),
        (Number(827), says("-827"), "wrong", "-827"),
        (Number(827), says("I cannot do that."), "not parsed", "no number"),
        (Code("5255"), says("5255 or 1234"), "wrong", "1234"),
        (Code("5255"), says("52551"), "not parsed", "no code"),
        (Says("61"), says("the result is 616"), "wrong", "616"),
        (Says("616"), called(("look", {})), "wrong", "called look"),
        (Words(("fox", "owl", "hen")), says("fox owl"), "wrong", "2 words instead of 3"),
        (Words(("fox", "owl")), says("fox hen"), "wrong", "word 2 of 2 is hen, expected owl"),
        (Number(1), says(""), "empty", "no content"),
        (Number(1), says(" \n"), "empty", "no content"),
        (WEATHER, Answer(finish_reason="stop"), "empty", "no call"),
        (Prose(), says(""), "empty", "no content"),
        (Prose(), says("I will not."), "too short", "3 words"),
        (Prose(), says("", reasoning="a story, then"), "empty", "finish_reason stop"),
        (
            Prose(),
            Answer(content="4/Iu4/mV^eg7i08I6:#w-,yi kw]J#<r[~K-;cTkw", finish_reason="length"),
            "degenerate",
            "20",
        ),
        (Number(1), Answer(content="let me see: 1", finish_reason="length", completion_tokens=9), "truncated", "9"),
        (Number(1), Answer(reasoning="so", finish_reason="length"), "truncated", "still thinking"),
        (Number(1), says("</think>\n\n1"), "leaked markup", "</think>"),
        (Number(1), says("1<|im_end|>"), "leaked markup", "<|im_end|>"),
        (WEATHER, says("<tool_call>\n<function=get_weather>"), "leaked markup", "<tool_call>"),
        (WEATHER, says("", reasoning="<tool_call>x</tool_call>"), "leaked markup", "in the thinking"),
        (WEATHER, says("done", reasoning="<tool_call>x</tool_call>"), "leaked markup", "in the thinking"),
        (WEATHER, says("It is sunny."), "wrong", "no call"),
        (WEATHER, called(("get_weather", '{"city": ')), "not parsed", "no JSON object"),
        (WEATHER, called(("get_weather", "[1]")), "not parsed", "no JSON object"),
        (WEATHER, called(("get_weather", "[" * 100_000)), "not parsed", "no JSON object"),
        (WEATHER, called(("get_weather", {"city": "rome", "days": 3, "loud": True})), "wrong", "rome"),
        (WEATHER, called(("get_weather", {"city": "paris", "days": "3", "loud": True})), "wrong", '"3"'),
        (WEATHER, called(("get_weather", {"city": "paris", "days": 3, "loud": 1})), "wrong", "get_weather"),
        (WEATHER, called(("get_weather", {"city": "paris", "days": 3})), "wrong", "get_weather"),
        (WEATHER, called(("weather", {"city": "paris", "days": 3, "loud": True})), "wrong", "weather("),
        (WEATHER, called(("get_weather", {"city": "</parameter>"})), "leaked markup", "</parameter>"),
        (PAIR, called(("a", {"x": 1})), "wrong", "no call of b"),
        (PAIR, called(("a", {"x": 1}), ("a", {"x": 1})), "wrong", "a("),
        (Number(1), says("!" * 200), "degenerate", "'!' 200 times"),
        (Number(1), says("1", reasoning="wait " * 400), "degenerate", "wait"),
        (Prose(), says(STORY, impossible=2, tokens=("a",)), "degenerate", "2 tokens without"),
        (Prose(), says(STORY, tokens=("a", *["b"] * 30)), "degenerate", "token 'b' 30 times"),
        (Number(1), Failure("timeout", "no whole answer within 5 s"), "timeout", "5 s"),
        (Number(1), Failure("HTTP error", "HTTP 500: x", 500), "HTTP error", "500"),
    ],
)
def test_score_miss_says_why(want: Want, answer: Answer | Failure, reason: str, detail: str) -> None:
    miss = score(want, answer)
    assert miss is not None
    assert miss.reason == reason
    assert detail in miss.detail


def test_score_markup_in_the_thinking_of_a_right_answer_counts() -> None:
    assert score(Number(7), says("7", reasoning="a <tool_call> is not needed here")) is None


@pytest.mark.parametrize(
    ("text", "says_what"),
    [
        ("so it goes " + "!" * 40, "'!' 40 times"),
        ("the " * 16, "word 'the' 16 times"),
        ("once. " + "and then he went home. " * 10, "a block of 5 words"),
        (
            "intro words here. " + " ".join(f"w{n}" for n in range(100)) * 1 + (" " + " ".join("abcdefghij")) * 6,
            "block",
        ),
        (" ".join([" ".join(f"x{n}" for n in range(150))] * 3), "a block of 150 words 3 times"),
        ("<br>" * 8, "<br> 8 times"),
        ("</tag> </tag>\n" * 4, "</tag> 8 times"),
        ("abc\x00def", "control character"),
        ("a\ufffdb\ufffdc\ufffd", "3 broken characters"),
        ("-" * 500, "'-' 500 times"),
    ],
)
def test_text_fault_degenerate_is_found(text: str, says_what: str) -> None:
    fault = text_fault(text)
    assert fault is not None
    assert says_what in fault


@pytest.mark.parametrize(
    "text",
    [
        "",
        "word",
        STORY,
        "wow!!! " * 3,
        "-" * 80 + "\n| a | b |\n|:---|---:|\n" + "=" * 80,
        " ".join(str(number) for number in range(500)),
        "<b>one</b> <b>two</b> <b>three</b> " * 2,
        "the the the end",
        "row row row your boat. " * 3,
        "x = 1\ny = 2\n    return {\n        'a': 1,\n    }\n}\n}\n}\n",
        "ends in half a character \ufffd",
    ],
)
def test_text_fault_dull_text_passes(text: str) -> None:
    assert text_fault(text, is_prose=True) is None


@pytest.mark.parametrize(
    "text",
    [
        "a story of 东京 and 上海市 and 北京大学 с тех пор και τα λοιπά " + STORY[:40],
        "x" * 30 + " y" + "z" * 30,
    ],
)
def test_text_fault_garbled_is_found_in_prose_alone(text: str) -> None:
    assert text_fault(text, is_prose=True) is not None
    assert text_fault(text) is None


def test_text_fault_a_program_passes_as_prose() -> None:
    assert text_fault(inspect.getsource(degenerate), is_prose=True) is None
    assert text_fault("In Zürich and São Paulo, café life went on. " + STORY, is_prose=True) is None


def test_text_fault_prose_of_the_same_sentences_in_another_order_is_found() -> None:
    sentences = [f"sentence {number} speaks of a small thing in the far old town." for number in range(4)]
    text = " ".join(sentences[(number * number) % 4 if number % 3 else number % 4] for number in range(60))
    assert text_fault(text, is_prose=True) is not None


def test_text_fault_thinking_that_repeats_the_question_passes() -> None:
    question = " ".join(f"item{number}" for number in range(60))
    text = f"the list is {question}. let me check: {question}. so i write: {question}"
    assert text_fault(text) is None


def test_token_fault_none_without_tokens() -> None:
    assert token_fault(None, 0) is None
    assert token_fault(("a", "b") * 50, 0) is None


@given(st.text())
def test_text_fault_any_text_raises_nothing(text: str) -> None:
    text_fault(text, is_prose=True)


@given(st.one_of(st.text(), st.integers().map(str)))
def test_score_any_text_raises_nothing(text: str) -> None:
    for want in (Number(3), Code("1234"), Says("x"), Words(("a",)), Prose(), WEATHER):
        score(want, says(text))
        score(want, called(("get_weather", text)))


@pytest.mark.parametrize(
    ("wanted", "seen", "same"),
    [
        (5, 5.0, True),
        (True, 1, False),
        (1, True, False),
        (False, False, True),
        ("5", 5, False),
        (" a ", "a", True),
        ([1, {"a": "b"}], [1, {"a": "b"}], True),
        ([1, 2], [2, 1], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, 0, False),
        (2446.75, 2446.75, True),
    ],
)
def test_is_same_by_json_type(wanted: object, seen: object, same: bool) -> None:
    assert is_same(wanted, seen) is same


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"choices": []}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"content": 5}}]}',
        b'{"choices": [{"message": {"content": [{"type": "text"}]}}]}',
        b'{"choices": [{"message": {"tool_calls": [{"function": {}}]}}]}',
        b'{"choices": [{"message": {"tool_calls": 7}}]}',
        b"\xff\xfe\x00",
    ],
)
def test_read_answer_of_another_form_is_a_failure(body: bytes) -> None:
    seen = read_answer(body)
    assert isinstance(seen, Failure)
    assert seen.reason == "bad answer"


def test_read_answer_takes_what_servers_differ_in() -> None:
    message = {
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
    }
    seen = read_answer(json.dumps({"choices": [{"message": message}], "usage": {"prompt_tokens": 10**400}}).encode())
    assert isinstance(seen, Answer)
    assert (seen.reasoning, seen.calls, seen.prompt_tokens) == ("hm", (RawCall("f", '{"a": 1}'),), None)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "null", "-9999.0", '"x"', "true"])
def test_read_answer_counts_tokens_without_a_probability(value: str) -> None:
    entry = '{"token": "a", "logprob": %s}'
    listed = f'{{"content": [{entry % "-0.5"}, {entry % value}]}}'
    body = f'{{"choices": [{{"message": {{"content": "a a"}}, "logprobs": {listed}}}]}}'
    seen = read_answer(body.encode())
    assert isinstance(seen, Answer)
    assert seen.impossible == 1
    assert seen.tokens == ("a", "a")


def test_read_answer_half_characters_can_be_written_to_a_file() -> None:
    seen = read_answer(b'{"choices": [{"message": {"content": "a\\ud800b"}}]}')
    assert isinstance(seen, Answer)
    seen.content.encode()
