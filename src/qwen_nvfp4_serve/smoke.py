"""Does a running server answer as an OpenAI endpoint should? Nine small checks, right requests and wrong ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from qwen_nvfp4_serve.errors import QwenNvfp4Error

REQUEST_TIMEOUT_S = 120.0
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, slots=True)
class Check:
    """One question to the server: whether it went as it should, what came back, and how long it took."""

    name: str
    ok: bool
    seen: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Server:
    """The endpoint under test. base_url ends in /v1; `model` is the id the server itself names first."""

    base_url: str
    api_key: str | None
    model: str
    max_model_len: int

    def client(self) -> openai.OpenAI:
        """An openai client that does not retry: a failure is to be seen."""
        return openai.OpenAI(
            base_url=self.base_url, api_key=self.api_key or "none", max_retries=0, timeout=REQUEST_TIMEOUT_S
        )

    def post(self, path: str, content: str) -> httpx.Response:
        """A raw POST, for requests that a client library would not send."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key or 'none'}"}
        return httpx.post(
            f"{self.base_url}{path}", content=content, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False
        )


def connect(base_url: str, api_key: str | None) -> Server:
    """The server at `base_url` (with or without /v1). Raises QwenNvfp4Error when nothing there lists a model."""
    url = base_url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/models", headers=headers, timeout=10.0, trust_env=False)
        answer.raise_for_status()
        row = answer.json()["data"][0]
        return Server(url, api_key, str(row["id"]), int(row.get("max_model_len") or 0))
    except httpx.HTTPStatusError as error:
        hint = (
            "Set VLLM_API_KEY to the server's key." if error.response.status_code == httpx.codes.UNAUTHORIZED else None
        )
        raise QwenNvfp4Error(
            f"{url}/models", seen=f"HTTP {error.response.status_code}", expected="200", do=hint
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise QwenNvfp4Error(
            f"no OpenAI endpoint answers at {url} ({type(error).__name__}: {error})",
            do="Start one with scripts/serve, or give --base-url.",
        ) from None


def run_checks(server: Server) -> tuple[Check, ...]:
    """Every check in order; a check that raises counts as failed, with its reason."""
    return tuple(_timed(name, check, server) for name, check in CHECKS.items())


def _timed(name: str, check: Callable[[Server], str], server: Server) -> Check:
    began = time.monotonic()
    try:
        seen, ok = check(server), True
    except Exception as error:
        seen, ok = f"{type(error).__name__}: {error}"[:200], False
    return Check(name, ok, seen, round(time.monotonic() - began, 3))


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _health(server: Server) -> str:
    answer = httpx.get(server.base_url.removesuffix("/v1") + "/health", timeout=10.0, trust_env=False)
    _expect(answer.status_code == httpx.codes.OK, f"HTTP {answer.status_code}")
    return "HTTP 200"


def _models(server: Server) -> str:
    ids = [model.id for model in server.client().models.list().data]
    _expect(server.model in ids, f"{server.model} is not in {ids}")
    return ", ".join(ids)


def _chat(server: Server) -> str:
    answer = server.client().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=16, temperature=0
    )
    usage = answer.usage
    _expect(usage is not None and 1 <= usage.completion_tokens <= 16, f"usage {usage}")
    _expect(answer.choices[0].finish_reason in ("stop", "length"), f"finish_reason {answer.choices[0].finish_reason}")
    return f"{usage.completion_tokens if usage else 0} tokens, {answer.choices[0].finish_reason}"


def _stream(server: Server) -> str:
    chunks = list(
        server.client().chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "Count to five."}], max_tokens=16, temperature=0,
            stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    usage = chunks[-1].usage
    _expect(usage is not None and usage.completion_tokens >= 1, "no usage in the last chunk")
    _expect(any(c.choices and c.choices[0].finish_reason for c in chunks), "no finish_reason in any chunk")
    return f"{len(chunks)} chunks, {usage.completion_tokens if usage else 0} tokens"


def _completions(server: Server) -> str:
    answer = server.client().completions.create(model=server.model, prompt="1, 2, 3,", max_tokens=8, temperature=0)
    _expect(answer.usage is not None and answer.usage.completion_tokens >= 1, "no tokens")
    return f"{answer.usage.completion_tokens if answer.usage else 0} tokens"


def _tools(server: Server) -> str:
    answer = server.client().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER_TOOL], tool_choice="auto", max_tokens=64, temperature=0,
    )  # type: ignore[call-overload]  # fmt: skip
    choice = answer.choices[0]
    calls = [call.function.name for call in choice.message.tool_calls or []]
    _expect(choice.finish_reason in ("stop", "length", "tool_calls"), f"finish_reason {choice.finish_reason}")
    _expect(set(calls) <= {"get_weather"}, f"calls {calls}, which were not offered")
    return f"calls {calls}, {choice.finish_reason}"


def _wrong_model(server: Server) -> str:
    return _refused(
        server, "/chat/completions", '{"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}', 404
    )


def _broken_json(server: Server) -> str:
    return _refused(server, "/chat/completions", '{"model": ', 400)


def _too_long(server: Server) -> str:
    words = "word " * (server.max_model_len + 1)
    return _refused(server, "/completions", f'{{"model": "{server.model}", "prompt": "{words}", "max_tokens": 1}}', 400)


def _refused(server: Server, path: str, content: str, status: int) -> str:
    answer = server.post(path, content)
    _expect(answer.status_code == status, f"HTTP {answer.status_code}, expected {status}")
    message = answer.json().get("error", {}).get("message", "")
    _expect(bool(message), "no error message")
    return f"HTTP {status}: {message[:80]}"


CHECKS: dict[str, Callable[[Server], str]] = {
    "health": _health,
    "models": _models,
    "chat": _chat,
    "streaming with usage": _stream,
    "completions": _completions,
    "tool request": _tools,
    "wrong model is 404": _wrong_model,
    "broken JSON is 400": _broken_json,
    "over-long prompt is 400": _too_long,
}
