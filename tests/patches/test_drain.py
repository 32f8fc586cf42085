"""The drain middleware around small stand-ins for vLLM's application, driven as an ASGI server drives it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from qwen_nvfp4_patches import drain
from qwen_nvfp4_serve import launch

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")],
}
PLAIN = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}


def chunk(text: str, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class Recorded:
    """A request to the middleware, and what came back."""

    def __init__(self, app: drain.DrainMiddleware, path: str = "/v1/completions", kind: str = "http") -> None:
        self.messages: list[dict[str, Any]] = []
        self.task = asyncio.ensure_future(app({"type": kind, "path": path}, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(self, message: Any) -> None:
        self.messages.append(dict(message))

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the middleware sends to itself at the end, instead of ending the test run."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(drain.os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def run(scenario: Callable[[], Awaitable[None]], seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(drain.DRAIN_VARIABLE, seconds)
    asyncio.run(asyncio.wait_for(scenario(), timeout=10))


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """A stream that never ends by itself."""
    await send(START)
    while True:
        await send(chunk("data: {}\n\n"))
        await asyncio.sleep(0.01)


async def short(scope: Any, receive: Any, send: Any) -> None:
    """A stream of a third of a second."""
    await send(START)
    for _ in range(10):
        await send(chunk("data: {}\n\n"))
        await asyncio.sleep(0.03)
    await send(chunk("data: [DONE]\n\n", more=False))


async def silent(scope: Any, receive: Any, send: Any) -> None:
    """A request that has not answered yet."""
    await asyncio.sleep(3600)


async def half(scope: Any, receive: Any, send: Any) -> None:
    """A plain answer cut in the middle."""
    await send(PLAIN)
    await send(chunk('{"text": "'))
    await asyncio.sleep(3600)


async def quick(scope: Any, receive: Any, send: Any) -> None:
    """An answer at once."""
    await send(PLAIN)
    await send(chunk("{}", more=False))


async def ended(signals: list[tuple[int, int]]) -> None:
    while not signals:
        await asyncio.sleep(0.01)
    assert signals == [(os.getpid(), signal.SIGTERM)]


def test_names_in_launcher_and_middleware_agree() -> None:
    assert launch.DRAIN_VARIABLE == drain.DRAIN_VARIABLE
    module, _, name = launch.DRAIN_MIDDLEWARE.rpartition(".")
    assert module == drain.__name__
    assert getattr(drain, name) is drain.DrainMiddleware


def test_before_the_signal_everything_passes_unchanged(signals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        request = Recorded(drain.DrainMiddleware(short))
        await request.task
        assert request.body.endswith("data: [DONE]\n\n")
        assert request.messages[0] == START

    run(scenario, "0", monkeypatch)
    assert signals == []


def test_stream_that_fits_finishes_and_then_the_process_is_told_to_end(
    signals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        app = drain.DrainMiddleware(short)
        request = Recorded(app)
        await asyncio.sleep(0.05)
        app.begin()
        app.begin()
        await ended(signals)
        assert request.body == "data: {}\n\n" * 10 + "data: [DONE]\n\n"

    run(scenario, "5", monkeypatch)


def test_stream_that_does_not_fit_ends_with_an_error_and_done(signals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        app = drain.DrainMiddleware(endless)
        request = Recorded(app)
        await asyncio.sleep(0.05)
        app.begin()
        await ended(signals)
        await request.task
        events = request.body.removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 503
        assert request.messages[-1]["more_body"] is False

    run(scenario, "0.2", monkeypatch)


def test_request_without_an_answer_yet_gets_503(signals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        app = drain.DrainMiddleware(silent)
        request = Recorded(app)
        await asyncio.sleep(0.05)
        app.begin()
        await ended(signals)
        assert request.status == 503

    run(scenario, "0.1", monkeypatch)


def test_plain_answer_cut_in_the_middle_is_closed(signals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        app = drain.DrainMiddleware(half)
        request = Recorded(app)
        await asyncio.sleep(0.05)
        app.begin()
        await ended(signals)
        assert request.body == '{"text": "'
        assert request.messages[-1]["more_body"] is False

    run(scenario, "0.1", monkeypatch)


def test_new_request_while_draining_gets_503_and_metrics_still_answer(
    signals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        app = drain.DrainMiddleware(endless)
        Recorded(app)
        await asyncio.sleep(0.05)
        app.begin()
        late, health = Recorded(app), Recorded(app, "/health")
        await asyncio.gather(late.task, health.task)
        assert (late.status, health.status) == (503, 503)
        assert (b"connection", b"close") in late.messages[0]["headers"]
        assert json.loads(late.body)["error"]["message"]
        app._app = quick
        metrics = Recorded(app, "/metrics")
        await metrics.task
        assert metrics.status == 200
        await ended(signals)

    run(scenario, "0.3", monkeypatch)


def test_client_that_hangs_does_not_hold_up_the_end(signals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        app = drain.DrainMiddleware(endless)

        async def stuck(message: Any) -> None:
            await asyncio.sleep(3600)

        task = asyncio.ensure_future(app({"type": "http", "path": "/v1/completions"}, stuck, stuck))
        await asyncio.sleep(0.05)
        app.begin()
        await ended(signals)
        task.cancel()

    monkeypatch.setattr(drain, "END_S", 0.2)
    run(scenario, "0.1", monkeypatch)


def test_cancellation_that_is_not_ours_goes_through(signals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        request = Recorded(drain.DrainMiddleware(endless))
        await asyncio.sleep(0.05)
        request.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request.task

    run(scenario, "0", monkeypatch)


def test_signal_reaches_the_middleware_once_the_application_started(
    signals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        real_kill = signal.raise_signal
        app = drain.DrainMiddleware(quick)
        await Recorded(app, kind="lifespan").task
        real_kill(drain.DRAIN_SIGNAL)
        await ended(signals)
        late = Recorded(app)
        await late.task
        assert late.status == 503

    run(scenario, "1", monkeypatch)
