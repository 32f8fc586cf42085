"""Structured outputs of a real server: the content obeys, reasoning stays apart, streamed and whole, with tools too."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest
from tests.e2e.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
KEYS = {"pet": {"type": "string"}, "age": {"type": "integer"}, "urgent": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False}
NAMED = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
ASKED = [{"role": "user", "content": "ok, write json for urgent true, age 335, pet corn. keys pet, age, urgent"}]
PET = {"pet": "corn", "age": 335, "urgent": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "set_file",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "size": {"type": "integer"}},
            "required": ["city", "size"],
        },
    },
}
ORDER = [{"role": "user", "content": "please set the file using size 659, city berlin"}]
CALL = ("set_file", {"city": "berlin", "size": 659})
PLACES = ["<think>no</think>", "b<tool_call>", "</think>"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client has in the end."""

    finish_reason: str
    reasoning: str
    content: str | None
    calls: tuple[tuple[str, Any], ...]


@pytest.fixture
def server(embedded: Served) -> Served:
    return embedded


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": "embedded", "temperature": 0} | body, timeout=120)


def added_up(text: str) -> Answer:
    """The answer of a stream."""
    reasoning, content, finish = "", "", ""
    calls: dict[int, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        choice = json.loads(line[6:])["choices"][0]
        delta = choice["delta"]
        reasoning += delta.get("reasoning") or ""
        content += delta.get("content") or ""
        finish = choice["finish_reason"] or finish
        for part in delta.get("tool_calls") or ():
            named = calls.setdefault(part["index"], ["", ""])
            named[0] += part["function"].get("name") or ""
            named[1] += part["function"].get("arguments") or ""
    return Answer(finish, reasoning, content or None, tuple((name, json.loads(text)) for name, text in calls.values()))


def chat(server: Served, *, stream: bool, thinking: bool, **body: Any) -> Answer:
    fields = {"messages": ASKED, "max_tokens": 200, "chat_template_kwargs": {"enable_thinking": thinking}} | body
    response = post(server, "/chat/completions", stream=stream, **fields)
    assert response.status_code == 200, response.text
    if stream:
        return added_up(response.text)
    choice = response.json()["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Answer(
        choice["finish_reason"],
        message.get("reasoning") or "",
        message["content"],
        tuple((call["name"], json.loads(call["arguments"])) for call in calls),
    )


def valid_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def multiple_of_seven(text: str) -> bool:
    return bool(json.loads(text)["age"] % 7 == 0)


SEVEN = {
    "type": "object",
    "properties": {"age": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 700}},
    "required": ["age"],
    "additionalProperties": False,
}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "response_format json_schema": ({"response_format": NAMED}, lambda text: json.loads(text) == PET),
    "response_format json_object": (
        {"response_format": {"type": "json_object"}},
        lambda text: isinstance(json.loads(text), dict),
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, valid_json),
    "regex": (
        {"structured_outputs": {"regex": r"(red|blue) [0-9]{3}"}},
        lambda text: re.fullmatch(r"(red|blue) [0-9]{3}", text),
    ),
    "choice": ({"structured_outputs": {"choice": ["paris", "rome"]}}, lambda text: text in ("paris", "rome")),
    "choice of tags": ({"structured_outputs": {"choice": PLACES}}, lambda text: text in PLACES),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, lambda text: set(text) <= {"a", "b"}),
    "json for another backend": ({"structured_outputs": {"json": SEVEN}}, multiple_of_seven),
}


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_structured_output_obeys_and_reasoning_stays_apart(server: Served, kind: str, thinking: bool) -> None:
    asked, obeys = KINDS[kind]
    whole = chat(server, stream=False, thinking=thinking, **asked)
    assert chat(server, stream=True, thinking=thinking, **asked) == whole
    assert whole.content is not None
    assert obeys(whole.content), whole
    assert bool(whole.reasoning) is thinking
    assert (whole.finish_reason, whole.calls) == ("stop", ())


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "asked", [{"regex": "[0-9]{2}"}, {"choice": ["42", "75", "56", "77"]}, {"json": {"type": "integer"}}]
)
def test_structured_output_gives_the_answer_that_is_given_without_it(
    server: Served, asked: dict[str, Any], stream: bool, thinking: bool
) -> None:
    for question, right in (("What is 17 + 25?", "42"), ("What is 31 + 44?", "75")):
        said = {"messages": [{"role": "user", "content": question}], "structured_outputs": asked}
        answer = chat(server, stream=stream, thinking=thinking, **said)
        assert (answer.content, answer.finish_reason) == (right, "stop"), answer


@pytest.mark.parametrize("stream", [True, False])
def test_structured_output_without_its_reasoning_is_the_same_content(server: Served, stream: bool) -> None:
    shown = chat(server, stream=stream, thinking=True, response_format=NAMED)
    hidden = chat(server, stream=stream, thinking=True, response_format=NAMED, include_reasoning=False)
    assert (hidden.reasoning, hidden.content) == ("", shown.content)


