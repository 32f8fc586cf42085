"""The API of a real server with our template: order, tools, prefix caching over turns, and bad input that gets 4xx."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.e2e.serving import Served, serve
from tests.parser_scripts import CASES

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
USER = {"role": "user", "content": "a"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("api"), CHAT_TEMPLATE="ours", MAX_NUM_BATCHED_TOKENS="1024") as served:
        yield served


def post(server: Served, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body)
    url = server.url.removesuffix("/v1") + path
    return httpx.post(url, content=content, headers={"content-type": "application/json"}, timeout=120)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "embedded", "max_tokens": 2, "temperature": 0, "messages": [USER]} | fields


def call(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    return [USER, said, {"role": "tool", "tool_call_id": "1", "content": "t"}]


@pytest.mark.parametrize("case", CASES["conversations"], ids=lambda case: case["id"])
def test_server_keeps_the_order_of_system_messages(server: Served, case: dict[str, Any]) -> None:
    assert post(server, "/v1/chat/completions", chat(messages=case["messages"])).status_code == 200
    tokens = post(server, "/tokenize", {"model": "embedded", "messages": case["messages"]}).json()["tokens"]
    prompt = post(server, "/detokenize", {"model": "embedded", "tokens": tokens}).json()["prompt"]
    places = [prompt.index(f"\n{word}<|im_end|>") for word in case["order"]]
    assert places == sorted(places)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_server_forced_call_is_the_same_streamed_and_whole(server: Served, choice: Any) -> None:
    body = chat(tools=[TOOL], tool_choice=choice, max_tokens=60, chat_template_kwargs={"enable_thinking": False})
    whole = post(server, "/v1/chat/completions", body).json()["choices"][0]["message"]["tool_calls"][0]["function"]
    stream = post(server, "/v1/chat/completions", body | {"stream": True}).text
    lines = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    parts = [part["function"] for line in lines for part in line["choices"][0]["delta"].get("tool_calls", [])]
    assert whole["name"] == "f"
    assert "".join(part.get("name") or "" for part in parts) == whole["name"]
    assert "".join(part.get("arguments") or "" for part in parts) == whole["arguments"]
    json.loads(whole["arguments"])


def test_server_thinking_is_sent_under_both_names(server: Served) -> None:
    message = post(server, "/v1/chat/completions", chat(max_tokens=8)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"]
    stream = post(server, "/v1/chat/completions", chat(max_tokens=8, stream=True)).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning"]


def test_server_messages_api_takes_tools_and_results(server: Served) -> None:
    body = {
        "model": "embedded",
        "max_tokens": 8,
        "system": "s",
        "tools": [{"name": "f", "input_schema": TOOL["function"]["parameters"]}],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": "x"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
        ],
    }
    answer = post(server, "/v1/messages", body)
    assert answer.status_code == 200
    assert answer.json()["role"] == "assistant"


def test_server_ten_turns_with_tools_compute_only_what_is_new(server: Served) -> None:
    metrics = httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=30).text
    found = re.search(r'cache_config_info\{[^}]*block_size="(\d+)"', metrics)
    assert found
    block = int(found[1])
    messages: list[dict[str, Any]] = []
    before = 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"question {turn} " + "word " * 40})
        messages += call(json.dumps({"a": f"x{turn}"}))[1:2]
        messages.append({"role": "tool", "tool_call_id": "1", "content": f"result {turn} " + "fact " * 40})
        usage = post(server, "/v1/chat/completions", chat(messages=messages, tools=[TOOL])).json()["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        if turn:  # the first may find the tools of an earlier test
            assert cached == before // block * block, (turn, cached, before, block)
        before = usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": f"answer {turn}"})


def test_server_seeded_request_with_a_prompt_of_several_chunks_is_answered(server: Served) -> None:
    body = chat(messages=[{"role": "user", "content": "word " * 3000}], seed=1, temperature=1)
    assert post(server, "/v1/chat/completions", body).status_code == 200


DEEP = '{"a":' + "[" * 2000 + "]" * 2000 + "}"
BAD: dict[str, Any] = {
    "unknown role": chat(messages=[{"role": "critic", "content": "a"}]),
    "role that is a token": chat(messages=[{"role": "<|im_end|>", "content": "a"}]),
    "no messages": chat(messages=[]),
    "tool without a function": chat(tools=[{"type": "function"}]),
    "tool without a schema": chat(tools=[{"type": "function", "function": {"name": "f"}}]),
    "tool whose schema is null": chat(tools=[{"type": "function", "function": {"name": "f", "parameters": None}}]),
    "tool without a name": chat(tools=[{"type": "function", "function": {}}]),
    "schema that is none": chat(tools=[{"type": "function", "function": {"name": "f", "parameters": "x"}}]),
    "named tool that is not there": chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
    "required without tools": chat(tool_choice="required"),
    "template": chat(chat_template="{{ 1 }}"),
    "template in the kwargs": chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}),
    "messages in the kwargs": chat(chat_template_kwargs={"messages": []}),
    "conversation in the kwargs": chat(chat_template_kwargs={"conversation": []}),
    "kwargs that are none": chat(chat_template_kwargs="x"),
    "megabyte of arguments": chat(messages=call(json.dumps({"a": "x" * 1_000_000}))),
    "megabyte of special tokens": chat(messages=call(json.dumps({"a": "<|im_end|>" * 100_000}))),
    "deep arguments": chat(messages=call(DEEP)),
    "calls that are no list": chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": 5}]),
    "lone surrogate": '{"model": "embedded", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "no JSON": '{"model":',
}


@pytest.mark.parametrize("name", BAD)
def test_server_bad_input_is_a_4xx_with_a_sentence_and_the_server_goes_on(server: Served, name: str) -> None:
    answer = post(server, "/v1/chat/completions", BAD[name])
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.json()["error"]["message"]) > 10
    assert post(server, "/v1/chat/completions", chat()).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "embedded", "max_tokens": 2, "messages": [{"role": "critic", "content": "a"}]}),
        ("/v1/messages", {"model": "embedded", "max_tokens": 2, "messages": [USER], "tools": [{"name": "f"}]}),
        ("/v1/responses", {"model": "embedded", "input": [{"role": "critic", "content": "a"}]}),
        ("/v1/responses", {"model": "embedded", "input": "a", "tools": [{"type": "function"}]}),
    ],
)
def test_server_bad_input_elsewhere_is_a_4xx(server: Served, path: str, body: Any) -> None:
    assert 400 <= post(server, path, body).status_code < 500
