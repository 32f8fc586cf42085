"""Sends one question and returns what came back; never raises for what a server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from qwen_nvfp4_serve.bench.client import PATHS, Target
from qwen_nvfp4_serve.quality.answer import DETAIL_CHARS, Answer, Failure, read_answer
from qwen_nvfp4_serve.quality.task import Task, Thinking

MOST_BYTES = 64 * 1024**2  # a longer answer is not one


def body_of(task: Task, thinking: Thinking, *, max_tokens: int, logprobs: bool) -> dict[str, Any]:
    """The JSON of a greedy request, the model's name aside."""
    body: dict[str, Any] = {"messages": list(task.messages), "temperature": 0.0, "max_tokens": max_tokens}
    if task.tools:
        body |= {"tools": list(task.tools), "tool_choice": "auto"}
    if logprobs:
        body["logprobs"] = True
    return body | thinking_words(thinking)


def thinking_words(thinking: Thinking) -> dict[str, Any]:
    """What turns thinking on or off in the templates of this family; nothing for `default`."""
    return {} if thinking == "default" else {"chat_template_kwargs": {"enable_thinking": thinking == "on"}}


async def ask(target: Target, body: Mapping[str, Any]) -> Answer | Failure:
    """The whole answer to one request within the target's time."""
    try:
        async with asyncio.timeout(target.timeout_s):
            status, said = await _exchange(target, json.dumps({"model": target.model, **body}).encode())
    except TimeoutError:
        return Failure("timeout", f"no whole answer within {target.timeout_s:g} s")
    except (httpx.HTTPError, httpx.StreamError) as error:
        return _lost(error)
    if len(said) > MOST_BYTES:
        return Failure("bad answer", f"more than {MOST_BYTES} bytes", status)
    if status != httpx.codes.OK:
        return Failure("HTTP error", f"HTTP {status}: {_message(said)}", status)
    return read_answer(said)


async def _exchange(target: Target, content: bytes) -> tuple[int, bytes]:
    """Status and body; of a body that is too long only a part that is too long too."""
    said = bytearray()
    url, headers = target.base_url + PATHS["chat"], {"Content-Type": "application/json"}
    async with target.http.stream("POST", url, content=content, headers=headers) as reply:
        async for piece in reply.aiter_bytes():
            said += piece
            if len(said) > MOST_BYTES:
                break
        return reply.status_code, bytes(said)


def _lost(error: httpx.HTTPError | httpx.StreamError) -> Failure:
    detail = (str(error) or type(error).__name__)[:DETAIL_CHARS]
    if isinstance(error, httpx.DecodingError):
        return Failure("bad answer", detail)
    is_unreached = isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol)
    return Failure("no connection" if is_unreached else "dropped", detail)


def _message(said: bytes) -> str:
    """The error's own sentence where the body is one of OpenAI's, else its beginning."""
    try:
        value = json.loads(said)
        message = value["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = said.decode(errors="replace")
    return " ".join(str(message).split())[:DETAIL_CHARS].encode("utf-8", "replace").decode()
