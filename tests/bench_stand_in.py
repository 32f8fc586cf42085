"""A scripted OpenAI endpoint that streams at a set rate, bundles tokens as told, and fails on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.http_stand_in import running

MAX_MODEL_LEN = 100_000
WHOLE = ("", "no usage", "held back")  # faults of streams that end as they should
METRICS = 'vllm:cache_config_info{block_size="16",cache_dtype="fp8",enable_prefix_caching="True"} 1.0\n'


@dataclass
class Script:
    """How the server behaves, and what it saw.

    bundles: tokens of each stream event in turn, repeated. prefill_s: pause before the first. counts: whether events
    carry a running count. early_role: send the role of a chat answer before the prefill, not with the first token.
    silent: tokens bring no text.
    faults: what goes wrong with the n-th streamed request; "held back" sends its events together when it is whole, as a
    proxy that buffers does. true_firsts: of each whole stream, seconds from the request
    to the first token by the server's own clock. true_rates: of each whole stream, from the server's own
    clock: tokens after the first event over the time to the last.
    """

    tokens_per_s: float = 400.0
    bundles: tuple[int, ...] = (1,)
    prefill_s: float = 0.02
    counts: bool = True
    has_tokenize: bool = True
    overhead: int = 3
    dear_words: bool = False
    early_role: bool = False
    silent: bool = False
    faults: dict[int, str] = field(default_factory=dict)
    streamed: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    true_firsts: list[float] = field(default_factory=list)
    true_rates: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, body: dict[str, Any]) -> int:
        """Tokens of a request: one a word (two, if of three letters and `dear_words`), and an overhead a message."""
        messages = body.get("messages") or [{"content": body.get("prompt", "")}]
        words = [word for message in messages for word in message["content"].split()]
        dear = sum(len(word) == 3 for word in words) if self.dear_words else 0
        return self.overhead * len(messages) + len(words) + dear


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 with chunked streams, so that a cut connection is seen as one."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    script: Script

    def log_message(self, *_: object) -> None:
        """Silence."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": "m", "max_model_len": MAX_MODEL_LEN}]})
        elif self.path == "/version":
            self._json(200, {"version": "9.9"})
        else:
            self._send(200, METRICS.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            if not self.script.has_tokenize:
                return self._json(404, {"error": "not found"})
            return self._json(200, {"count": self.script.count(body)})
        prompt_tokens = self.script.count(body)
        if not body.get("stream"):
            return self._json(200, {"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 1}})
        with self.script.lock:
            fault = self.script.faults.get(self.script.streamed, "")
            self.script.streamed += 1
            self.script.bodies.append(body)
        if fault == "http":
            return self._json(503, {"error": {"message": "overloaded"}})
        return self._stream(body, prompt_tokens, fault)

    def _stream(self, body: dict[str, Any], prompt_tokens: int, fault: str) -> None:
        script, wanted = self.script, body["max_tokens"]
        self.held: list[bytes] | None = [] if fault == "held back" else None
        counts = script.counts and fault != "no usage"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        if fault not in WHOLE:  # as it will: a client that was not told may use the connection once more
            self.send_header("Connection", "close")
        self.end_headers()
        role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        if "messages" in body and script.early_role:
            self._event(role, prompt_tokens, 0, counts)
        asked_s = time.perf_counter()
        begin_s = asked_s + script.prefill_s
        sent = turn = first = 0
        sent_at: list[float] = []
        while sent < wanted:
            bundle = min(script.bundles[turn % len(script.bundles)], wanted - sent)
            due_s = begin_s + sent / script.tokens_per_s
            time.sleep(max(0.0, due_s - time.perf_counter()))
            if fault not in WHOLE and sent >= wanted // 2:
                self._fail(fault)
                return
            if "messages" in body and not sent and not script.early_role:
                self._event(role, prompt_tokens, 0, counts)
            sent, turn = sent + bundle, turn + 1
            first = first or sent
            sent_at.append(time.perf_counter())
            text = "" if script.silent else "x" * bundle
            delta: dict[str, Any] = {"delta": {"content": text}} if "messages" in body else {"text": text}
            self._event({"choices": [{**delta, "finish_reason": None}]}, prompt_tokens, sent, counts)
        script.true_firsts.append(sent_at[0] - asked_s)
        if len(sent_at) > 1:
            script.true_rates.append((sent - first) / (sent_at[-1] - sent_at[0]))
        if fault != "no usage":
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sent}
            self._chunk(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
        self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"".join(self.held or ()))
        self.wfile.write(b"0\r\n\r\n")

    def _fail(self, fault: str) -> None:
        if fault == "error event":
            self._chunk('data: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n')
        elif fault == "bad event":
            self._chunk("data: {half\n\n")
        elif fault == "timeout":
            time.sleep(1.5)
        if fault != "dropped":  # a dropped connection ends without the last chunk
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _event(self, chunk: dict[str, Any], prompt_tokens: int, so_far: int, counts: bool) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": so_far} if counts else None
        self._chunk(f"data: {json.dumps(chunk | {'usage': usage})}\n\n")

    def _chunk(self, text: str) -> None:
        chunk = f"{len(text):x}\r\n{text}\r\n".encode()
        if self.held is not None:
            self.held.append(chunk)
            return
        try:
            self.wfile.write(chunk)
            self.wfile.flush()
        except OSError:
            self.close_connection = True

    def _json(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, payload: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


class QuietServer(ThreadingHTTPServer):
    """A client that goes away is no news."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silence."""


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """The base URL of a running server."""
    handler = type("Scripted", (Handler,), {"script": script})
    with running(QuietServer(("127.0.0.1", 0), handler)) as url:
        yield f"{url}/v1"
