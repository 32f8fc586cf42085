"""The smoke checks against a scripted server: a good one passes, each fault is found by the check that is meant to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.smoke import connect, run_checks

USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
LIMIT = 64


class Script(BaseHTTPRequestHandler):
    """A minimal OpenAI endpoint; `fault` names what it does wrong."""

    fault = ""

    def log_message(self, *_: object) -> None:
        """Silence."""

    def _send(self, status: int, body: Any, kind: str = "application/json") -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(503 if self.fault == "health" else 200, b"")
        elif self.fault == "key":
            self._send(401, {"error": "Unauthorized"})
        else:
            self._send(200, {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": LIMIT}]})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            body = json.loads(text)
        except ValueError:
            return self._refuse(200 if self.fault == "json" else 400)
        if body["model"] != "m":
            return self._refuse(200 if self.fault == "model" else 404)
        if len(body.get("prompt", "").split()) > LIMIT:
            return self._refuse(500 if self.fault == "long" else 400)
        if body.get("stream"):
            return self._stream()
        if self.path.endswith("/chat/completions"):
            return self._send(200, self._chat(body))
        choice = {"index": 0, "text": "4", "finish_reason": "length", "logprobs": None}
        return self._send(
            200,
            {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE},
        )

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "hello"}
        if body.get("tools") and self.fault == "tool":
            call = {"id": "1", "type": "function", "function": {"name": "other", "arguments": "{}"}}
            message["tool_calls"] = [call]
        usage = USAGE | {"completion_tokens": 0} if self.fault == "usage" else USAGE
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}

    def _stream(self) -> None:
        base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        chunks: list[dict[str, Any]] = [
            base | {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}
        ]
        if self.fault != "stream":
            chunks.append(base | {"choices": [], "usage": USAGE})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        self._send(200, "".join(lines).encode(), "text/event-stream")

    def _refuse(self, status: int) -> None:
        self._send(status, {"error": {"message": "refused", "code": status}})


@contextmanager
def scripted(fault: str = "") -> Iterator[str]:
    handler = type("Faulty", (Script,), {"fault": fault})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def failures(fault: str) -> list[str]:
    with scripted(fault) as url:
        return [check.name for check in run_checks(connect(url, None)) if not check.ok]


def test_run_checks_good_server_passes_all() -> None:
    assert failures("") == []


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("health", "health"),
        ("usage", "chat"),
        ("stream", "streaming with usage"),
        ("tool", "tool request"),
        ("model", "wrong model is 404"),
        ("json", "broken JSON is 400"),
        ("long", "over-long prompt is 400"),
    ],
)
def test_run_checks_fault_is_found(fault: str, check: str) -> None:
    assert check in failures(fault)


def test_connect_wrong_key_says_which_setting() -> None:
    with scripted("key") as url, pytest.raises(QwenNvfp4Error, match="VLLM_API_KEY"):
        connect(url, "wrong")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "nonsense", "http://", "http://127.0.0.1:99999"])
def test_connect_no_server_is_one_sentence(url: str) -> None:
    with pytest.raises(QwenNvfp4Error, match="no OpenAI endpoint"):
        connect(url, None)
