"""Stopping with requests open: new ones get 503, running ones finish, late ones end with an error event and `[DONE]`.

An ASGI middleware, handed to vLLM through its own `--middleware` flag, so nothing installed is replaced. It is needed
because stock vLLM (0.32 and 0.33) answers new requests with empty text while it drains, cuts streams without a word at
its timeout, and then hangs on "Waiting for connections to close".

The supervisor sends SIGUSR1. When the last request has ended, this process sends itself SIGTERM, and vLLM's own
shutdown finds nothing open.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DRAIN_VARIABLE = "QWEN_NVFP4_DRAIN_S"
DRAIN_SIGNAL = signal.SIGUSR1
POLL_S = 0.05
END_S = 2.0  # for the last bytes to a client that reads slowly
OPEN_PATHS = frozenset({"/metrics"})
WHY = "the server is shutting down"

logger = logging.getLogger("vllm.qwen_nvfp4_patches")


class Exchange:
    """One request being answered: passes its messages on until it is cut, then ends it properly."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._task = asyncio.current_task()
        self.cut = False
        self._started = self._finished = self._is_stream = False

    async def send(self, message: Message) -> None:
        """Pass one message of the application on."""
        if message["type"] == "http.response.start":
            self._started = True
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._finished = True
        await self._send(message)

    def stop(self) -> None:
        """Cancel the application's work on this request, once."""
        if not self.cut and self._task is not None:
            self.cut = True
            self._task.cancel()

    async def end(self) -> None:
        """What the client still has to be told."""
        if self._finished:
            return
        if not self._started:
            await refuse(self._send)
            return
        error = f"data: {json.dumps(error_body())}\n\ndata: [DONE]\n\n".encode() if self._is_stream else b""
        await self._send({"type": "http.response.body", "body": error, "more_body": False})


class DrainMiddleware:
    """vLLM's application with an orderly end; does nothing before SIGUSR1 comes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._open: set[Exchange] = set()
        self._draining: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if scope["type"] == "lifespan":
            asyncio.get_running_loop().add_signal_handler(DRAIN_SIGNAL, self.begin)
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif self._draining is not None:
            await refuse(send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(send)
        self._open.add(exchange)
        try:
            await self._app(scope, receive, exchange.send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not exchange.cut or task is None:
                raise
            task.uncancel()
            await asyncio.wait_for(exchange.end(), END_S)
        finally:
            self._open.discard(exchange)

    def begin(self) -> None:
        """Take no more requests; a second call changes nothing."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(drain_seconds()))

    async def _drain(self, limit_s: float) -> None:
        logger.info("Draining: %d requests may finish within %g s", len(self._open), limit_s)
        await self._wait(limit_s)
        if self._open:
            logger.warning("Draining: ending %d requests that did not finish", len(self._open))
        for exchange in tuple(self._open):
            exchange.stop()
        await self._wait(2 * END_S)
        os.kill(os.getpid(), signal.SIGTERM)

    async def _wait(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while self._open and loop.time() < deadline:
            await asyncio.sleep(POLL_S)


def drain_seconds() -> float:
    """How long running requests may take, as the launcher set it; 0 ends them at once."""
    return float(os.environ.get(DRAIN_VARIABLE) or 0)


def error_body() -> dict[str, Any]:
    """An OpenAI error object."""
    return {"error": {"message": WHY, "type": "ServiceUnavailableError", "param": None, "code": 503}}


async def refuse(send: Send) -> None:
    """503 with an error object; the connection is closed after it."""
    body = json.dumps(error_body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"30"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
