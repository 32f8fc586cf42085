"""Requests to a server and the moments their bytes arrive. The clock is read on arrival, parsing waits for the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from qwen_nvfp4_serve.bench.prompts import Prompt
from qwen_nvfp4_serve.bench.samples import DETAIL_CHARS, Exchange, Failure, is_count
from qwen_nvfp4_serve.bench.workload import Endpoint, LatencyMode
from qwen_nvfp4_serve.errors import QwenNvfp4Error

PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}
LATENCY_TRIES = 3  # as llama-benchy


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An open connection pool to one model. base_url ends in /v1."""

    http: httpx.AsyncClient
    base_url: str
    model: str
    endpoint: Endpoint
    temperature: float
    ignore_eos: bool
    timeout_s: float

    def body(self, prompt: Prompt, max_tokens: int, *, stream: bool) -> dict[str, Any]:
        """The JSON of one request."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": self.temperature}
        body |= {"messages": prompt.messages()} if self.endpoint == "chat" else {"prompt": prompt.text()}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if stream:
            # With continuous usage vLLM says in each event how many tokens it has sent; other servers ignore the word.
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return body


@asynccontextmanager
async def open_target(
    base_url: str, api_key: str | None, *, model: str, endpoint: Endpoint, streams: int, **options: Any
) -> AsyncIterator[Target]:
    """A target whose pool holds `streams` connections. options: temperature, ignore_eos, timeout_s."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    limits = httpx.Limits(max_connections=streams + 4, max_keepalive_connections=streams + 4)
    # Requests are bounded by `timeout_s` as a whole; httpx's own read timeout would cut a long prefill.
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=False) as http:
        yield Target(http=http, base_url=base_url, model=model, endpoint=endpoint, **options)


async def exchange(target: Target, prompt: Prompt, max_tokens: int) -> Exchange:
    """Streams one answer. Never raises for what a server does: a failure is part of what is measured."""
    content = json.dumps(target.body(prompt, max_tokens, stream=True)).encode()
    url = target.base_url + PATHS[target.endpoint]
    headers = {"Content-Type": "application/json"}
    lines: list[tuple[float, bytes]] = []
    failure: Failure | None = None
    rest = b""
    start_s = time.perf_counter()
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            target.http.stream("POST", url, content=content, headers=headers) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                said = (await answer.aread())[:DETAIL_CHARS].decode(errors="replace")
                failure = Failure("http", f"HTTP {answer.status_code}: {said}")
            else:
                async for piece in answer.aiter_raw():
                    now_s = time.perf_counter()
                    *whole, rest = (rest + piece).split(b"\n")
                    lines += [(now_s, line) for line in whole if line]
    except TimeoutError:
        failure = Failure("timeout", f"no whole answer within {target.timeout_s:g} s")
    except httpx.ConnectError as error:
        failure = Failure("connect", str(error)[:DETAIL_CHARS])
    except httpx.HTTPError as error:
        failure = Failure("dropped", (str(error) or type(error).__name__)[:DETAIL_CHARS])
    end_s = time.perf_counter()
    if rest:
        lines.append((end_s, rest))
    return Exchange(start_s=start_s, end_s=end_s, lines=tuple(lines), failure=failure)


async def count_by_tokenize(target: Target, prompt: Prompt) -> int | None:
    """Prompt tokens of a request according to the server's /tokenize; None when it has none."""
    asked: Mapping[str, Any] = (
        {"messages": prompt.messages()} if target.endpoint == "chat" else {"prompt": prompt.text()}
    )
    url = target.base_url.removesuffix("/v1") + "/tokenize"
    try:
        answer = await target.http.post(url, json={"model": target.model, **asked}, timeout=target.timeout_s)
        count = answer.json()["count"] if answer.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return count if is_count(count) else None


async def count_by_usage(target: Target, prompt: Prompt) -> int:
    """Prompt tokens of a request according to its own usage, by generating one token. Raises QwenNvfp4Error."""
    url = target.base_url + PATHS[target.endpoint]
    body = target.body(prompt, 1, stream=False)
    try:
        answer = await target.http.post(url, json=body, timeout=target.timeout_s)
    except httpx.HTTPError as error:
        raise QwenNvfp4Error(f"POST {url}", seen=str(error) or type(error).__name__, expected="an answer") from None
    if answer.status_code != httpx.codes.OK:
        hint = "If it does not know ignore_eos, add --no-ignore-eos." if target.ignore_eos else None
        seen = f"HTTP {answer.status_code}: {answer.text[:DETAIL_CHARS]}"
        raise QwenNvfp4Error(f"POST {url}", seen=seen, expected="200", do=hint)
    try:
        count = answer.json()["usage"]["prompt_tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        count = None
    if not is_count(count):
        raise QwenNvfp4Error(f"POST {url}", seen="no usage.prompt_tokens", expected="an OpenAI answer")
    return count


async def measure_latency(target: Target, mode: LatencyMode) -> float:
    """Mean seconds of a small request: a list of models (`api`), one token (`generation`), or 0 (`none`).

    Raises QwenNvfp4Error when the server does not answer it.
    """
    if mode == "none":
        return 0.0
    times_s: list[float] = []
    for _ in range(LATENCY_TRIES):
        start_s = time.perf_counter()
        if mode == "api":
            try:
                (await target.http.get(f"{target.base_url}/models", timeout=target.timeout_s)).raise_for_status()
            except httpx.HTTPError as error:
                raise QwenNvfp4Error(f"{target.base_url}/models", seen=str(error), expected="200") from None
            times_s.append(time.perf_counter() - start_s)
            continue
        seen = await exchange(target, Prompt(context="", prompt="hello"), 1)
        if seen.failure or not seen.lines:
            raise QwenNvfp4Error("the latency request failed", seen=seen.failure.detail if seen.failure else "nothing")
        times_s.append(seen.lines[0][0] - start_s)
    return sum(times_s) / len(times_s)
