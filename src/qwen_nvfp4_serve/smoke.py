"""Does a running server answer as an OpenAI endpoint should? Small checks, right requests and wrong ones.

A reference model is asked what it answers exactly; any other model, what every capable model answers.
"""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.reference import (
    LEAST_TOKENS,
    Given,
    KnownAnswer,
    given,
    joined,
    one_of_each,
    read_answers,
    ready_answer,
    served_folder,
)

if TYPE_CHECKING:
    import openai

REQUEST_TIMEOUT_S = 120.0
AT_ONCE = 16
# What a list of models that is none raises while it is read.
ODD_JSON = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)
CAPITAL, PARIS = "What is the capital of France? Answer with one word.", "paris"
COUNTING, NEXT = "1, 2, 3,", "4"
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@functools.cache
def _tls() -> ssl.SSLContext:
    """The certificates, read once: each question has a client of its own, and reading takes longer than asking."""
    return httpx.create_ssl_context()


@dataclass(frozen=True, slots=True)
class Check:
    """One question to the server: whether it went as it should, what came back, and how long it took."""

    name: str
    ok: bool
    seen: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Server:
    """The endpoint under test. base_url ends in /v1; `model` is the id the server itself names first.

    known: what the model is known to answer, none unless it is a reference model.
    """

    base_url: str
    api_key: str | None
    model: str
    max_model_len: int
    known: tuple[KnownAnswer, ...] = ()

    def client(self) -> openai.OpenAI:
        """An openai client that does not retry: a failure is to be seen."""
        import openai  # takes longer to load than all else, and most who measure a server need none

        return openai.OpenAI(
            base_url=self.base_url,
            api_key=self.api_key or "none",
            max_retries=0,
            timeout=REQUEST_TIMEOUT_S,
            http_client=openai.DefaultHttpxClient(verify=_tls()),
        )

    def post(self, path: str, content: str) -> httpx.Response:
        """A raw POST, for requests that a client library would not send."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key or 'none'}"}
        return httpx.post(
            f"{self.base_url}{path}",
            content=content,
            headers=headers,
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
            verify=_tls(),
        )


def connect(base_url: str, api_key: str | None, model: str | None = None, *, answers: Path | None = None) -> Server:
    """The server at `base_url` (with or without /v1). model: which of its models, None for the first. answers: folder
    of the known answers, by default those of our own model that the server says it loaded.

    Raises QwenNvfp4Error when nothing there lists a model, UsageError when `model` is not among those listed.
    """
    url = base_url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    if api_key and not all("!" <= char <= "~" for char in api_key):  # httpx would print the key to say so
        raise UsageError(
            "VLLM_API_KEY or --api-key",
            seen="other characters",
            expected="printable ASCII without spaces, as HTTP headers carry it",
        )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/models", headers=headers, timeout=10.0, trust_env=False)
        answer.raise_for_status()
        rows = answer.json()["data"]
        row = next((row for row in rows if model in (None, row["id"])), None)
        if row is None:
            listed = ", ".join(str(row["id"]) for row in rows) or "no model"
            what = "no model to ask" if model is None else f"--model {model}"
            raise UsageError(what, seen=f"{url} serves {listed}", expected="one of those" if rows else "a model")
        length = max(0, int(row.get("max_model_len") or 0))
        return Server(url, api_key, str(row["id"]), length, _known(row.get("root"), length, answers))
    except httpx.HTTPStatusError as error:
        hint = (
            "Set VLLM_API_KEY to the server's key." if error.response.status_code == httpx.codes.UNAUTHORIZED else None
        )
        raise QwenNvfp4Error(
            f"{url}/models", seen=f"HTTP {error.response.status_code}", expected="200", do=hint
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, *ODD_JSON) as error:
        raise QwenNvfp4Error(
            f"no OpenAI endpoint answers at {url} ({type(error).__name__}: {error})",
            do="Start one (scripts/serve, docker compose up -d), wait until it says READY, or give --base-url.",
        ) from None


def _known(root: str | None, max_model_len: int, answers: Path | None) -> tuple[KnownAnswer, ...]:
    folder = answers or served_folder(root)
    if folder is None or max_model_len < LEAST_TOKENS:
        return ()
    return one_of_each(read_answers(folder), max_model_len)


def run_checks(server: Server) -> tuple[Check, ...]:
    """Every check in order; a check that raises counts as failed, with its reason."""
    checks = CHECKS | (KNOWN_CHECKS if server.known else {})
    return tuple(_timed(name, check, server) for name, check in checks.items())


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
        model=server.model, messages=[{"role": "user", "content": CAPITAL}], max_tokens=16, temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    usage, text = answer.usage, answer.choices[0].message.content or ""
    _expect(usage is not None and 1 <= usage.completion_tokens <= 16, f"usage {usage}")
    _expect(answer.choices[0].finish_reason in ("stop", "length"), f"finish_reason {answer.choices[0].finish_reason}")
    _expect(PARIS in text.lower(), f"{text!r}, expected {PARIS}")
    return f"{text.strip()!r}, {usage.completion_tokens if usage else 0} tokens"


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
    answer = server.client().completions.create(model=server.model, prompt=COUNTING, max_tokens=8, temperature=0)
    text = answer.choices[0].text
    _expect(answer.usage is not None and answer.usage.completion_tokens >= 1, "no tokens")
    _expect(bool(server.known) or NEXT in text, f"{COUNTING!r} goes on with {text!r}, expected {NEXT}")
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


def ask(server: Server, known: KnownAnswer) -> Given:
    """What the server answers to a known question."""
    return given(_completed(server, known)["choices"][0]["message"])


def ask_streamed(server: Server, known: KnownAnswer) -> Given:
    """The same, streamed and put together."""
    body = known.body(server.model)
    extra = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
    chunks = server.client().chat.completions.create(**body, extra_body=extra, stream=True)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]
    return given(joined(deltas))


def _completed(server: Server, known: KnownAnswer) -> Mapping[str, Any]:
    body = known.body(server.model)
    extra = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
    answer: dict[str, Any] = server.client().chat.completions.create(**body, extra_body=extra).model_dump()
    return answer


def _exact(known: KnownAnswer, seen: Given) -> str:
    _expect(seen == known.expected, f"{known.id}: {seen.shown()}, expected {known.expected.shown()}")
    return f"{known.id}: {seen.shown()}"


def _known_answer(server: Server) -> str:
    known = ready_answer(server.known)
    _expect(known is not None, "no plain question fits into the context")
    return _exact(known, ask(server, known)) if known else ""


def _known_stream(server: Server) -> str:
    known = min((one for one in server.known if one.thinks and not one.tools), key=lambda one: one.chars)
    return _exact(known, ask_streamed(server, known))


def _known_call(server: Server) -> str:
    known = min((one for one in server.known if one.expected.calls), key=lambda one: one.chars)
    answer = _completed(server, known)["choices"][0]
    _expect(answer["finish_reason"] == "tool_calls", f"finish_reason {answer['finish_reason']}")
    return _exact(known, given(answer["message"]))


def _known_at_once(server: Server) -> str:
    def wrong(known: KnownAnswer) -> str | None:
        try:
            _exact(known, ask(server, known))
        except Exception as error:
            return f"{error}"
        return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        faults = [fault for fault in pool.map(wrong, server.known) if fault]
    _expect(not faults, f"{len(faults)} of {len(server.known)} wrong, the first: {'; '.join(faults[:1])}")
    return f"all {len(server.known)} right"


KNOWN_CHECKS: dict[str, Callable[[Server], str]] = {
    "chat": _known_answer,
    "streaming with thinking": _known_stream,
    "tool request": _known_call,
    "known answers at once": _known_at_once,
}
