"""The clients that people use, against a real server: OpenAI's chat and responses, Anthropic's messages, with tools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI
from pydantic import BaseModel
from tests.e2e.agent_tools import PARAMETERS, House, Job, jobs, run
from tests.e2e.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
JOB = jobs(1, seed=1)[0]
DRAFTS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}
    for name, parameters in ((name, {**kept, "additionalProperties": False}) for name, kept in PARAMETERS.items())
]
JSON_ORDER = "ok, write json for urgent true, age 335, pet corn. keys pet, age, urgent"


class Pet(BaseModel):
    """What `JSON_ORDER` describes."""

    pet: str
    age: int
    urgent: bool


PET = Pet(pet="corn", age=335, urgent=True)


@pytest.fixture
def client(embedded: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=embedded.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def anthropic(embedded: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=embedded.url.removesuffix("/v1"), api_key="none", max_retries=0) as made:
        yield made


def kwargs(thinking: bool) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": thinking}}


def said_in_chat(client: OpenAI, messages: list[Any], *, thinking: bool, stream: bool) -> Any:
    """The next message, whole or by the client's streaming helper."""
    asked: dict[str, Any] = {"model": "embedded", "messages": messages, "tools": DRAFTS, "temperature": 0}
    if not stream:
        return client.chat.completions.create(**asked, extra_body=kwargs(thinking)).choices[0].message
    with client.chat.completions.stream(**asked, extra_body=kwargs(thinking)) as events:
        done = [event.arguments for event in events if event.type == "tool_calls.function.arguments.done"]
        message = events.get_final_completion().choices[0].message
    assert done == [call.function.arguments for call in message.tool_calls or ()]
    return message


def chat_loop(client: OpenAI, house: House, messages: list[Any], order: str, *, thinking: bool, stream: bool) -> str:
    """The answer to `order`, after the calls it took; `messages` is the conversation, which goes on with them."""
    messages.append({"role": "user", "content": order})
    for _ in range(3):
        message = said_in_chat(client, messages, thinking=thinking, stream=stream)
        assert bool(message.model_dump().get("reasoning")) is thinking
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            content = run(house, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    raise AssertionError(messages)


def responses_loop(client: OpenAI, house: House, items: list[Any], order: str, *, thinking: bool, stream: bool) -> str:
    """The same through the Responses API, which takes its own output back as input."""
    items.append({"role": "user", "content": order})
    drafts = [{"type": "function", **draft["function"]} for draft in DRAFTS]
    for _ in range(3):
        asked: dict[str, Any] = {"model": "embedded", "input": items, "tools": drafts, "temperature": 0}
        asked["extra_body"] = kwargs(thinking)
        if stream:
            with client.responses.stream(**asked) as events:
                kinds = [event.type for event in events]
                response: Any = events.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
        else:
            response = client.responses.create(**asked)
        assert ("reasoning" in [item.type for item in response.output]) is thinking
        calls = [item for item in response.output if item.type == "function_call"]
        items += response.output
        if not calls:
            return str(response.output_text)
        for call in calls:
            result = run(house, call.name, call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise AssertionError(items)


def messages_loop(
    client: Anthropic, house: House, messages: list[Any], order: str, *, thinking: bool, stream: bool
) -> str:
    """The same through the Messages API."""
    messages.append({"role": "user", "content": order})
    drafts: list[Any] = [{"name": name, "input_schema": parameters} for name, parameters in PARAMETERS.items()]
    thinks: Any = {"type": "enabled", "budget_tokens": 1024} if thinking else {"type": "disabled"}
    for _ in range(3):
        asked: dict[str, Any] = {"model": "embedded", "max_tokens": 2000, "messages": messages, "tools": drafts}
        asked |= {"thinking": thinks, "extra_body": {"temperature": 0}}
        if stream:
            with client.messages.stream(**asked) as events:
                said: Any = events.get_final_message()
        else:
            said = client.messages.create(**asked)
        kinds = [block.type for block in said.content]
        assert ("thinking" in kinds) is thinking
        calls = [block for block in said.content if block.type == "tool_use"]
        assert said.stop_reason == ("tool_use" if calls else "end_turn")
        messages.append({"role": "assistant", "content": said.content})
        if not calls:
            return "".join(block.text for block in said.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": run(house, call.name, call.input)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    raise AssertionError(messages)


LOOPS = {"chat": chat_loop, "responses": responses_loop, "messages": messages_loop}


def do(loop: Any, client: Any, job: Job, **how: bool) -> House:
    house, conversation = job.house(), list[Any]()
    for order, wanted in zip((job.first, job.second), job.answers, strict=True):
        assert loop(client, house, conversation, order, **how) == wanted
    return house


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", LOOPS)
def test_client_runs_a_job_with_tools_through(
    client: OpenAI, anthropic: Anthropic, api: str, stream: bool, thinking: bool
) -> None:
    house = do(LOOPS[api], anthropic if api == "messages" else client, JOB, thinking=thinking, stream=stream)
    assert JOB.is_done(house)


@pytest.mark.parametrize("thinking", [True, False])
def test_openai_client_parses_a_typed_answer(client: OpenAI, thinking: bool) -> None:
    asked: dict[str, Any] = {"model": "embedded", "temperature": 0, "extra_body": kwargs(thinking)}
    ordered: Any = [{"role": "user", "content": JSON_ORDER}]
    whole = client.chat.completions.parse(messages=ordered, response_format=Pet, **asked)
    assert whole.choices[0].message.parsed == PET
    with client.chat.completions.stream(messages=ordered, response_format=Pet, **asked) as events:
        assert events.get_final_completion().choices[0].message.parsed == PET
    assert client.responses.parse(input=JSON_ORDER, text_format=Pet, **asked).output_parsed == PET


def test_openai_client_streams_usage_and_thinking_under_both_names(client: OpenAI) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "12 plus 30?"}], "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="embedded", temperature=0, stream=True, **asked))
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]
    thought = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "reasoning_content")]
    assert thought[0] == thought[1] != ""
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_anthropic_client_counts_tokens_as_the_answer_does(anthropic: Anthropic) -> None:
    asked: dict[str, Any] = {"model": "embedded", "messages": [{"role": "user", "content": JOB.find}]}
    counted = anthropic.messages.count_tokens(**asked).input_tokens
    usage = anthropic.messages.create(max_tokens=2, **asked).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(("choice", "calls"), [("any", 1), ("tool", 1), ("none", 0)])
