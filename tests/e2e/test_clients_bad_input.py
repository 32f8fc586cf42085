"""Requests with fields of another type, size or shape, in every API: never a 5xx, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.e2e.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "description": "d", "strict": True}}
CHAT = {
    "model": "embedded",
    "messages": [USER, {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]}, USER],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tokens": 1,
}
MORE_CHAT = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "n", "stop", "stop_token_ids", "min_tokens", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "stream",
    "stream_options", "parallel_tool_calls", "reasoning_effort", "include_reasoning", "structured_outputs",
    "documents", "bad_words", "allowed_token_ids", "priority", "cache_salt", "user", "truncate_prompt_tokens",
    "thinking_token_budget", "add_generation_prompt", "continue_final_message", "chat_template", "echo", "request_id",
    "kv_transfer_params",
)  # fmt: skip
MESSAGES = {
    "model": "embedded",
    "max_tokens": 1,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "t"}]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "disabled"},
}
MORE_MESSAGES = ("temperature", "top_p", "top_k", "stop_sequences", "metadata", "stream", "output_config")
RESPONSES = {
    "model": "embedded",
    "max_output_tokens": 1,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "t"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "reasoning": {"effort": "none"},
}
MORE_RESPONSES = (
    "temperature", "top_p", "instructions", "previous_response_id", "include", "truncation", "metadata",
    "max_tool_calls", "parallel_tool_calls", "background", "store", "stream", "top_logprobs", "chat_template_kwargs",
    "structured_outputs",
)  # fmt: skip
VALUES: tuple[Any, ...] = (None, True, -1, 1e308, float("nan"), "x", [], [1], {}, {"a": {"b": [None]}})
SIZES = ("max_tokens", "max_output_tokens")  # without a bound the model would go on


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, from the outside in."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of `body` with `value` at `path`."""
    copied = json.loads(json.dumps(body))
    target = copied
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return copied


def mutants(body: dict[str, Any], more: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The body with each field in turn of each other type, and a name that says which."""
    plain = {key: value for key, value in body.items() if key not in ("tool_choice", "response_format")}
    for path in [*places(body), *((name,) for name in more)]:
        for value in VALUES:
            if path[0] in SIZES and (value is None or value is True):
                continue
            base = body if path[0] in body else plain
            yield f"{'.'.join(map(str, path))} = {value}", put(base, path, value)


ENDPOINTS = {
    "/v1/chat/completions": (CHAT, MORE_CHAT),
    "/v1/messages": (MESSAGES, MORE_MESSAGES),
    "/v1/responses": (RESPONSES, MORE_RESPONSES),
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_field_of_another_type_is_never_a_5xx_and_the_server_goes_on(
    embedded: Served, path: str, request: pytest.FixtureRequest
) -> None:
    """Each field with every value under --full, otherwise with a third of them."""
    body, more = ENDPOINTS[path]
    full = request.config.getoption("--full")
    wrong = []
    with httpx.Client(base_url=embedded.url.removesuffix("/v1"), timeout=120) as http:
        for number, (name, mutant) in enumerate(mutants(body, more)):
            if number % 3 and not full:
                continue
            answer = http.post(path, content=json.dumps(mutant), headers={"content-type": "application/json"})
            if answer.status_code >= 500 or (answer.status_code >= 400 and len(answer.text) < 20):
                wrong.append((name, answer.status_code, answer.text[:200]))
        assert not wrong
        assert http.post(path, json={**body, **TEXT.get(path, {})}).status_code == 200


TEXT: dict[str, dict[str, Any]] = {"/v1/responses": {"text": {"format": {"type": "text"}}}}
DEEP = "[" * 3_000 + "]" * 3_000
HUGE = "x" * 1_000_000
UNREADABLE = {
    "no JSON": '{"model":',
    "nothing": "",
    "null": "null",
    "a list": "[]",
    "a list of 100,000 levels": "[" * 100_000 + "]" * 100_000,
    "a number of 5,000 digits": '{"model": "embedded", "max_tokens": ' + "9" * 5_000 + "}",
    "a lone surrogate": '{"model": "embedded", "max_tokens": 1, "input": "\\ud800", "messages": '
    '[{"role": "user", "content": "\\ud800"}]}',
    "a megabyte": json.dumps(
        {"model": "embedded", "max_tokens": 1, "input": HUGE, "messages": [{"role": "user", "content": HUGE}]}
    ),
    "a tool that nests": '{"model": "embedded", "max_tokens": 1, "input": "a", "messages": '
    f'[{{"role": "user", "content": "a"}}], "tools": [{{"type": "function", "name": "f", "parameters": {DEEP}}}]}}',
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_unreadable_body_is_a_4xx_with_a_sentence(embedded: Served, path: str, name: str) -> None:
    url = embedded.url.removesuffix("/v1") + path
    answer = httpx.post(url, content=UNREADABLE[name], headers={"content-type": "application/json"}, timeout=120)
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.text) > 20


TEMPLATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}),  # the Responses API has no such field, and ignores it
    *(
        (path, {"chat_template_kwargs": kwargs})
        for path in ("/v1/chat/completions", "/v1/responses")
        for kwargs in ({"chat_template": "{{ 1 }}"}, {"messages": []}, {"conversation": []})
    ),
)


@pytest.mark.parametrize(("path", "wanted"), TEMPLATES)
def test_request_that_brings_a_template_is_refused(embedded: Served, path: str, wanted: dict[str, Any]) -> None:
    plain = {"model": "embedded", "max_tokens": 1, "max_output_tokens": 1, "messages": [USER], "input": "a"}
    answer = httpx.post(embedded.url.removesuffix("/v1") + path, json=plain | wanted, timeout=120)
    assert 400 <= answer.status_code < 500, answer.text
