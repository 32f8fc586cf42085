"""Recorded conversations, replayed without a server: template, reader and clients give what was recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.e2e.agent_tools import jobs

from qwen_nvfp4_patches.qwen3_cursor import Kind
from qwen_nvfp4_patches.qwen3_markup import Reader
from qwen_nvfp4_serve.chat_template import TEMPLATE_PATH, render

FOLDER = Path(__file__).parent / "data" / "transcripts"
REFERENCE = (TEMPLATE_PATH.parent / "reference" / "chat_template.jinja").read_text()
TRANSCRIPTS: dict[str, list[dict[str, Any]]] = {
    path.stem: json.loads(path.read_text())["exchanges"] for path in sorted(FOLDER.glob("*.json"))
}
CHATS = [
    pytest.param(exchange, id=f"{name}-{number}")
    for name, exchanges in TRANSCRIPTS.items()
    for number, exchange in enumerate(exchanges)
    if exchange["path"] == "/v1/chat/completions"
]
MESSAGES = [name for name in TRANSCRIPTS if name.startswith("messages-")]
JOB = jobs(1, seed=1)[0]


def as_rendered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as vLLM hands them to a template: arguments of calls as objects."""
    copied: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copied


@pytest.mark.parametrize("exchange", CHATS)
def test_template_renders_the_recorded_prompt(exchange: dict[str, Any]) -> None:
    asked = exchange["request"]
    kwargs = asked.get("chat_template_kwargs", {})
    shown = {"tools": asked.get("tools"), "template": REFERENCE, **kwargs}
    assert render(as_rendered(asked["messages"]), **shown) == exchange["prompt"]


def read(exchange: dict[str, Any], size: int) -> dict[str, Any]:
    """The message that a reader gives, fed `size` characters at a time."""
    asked = exchange["request"]
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in asked.get("tools", ())}
    shaped = "response_format" in asked
    reader = Reader(thinking=exchange["prompt"].endswith("<think>\n"), tools=tools or None, literal=shaped)
    output = exchange["output"]
    events = [event for at in range(0, len(output), size) for event in reader.feed(output[at : at + size])]
    texts = {Kind.REASONING: "", Kind.CONTENT: ""}
    calls: dict[int, list[str]] = {}
    for kind, text, index in [*events, *reader.finish()]:
        if kind is Kind.CALL:
            calls[index] = [text, ""]
        elif kind is Kind.ARGUMENTS:
            calls[index][1] += text
        else:
            texts[kind] += text
    return {
        "reasoning": texts[Kind.REASONING] or None,
        "content": texts[Kind.CONTENT] or None,
        "calls": list(calls.values()),
    }


@pytest.mark.parametrize("exchange", CHATS)
def test_reader_gives_the_recorded_message_at_every_chunking(exchange: dict[str, Any]) -> None:
    for size in (*range(1, 40), len(exchange["output"])):
        assert read(exchange, size) == exchange["message"], size


class Script:
    """A server that answers as recorded, in order, and notes what it was asked. library: whose client asks, httpx or
    its successor.
    """

    def __init__(self, exchanges: list[dict[str, Any]], library: Any = httpx) -> None:
        self._library = library
        self._left: Iterator[dict[str, Any]] = iter(exchanges)
        self.asked: list[Any] = []

    def answer(self, request: Any) -> Any:
        exchange = next(self._left)
        self.asked.append(json.loads(request.content))
        assert request.url.path == exchange["path"]
        if "answer" in exchange:
            return self._library.Response(200, json=exchange["answer"])
        named = exchange["path"] == "/v1/messages"
        lines = [
            f"event: {json.loads(line)['type']}\n" if named and line != "[DONE]" else "" for line in exchange["chunks"]
        ]
        body = "".join(f"{line}data: {chunk}\n\n" for line, chunk in zip(lines, exchange["chunks"], strict=True))
        return self._library.Response(200, text=body, headers={"content-type": "text/event-stream"})

    def http(self) -> Any:
        return self._library.Client(transport=self._library.MockTransport(self.answer))


