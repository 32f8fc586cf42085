"""An agent framework runs a job of several steps against the CPU server, and the job ends right every time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.e2e.agent_tools import House, Job, jobs
from tests.e2e.serving import Served

pydantic_ai = pytest.importorskip("pydantic_ai")

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
JOBS = jobs(20, seed=1)


def agent_for(server: Served, house: House, *, thinking: bool, api: str) -> Any:
    """An agent with the house's tools. api: chat or responses."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=server.url, api_key="none")
    model = (OpenAIResponsesModel if api == "responses" else OpenAIChatModel)("embedded", provider=provider)
    body = {"chat_template_kwargs": {"enable_thinking": thinking}}
    settings = {"temperature": 0.0, "max_tokens": 400, "extra_body": body}
    tools = [house.find_price, house.set_alarm, house.add_order]
    return Agent(model, tools=tools, model_settings=settings, retries=0)


async def answer(agent: Any, order: str, history: list[Any], *, stream: bool) -> tuple[str, list[Any]]:
    """The last words after an order, and the conversation so far."""
    if not stream:
        whole = await agent.run(order, message_history=history)
        return str(whole.output), whole.all_messages()
    async with agent.run_stream(order, message_history=history) as running:
        pieces = [piece async for piece in running.stream_text(delta=True)]
    return "".join(pieces), running.all_messages()


async def do(server: Served, job: Job, *, thinking: bool, stream: bool, api: str = "chat") -> House:
    """The house after the job, one conversation of two orders."""
    house, history = job.house(), list[Any]()
    agent = agent_for(server, house, thinking=thinking, api=api)
    for order, wanted in zip((job.first, job.second), job.answers, strict=True):
        said, history = await answer(agent, order, history, stream=stream)
        assert said == wanted, (job, house)
    return house


@pytest.mark.parametrize("thinking", [True, False])
def test_agent_ends_every_job_right_streamed(embedded: Served, thinking: bool, request: Any) -> None:
    """Twenty of twenty at once under --full; otherwise four of them, for CI's time."""
    some = JOBS if request.config.getoption("--full") else JOBS[:4]

    async def work() -> list[House]:
        return await asyncio.gather(*(do(embedded, job, thinking=thinking, stream=True) for job in some))

    for job, house in zip(some, asyncio.run(work()), strict=True):
        assert job.is_done(house), (job, house)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("thinking", [True, False])
def test_agent_ends_a_job_right_whole_through_either_api(embedded: Served, api: str, thinking: bool) -> None:
    house = asyncio.run(do(embedded, JOBS[0], thinking=thinking, stream=False, api=api))
    assert JOBS[0].is_done(house)


def test_agent_with_tools_gets_the_typed_answer_that_it_asks_for(embedded: Served) -> None:
    from pydantic import BaseModel
    from pydantic_ai import NativeOutput

    class Pet(BaseModel):
        pet: str
        age: int

    house = JOBS[0].house()
    agent = agent_for(embedded, house, thinking=False, api="chat")
    output = agent.run_sync("ok, write json for pet corn, age 335. keys pet, age", output_type=NativeOutput(Pet)).output
    assert output == Pet(pet="corn", age=335)
    assert house == JOBS[0].house()
