"""The smoke checks against a scripted server: a good one passes, each fault is found by the check that is meant to."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests import quality_stand_in
from tests.http_stand_in import running

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.reference import EMBEDDED, Given, one_of_each, read_answers, ready_answer
from qwen_nvfp4_serve.smoke import connect, run_checks

ROOT = Path(__file__).resolve().parents[1]
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
LIMIT = 64
ROOM = 4096  # of the reference model
KNOWN = {json.dumps(list(answer.messages)): answer for answer in read_answers(EMBEDDED)}


ODD_LISTS = {
    "deep": b"[" * 100_000,
    "no number": b'{"data": [{"id": "m", "max_model_len": "many"}]}',
    "infinite": b'{"data": [{"id": "m", "max_model_len": 1e999}]}',
    "null": b'{"data": null}',
    "numbers": b'{"data": [1]}',
}


class Script(BaseHTTPRequestHandler):
    """A minimal OpenAI endpoint; `fault` names what it does wrong."""

    fault = ""
    root = "someone/else"
    limit = LIMIT

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
        elif self.fault == "empty":
            self._send(200, {"object": "list", "data": []})
        elif self.fault in ODD_LISTS:
            self._send(200, ODD_LISTS[self.fault])
        else:
            row = {"id": "m", "object": "model", "max_model_len": self.limit, "root": self.root}
            self._send(200, {"object": "list", "data": [row]})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            body = json.loads(text)
        except ValueError:
            return self._refuse(200 if self.fault == "json" else 400)
        if body["model"] != "m":
            return self._refuse(200 if self.fault == "model" else 404)
        if len(body.get("prompt", "").split()) > self.limit:
            return self._refuse(500 if self.fault == "long" else 400)
        if body.get("stream"):
            return self._stream(body)
        if self.path.endswith("/chat/completions"):
            return self._send(200, self._chat(body))
        choice = {
            "index": 0,
            "text": "5" if self.fault == "counting" else " 4",
            "finish_reason": "length",
            "logprobs": None,
        }
        return self._send(
            200,
            {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE},
        )

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "Lyon" if self.fault == "capital" else "Paris."}
        message |= self._known(body) or {}
        if body.get("tools") and self.fault == "tool":
            call = {"id": "1", "type": "function", "function": {"name": "other", "arguments": "{}"}}
            message["tool_calls"] = [call]
        usage = USAGE | {"completion_tokens": 0} if self.fault == "usage" else USAGE
        reason = "tool_calls" if message.get("tool_calls") and self.fault != "reason" else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}

    def _known(self, body: dict[str, Any]) -> dict[str, Any] | None:
        answer = KNOWN.get(json.dumps(body["messages"]))
        if answer is None:
            return None
        expected = Given(content="24 30 65") if self.fault == f"wrong {answer.id}" else answer.expected
        calls = [
            {"id": name, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in expected.calls
        ]
        known: dict[str, Any] = {"content": expected.content, "reasoning": expected.reasoning}
        return known | ({"tool_calls": calls} if calls else {})

    def _stream(self, body: dict[str, Any]) -> None:
        base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        delta = self._known(body) or {"content": "hi"}
        if self.fault == "unthinking":
            delta["reasoning"] = None
        chunks: list[dict[str, Any]] = [base | {"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}]
        if self.fault != "stream":
            chunks.append(base | {"choices": [], "usage": USAGE})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        self._send(200, "".join(lines).encode(), "text/event-stream")

    def _refuse(self, status: int) -> None:
        self._send(status, {"error": {"message": "refused", "code": status}})


@contextmanager
def scripted(fault: str = "", **also: Any) -> Iterator[str]:
    handler = type("Faulty", (Script,), {"fault": fault, **also})
    with running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        yield url


def failures(fault: str, **also: Any) -> list[str]:
    with scripted(fault, **also) as url:
        return [check.name for check in run_checks(connect(url, None)) if not check.ok]


def test_run_checks_good_server_passes_all() -> None:
    assert failures("") == []


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("health", "health"),
        ("usage", "chat"),
        ("capital", "chat"),
        ("counting", "completions"),
        ("stream", "streaming with usage"),
        ("tool", "tool request"),
        ("model", "wrong model is 404"),
        ("json", "broken JSON is 400"),
        ("long", "over-long prompt is 400"),
    ],
)
def test_run_checks_fault_is_found(fault: str, check: str) -> None:
    assert check in failures(fault)


REFERENCE = {"root": "/anywhere/data/reference/moe", "limit": ROOM}


def test_run_checks_reference_model_is_asked_what_it_knows() -> None:
    with scripted(**REFERENCE) as url:
        checks = {check.name: check for check in run_checks(connect(url, None))}
    assert all(check.ok for check in checks.values()), checks
    assert checks["known answers at once"].seen == f"all {len({answer.kind for answer in KNOWN.values()})} right"


ASKED = one_of_each(read_answers(EMBEDDED), ROOM)
READY = ready_answer(ASKED) or ASKED[0]
CALL = min((known for known in ASKED if known.expected.calls), key=lambda known: known.chars)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (f"wrong {READY.id}", "chat"),
        ("wrong needle-think-1", "known answers at once"),
        ("unthinking", "streaming with thinking"),
        ("reason", "tool request"),
        (f"wrong {CALL.id}", "tool request"),
    ],
)
def test_run_checks_wrong_answer_of_the_reference_model_is_found(fault: str, check: str) -> None:
    assert check in failures(fault, **REFERENCE)


def test_run_checks_answers_named_by_hand_are_asked_of_any_model() -> None:
    with scripted("wrong chat-think-1", limit=ROOM) as url:
        checks = run_checks(connect(url, None, answers=EMBEDDED))
    assert [check.name for check in checks if not check.ok] == ["known answers at once"]
    (seen,) = (check.seen for check in checks if not check.ok)
    assert "chat-think-1" in seen


def test_connect_wrong_key_says_which_setting() -> None:
    with scripted("key") as url, pytest.raises(QwenNvfp4Error, match="VLLM_API_KEY"):
        connect(url, "wrong")


def test_connect_server_without_models_is_said() -> None:
    with scripted("empty") as url, pytest.raises(UsageError, match="no model to ask"):
        connect(url, None)


@pytest.mark.parametrize("odd", ODD_LISTS)
def test_connect_odd_list_of_models_is_one_sentence(odd: str) -> None:
    with scripted(odd) as url, pytest.raises(QwenNvfp4Error, match="no OpenAI endpoint answers at"):
        connect(url, None)


def test_connect_length_below_zero_is_an_unknown_one() -> None:
    with scripted(limit=-5) as url:
        assert connect(url, None).max_model_len == 0


def test_connect_key_that_no_header_carries_is_not_shown() -> None:
    with pytest.raises(UsageError, match="printable ASCII") as caught:
        connect("http://127.0.0.1:9", "hunter2\nnext")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "nonsense", "http://", "http://127.0.0.1:99999"])
def test_connect_no_server_is_one_sentence(url: str) -> None:
    with pytest.raises(QwenNvfp4Error, match="no OpenAI endpoint"):
        connect(url, None)


def curl_smoke(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "scripts" / "smoke.sh", url], capture_output=True, text=True, check=False)


def test_curl_smoke_without_the_key_says_the_status_once_and_what_to_set() -> None:
    with quality_stand_in.scripted(quality_stand_in.Script(models_status=401)) as url:
        done = curl_smoke(url)
    assert done.returncode == 1
    assert done.stderr.count("401") == 1
    assert "(HTTP 401): set VLLM_API_KEY to the server's key." in done.stderr


def test_curl_smoke_where_nobody_listens_says_so() -> None:
    done = curl_smoke("http://127.0.0.1:9/v1")
    assert done.returncode == 1
    assert "at http://127.0.0.1:9/v1 (no connection): start one with scripts/serve" in done.stderr