@pytest.mark.parametrize("exchange", CHATS)
def test_openai_client_reads_the_recorded_message(exchange: dict[str, Any]) -> None:
    asked = dict(exchange["request"])
    extra = {"chat_template_kwargs": asked.pop("chat_template_kwargs", {})}
    stream = asked.pop("stream")
    with OpenAI(base_url="http://script/v1", api_key="none", http_client=Script([exchange]).http()) as client:
        if stream:
            asked["tools"] = [strict(tool) for tool in asked.get("tools", ())] or None
            with client.chat.completions.stream(**{k: v for k, v in asked.items() if v}, extra_body=extra) as events:
                message: Any = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked, extra_body=extra).choices[0].message
    wanted = exchange["message"]
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    assert (message.content or None, calls) == (wanted["content"], wanted["calls"])
    assert (message.model_dump().get("reasoning") or None) == wanted["reasoning"]


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as OpenAI's streaming helper insists on it."""
    function = tool["function"]
    return {
        **tool,
        "function": {
            **function,
            "strict": True,
            "parameters": {**function["parameters"], "additionalProperties": False},
        },
    }


@pytest.mark.parametrize("name", MESSAGES)
def test_anthropic_client_reads_the_call_and_then_the_answer(name: str) -> None:
    anthropic, library = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    exchanges = TRANSCRIPTS[name]
    said = []
    http = Script(exchanges, library).http()
    with anthropic.Anthropic(base_url="http://script", api_key="none", http_client=http) as client:
        for exchange in exchanges:
            asked = dict(exchange["request"])
            extra = {"temperature": asked.pop("temperature")}
            if asked.pop("stream"):
                with client.messages.stream(**asked, extra_body=extra) as events:
                    said.append(events.get_final_message())
            else:
                said.append(client.messages.create(**asked, extra_body=extra))
    kinds = [[block.type for block in message.content] for message in said]
    assert kinds == [["thinking", "tool_use"], ["thinking", "text"]]
    assert said[0].content[1].input == {"item": JOB.item, "city": JOB.city}
    assert said[1].content[1].text == f"the result is {JOB.price}."
    assert [message.stop_reason for message in said] == ["tool_use", "end_turn"]


@pytest.mark.parametrize("name", [name for name in TRANSCRIPTS if name.startswith("job-")])
def test_agent_framework_does_the_recorded_job_and_asks_what_was_asked(name: str) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    script, house = Script(TRANSCRIPTS[name]), JOB.house()
    http = httpx.AsyncClient(transport=httpx.MockTransport(script.answer))
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url="http://script/v1", api_key="none", http_client=http))
    agent = Agent(
        OpenAIChatModel("embedded", provider=provider),
        tools=[house.find_price, house.set_alarm, house.add_order],
        retries=0,
    )

    async def order(text: str, history: list[Any]) -> tuple[str, list[Any]]:
        if name.endswith("-whole"):
            whole = await agent.run(text, message_history=history)
            return str(whole.output), whole.all_messages()
        async with agent.run_stream(text, message_history=history) as running:
            said = "".join([piece async for piece in running.stream_text(delta=True)])
        return said, running.all_messages()

    async def work() -> tuple[str, str]:
        first, history = await order(JOB.first, [])
        return first, (await order(JOB.second, history))[0]

    assert asyncio.run(work()) == JOB.answers
    assert JOB.is_done(house)
    roles = [[message["role"] for message in asked["messages"]] for asked in script.asked]
    assert roles == [[message["role"] for message in exchange["request"]["messages"]] for exchange in TRANSCRIPTS[name]]


def test_transcripts_are_there() -> None:
    assert len(TRANSCRIPTS) == 8
    assert all(exchanges for exchanges in TRANSCRIPTS.values())