def test_anthropic_client_forces_or_forbids_a_call(anthropic: Anthropic, choice: str, calls: int) -> None:
    asked: Any = {"type": choice} | ({"name": "find_price"} if choice == "tool" else {})
    said = anthropic.messages.create(
        model="embedded",
        max_tokens=200,
        messages=[{"role": "user", "content": JOB.find}],
        tools=[{"name": name, "input_schema": parameters} for name, parameters in PARAMETERS.items()],  # type: ignore[misc]
        tool_choice=asked,
        thinking={"type": "disabled"},
        extra_body={"temperature": 0},
    )
    assert sum(block.type == "tool_use" for block in said.content) == calls


@pytest.mark.parametrize("thinking", [True, False])
def test_ten_turns_with_what_the_model_said_compute_only_what_is_new(
    embedded: Served, client: OpenAI, thinking: bool
) -> None:
    metrics = httpx.get(embedded.url.removesuffix("/v1") + "/metrics", timeout=30).text
    found = re.search(r'cache_config_info\{[^}]*block_size="(\d+)"', metrics)
    assert found
    block = int(found[1])
    asked: dict[str, Any] = {"model": "embedded", "tools": DRAFTS, "temperature": 0, "max_tokens": 60}
    messages: list[Any] = [{"role": "system", "content": f"use the tools. {thinking}"}]
    before, longest = 0, 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"{JOB.find} {turn} " + "and so on " * 40})
        answer = client.chat.completions.create(messages=messages, extra_body=kwargs(thinking), **asked)
        usage, message = answer.usage, answer.choices[0].message
        assert usage is not None
        cached = (usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0) or 0
        assert cached in (before // block * block, longest // block * block), (turn, cached, before, longest, block)
        before, longest = usage.prompt_tokens, usage.prompt_tokens + usage.completion_tokens
        messages.append(message)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "ok " * 40} for call in message.tool_calls or ()
        ]
        messages += results
    assert before > 2 * block


def test_openai_client_gets_a_bad_request_as_its_own_error(client: OpenAI) -> None:
    ordered: Any = [{"role": "critic", "content": "a"}]
    with pytest.raises(BadRequestError, match="expected system, developer, user, assistant or tool"):
        client.chat.completions.create(model="embedded", messages=ordered, max_tokens=2)
