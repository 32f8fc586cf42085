"""What came back for one question: an answer, or why there is none."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict

NoAnswer = Literal["HTTP error", "timeout", "no connection", "dropped", "bad answer"]
DETAIL_CHARS = 300
IMPOSSIBLE_LOGPROB = -9999.0  # vLLM writes this for minus infinity (entrypoints/openai, 0.32 and 0.33)
MOST_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer. status: of HTTP, None where no answer came. detail: the server's words, cut short."""

    reason: NoAnswer
    detail: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class RawCall:
    """A tool call as it arrived. arguments: the text that should be a JSON object."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A chat answer. Counts are the server's usage, None where it has none.

    tokens: texts of the answer's tokens, impossible: how many of them had no finite probability; None and 0 where
    probabilities were not asked for.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[RawCall, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: tuple[str, ...] | None = None
    impossible: int = 0


def read_answer(body: bytes) -> Answer | Failure:
    """The answer in the body of a 200. Never raises: a body of another form is a failure with its beginning."""
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        message = choice["message"]
        usage = reply.get("usage") or {}
        listed = choice.get("logprobs") or {}
        entries = listed.get("content") if isinstance(listed, dict) else None
        return Answer(
            content=_text(message.get("content")),
            reasoning=_text(message.get("reasoning") or message.get("reasoning_content")),
            calls=tuple(_call(call["function"]) for call in message.get("tool_calls") or ()),
            finish_reason=_text(choice.get("finish_reason")) or None,
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            tokens=tuple(_text(entry["token"]) for entry in entries) if entries else None,
            impossible=sum(not _is_possible(entry["logprob"]) for entry in entries or ()),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        said = body[:DETAIL_CHARS].decode(errors="replace")
        return Failure("bad answer", f"not a chat answer: {said}", 200)


def _call(function: dict[str, Any]) -> RawCall:
    arguments = function.get("arguments")
    return RawCall(_text(function["name"]), _text(arguments) if isinstance(arguments, str) else json.dumps(arguments))


def _text(value: object) -> str:
    """`value` if it is text, without halves of characters, which no file can hold; empty for None."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(value)
    return value.encode("utf-8", "replace").decode()


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_TOKENS else None


def _is_possible(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > IMPOSSIBLE_LOGPROB