@pytest.mark.parametrize("stream", [True, False])
def test_thinking_that_mentions_a_call_goes_on(server: Served, stream: bool) -> None:
    ids = httpx.post(
        server.url.removesuffix("/v1") + "/tokenize", json={"model": "embedded", "prompt": "<tool_call>"}, timeout=30
    ).json()["tokens"]
    said = chat(
        server, stream=stream, thinking=True, max_tokens=3, response_format=NAMED, logit_bias={str(ids[0]): 100}
    )
    assert said == Answer("length", "<tool_call>" * 3, None, ())


def test_plain_completion_is_constrained_from_its_first_token(server: Served) -> None:
    asked = {"structured_outputs": {"choice": ["paris", "rome"]}, "max_tokens": 20}
    text = post(server, "/completions", prompt="hello", **asked).json()["choices"][0]["text"]
    assert text in ("paris", "rome")


FORCED = {"type": "function", "function": {"name": "set_file"}}


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", FORCED])
@pytest.mark.parametrize("shaped", [{}, {"response_format": NAMED}], ids=["", "response_format"])
def test_tools_are_called_streamed_and_whole_beside_a_response_format_too(
    server: Served, thinking: bool, single: bool, choice: Any, shaped: dict[str, Any]
) -> None:
    asked = {"messages": ORDER, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": not single} | shaped
    whole = chat(server, stream=False, thinking=thinking, **asked)
    assert chat(server, stream=True, thinking=thinking, **asked) == whole
    assert (whole.calls, whole.content) == ((CALL,), None)
    assert bool(whole.reasoning) is thinking
    assert whole.finish_reason == ("stop" if choice == FORCED else "tool_calls")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_answer_keeps_to_the_response_format_where_tools_are_offered(server: Served, stream: bool, choice: str) -> None:
    said = chat(server, stream=stream, thinking=False, tools=[TOOL], tool_choice=choice, response_format=NAMED)
    assert said.calls == ()
    assert json.loads(said.content or "") == PET


def test_response_of_the_responses_api_obeys_and_keeps_reasoning_apart(server: Served) -> None:
    shape = {"format": {"type": "json_schema", "name": "pet", "schema": SCHEMA, "strict": True}}
    output = post(server, "/responses", input=ASKED[0]["content"], text=shape).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert json.loads(output[1]["content"][0]["text"]) == PET


def objects(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(count)}}


BAD: dict[str, dict[str, Any]] = {
    "regex": {"regex": "("},
    "regex with a backreference": {"regex": r"(a)\1"},
    "regex with an empty range": {"regex": "a{5,1}"},
    "grammar": {"grammar": "root ::= ("},
    "grammar of a megabyte": {"grammar": "root ::= " + '"a" ' * 250_000},
    "grammar without rules": {"grammar": " "},
    "schema of no type": {"json": {"type": "banana"}},
    "schema whose reference is not there": {"json": {"$ref": "#/$defs/none"}},
    "schema with a bad pattern": {"json": {"type": "string", "pattern": "("}},
    "schema that no backend takes": {
        "json": {"type": "object", "properties": {"a": {}}, "patternProperties": {"(": {}}}
    },
    "schema of 2,000 properties": {"json": objects(2_000)},
    "schema that is no JSON": {"json": "{"},
    "schema of 500 levels": {"json": '{"properties":' * 500 + "{}" + "}" * 500},
    "10,000 choices": {"choice": [f"choice {index}" for index in range(10_000)]},
    "no choice": {"choice": []},
    "choice of a number": {"choice": [1]},
    "two kinds": {"regex": "a", "choice": ["b"]},
    "no kind": {},
    "unknown structural tag": {"structural_tag": '{"type": "structural_tag", "format": {"type": "banana"}}'},
}


@pytest.mark.parametrize("name", BAD)
def test_structured_output_that_cannot_be_is_a_4xx_with_a_sentence(server: Served, name: str) -> None:
    answer = post(server, "/chat/completions", messages=ASKED, max_tokens=5, structured_outputs=BAD[name])
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.json()["error"]["message"]) > 10


def test_schema_with_a_keyword_that_no_backend_enforces_is_a_400_that_names_it(server: Served) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    answer = post(server, "/chat/completions", messages=ASKED, max_tokens=5, structured_outputs={"json": schema})
    assert answer.status_code == 400
    assert "The JSON schema uses uniqueItems, which neither" in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", ["text", 5, [1], True])
def test_structured_output_of_another_type_is_a_4xx(server: Served, value: object) -> None:
    for path, body in (("/chat/completions", {"messages": ASKED}), ("/completions", {"prompt": "a"})):
        answer = post(server, path, max_tokens=5, structured_outputs=value, **body)
        assert 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("((a{1,99}){1,99}){1,99}", "(a|b)*a(a|b){40}")),
    ],
)
def test_pattern_that_ruins_matchers_is_answered_or_refused(server: Served, pattern: str) -> None:
    answer = post(server, "/chat/completions", messages=ASKED, max_tokens=5, structured_outputs={"regex": pattern})
    assert answer.status_code in (200, 400)
    assert chat(server, stream=False, thinking=False, response_format=NAMED).content == json.dumps(PET)
