"""One request as the client saw it: what came when, how many tokens, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from pydantic import ConfigDict

FailureKind = Literal["connect", "http", "error event", "dropped", "timeout", "bad event", "no usage"]
DETAIL_CHARS = 200
MOST_TOKENS = 2**53  # no answer has more, and rates are floats


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request does not count. detail: the server's words, cut short."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: FailureKind
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request's raw course: SSE lines with the moment their last byte arrived, all in seconds of one clock."""

    start_s: float
    end_s: float
    lines: tuple[tuple[float, bytes], ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Times in seconds after its batch began, None for what never happened.

    Token counts are the server's `usage`. first_tokens: tokens that arrived together at first_token_s, so that
    (completion_tokens - first_tokens) / (last_token_s - first_token_s) is the rate however they were bundled; None
    when no moment of a token is known. chunks: stream events that brought tokens. cached_tokens: None if not said.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    start_s: float
    end_s: float
    first_response_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    first_tokens: float | None = None
    chunks: int = 0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """`tokens` that arrived at `at_s`; a fraction where the server does not say how it bundles them."""

    at_s: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Event:
    """One stream event with a choice. so_far: completion tokens up to it, if the server says."""

    at_s: float
    so_far: int | None
    has_text: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A parsed exchange."""

    events: tuple[Event, ...]
    usage: Mapping[str, Any] | None
    failure: Failure | None


def read_exchange(exchange: Exchange, began_s: float) -> tuple[Sample, tuple[Arrival, ...]]:
    """The sample and when its tokens arrived (seconds after `began_s`); no arrivals for a failed request."""
    stream = parse(exchange)
    start_s, end_s = exchange.start_s - began_s, exchange.end_s - began_s
    first_response_s = stream.events[0].at_s - began_s if stream.events else None
    if stream.failure or stream.usage is None:
        failure = stream.failure or Failure("no usage", "the stream ended without a usage object")
        return Sample(start_s=start_s, end_s=end_s, first_response_s=first_response_s, failure=failure), ()
    tokens = int(stream.usage["completion_tokens"])
    found = tuple(Arrival(one.at_s - began_s, one.tokens) for one in arrivals(stream.events, tokens))
    details = stream.usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    sample = Sample(
        start_s=start_s,
        end_s=end_s,
        first_response_s=first_response_s,
        first_token_s=found[0].at_s if found else None,
        last_token_s=found[-1].at_s if found else None,
        prompt_tokens=int(stream.usage["prompt_tokens"]),
        cached_tokens=cached if isinstance(cached, int) else None,
        completion_tokens=tokens,
        first_tokens=found[0].tokens if found else None,
        chunks=len(found),
    )
    return sample, found


def arrivals(events: Sequence[Event], tokens: int) -> tuple[Arrival, ...]:
    """When the `tokens` of an answer arrived.

    Exact where every event carries a running count that never falls. Otherwise each event with text is given an equal
    share, which is right for a server that bundles evenly and off by at most one bundle for any other.
    """
    counts = [event.so_far for event in events if event.so_far is not None]
    if counts and len(counts) == len(events) and counts == sorted(counts) and counts[-1] <= tokens:
        found: list[Arrival] = []
        before = 0
        for event, so_far in zip(events, counts, strict=True):
            if so_far > before:
                found.append(Arrival(event.at_s, so_far - before))
                before = so_far
        if found and tokens > before:
            found[-1] = Arrival(found[-1].at_s, found[-1].tokens + tokens - before)
        if found:
            return tuple(found)
    texts = [event for event in events if event.has_text]
    return tuple(Arrival(event.at_s, tokens / len(texts)) for event in texts) if tokens else ()


def parse(exchange: Exchange) -> Stream:
    """Events, the last usage object and the first fault of an exchange."""
    events: list[Event] = []
    usage: Mapping[str, Any] | None = None
    done = False
    for at_s, line in exchange.lines:
        text = line.strip()
        if not text.startswith(b"data:"):
            continue
        text = text.removeprefix(b"data:").strip()
        if text == b"[DONE]":
            done = True
            continue
        chunk = _json_object(text)
        if chunk is None:
            failure = Failure("bad event", text[:DETAIL_CHARS].decode(errors="replace"))
            return Stream(events=tuple(events), usage=None, failure=failure)
        if chunk.get("error"):
            failure = Failure("error event", _message(chunk["error"]))
            return Stream(events=tuple(events), usage=None, failure=failure)
        seen = chunk.get("usage")
        usage = seen if _is_usage(seen) else usage
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices:
            so_far = int(seen["completion_tokens"]) if _is_usage(seen) else None
            events.append(Event(at_s, so_far, _has_text(choices[0])))
    failure_seen = exchange.failure
    if failure_seen is None and not done:
        failure_seen = Failure("dropped", f"the stream ended after {len(events)} events without [DONE]")
    return Stream(events=tuple(events), usage=usage, failure=failure_seen)


def _json_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_usage(value: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(value, dict):
        return False
    return all(is_count(value.get(name)) for name in ("prompt_tokens", "completion_tokens"))


def is_count(value: object) -> TypeGuard[int]:
    """True for a number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


def _has_text(choice: object) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    texts = (choice.get("text"), *(delta.get(name) for name in ("content", "reasoning_content", "reasoning")))
    return any(texts) or bool(delta.get("tool_calls"))


def _message(error: object) -> str:
    said = error.get("message", error) if isinstance(error, dict) else error
    return str(said)[:DETAIL_CHARS]
