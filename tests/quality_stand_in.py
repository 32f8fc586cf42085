"""A scripted OpenAI chat endpoint for the quality tests: it knows every right answer, and errs as it is told."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.bench_stand_in import QuietServer
from tests.http_stand_in import running

from qwen_nvfp4_serve.quality.plan import short_questions
from qwen_nvfp4_serve.quality.task import Call, Calls, Code, Exam, Number, Prose, Says, Want, Words

Json = dict[str, Any]
STORY = " ".join(f"sentence {number} tells of another thing." for number in range(60))
NEEDLE = re.compile(r"what is the code for (.+)\?$")


@dataclass
class Script:
    """How the endpoint behaves. exam: whose short questions it can answer, needles it looks up.

    spoil: gets a request and the right reply and returns (status, reply); reply may be bytes. tokens are words.
    """

    exam: Exam = field(default_factory=Exam)
    max_model_len: int | None = 8192
    models: tuple[str, ...] = ("m",)
    models_status: int = 200
    root: str | None = None
    has_tokenize: bool = True
    knows_logprobs: bool = True
    knows_thinking: bool = True
    spoil: Callable[[Json, Json], tuple[int, Json | bytes]] | None = None
    pause_s: float = 0.0
    bodies: list[Json] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    busiest: int = 0
    busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        tasks = [question.task for question in short_questions(self.exam, None)]
        self.wants: dict[str, Want] = {key_of(list(task.messages)): task.want for task in tasks}

    def reply(self, body: Json) -> Json:
        """The right chat completion."""
        messages = body["messages"]
        found = NEEDLE.search(messages[-1]["content"])
        if found:
            line = re.search(rf"the code for {found.group(1)} is (\d+)\.", messages[-1]["content"])
            want: Want | None = Code(line.group(1)) if line else None
        else:
            want = self.wants.get(key_of(messages))
        thinks = body.get("chat_template_kwargs", {}).get("enable_thinking", False) and self.knows_thinking
        return completion(want, thinks=thinks, prompt_tokens=count(messages), logprobs=body.get("logprobs", False))


def key_of(messages: list[Json]) -> str:
    return json.dumps(messages, sort_keys=True)


def count(messages: list[Json]) -> int:
    """Tokens of a prompt: its words and 3 a message."""
    return sum(3 + len(str(message.get("content", "")).split()) for message in messages)


def right_text(want: Want | None) -> str:
    """Content of a right answer."""
    match want:
        case Number(value):
            return f"The answer is {value:,}."
        case Code(code):
            return code
        case Says(text):
            return f"It is {text}."
        case Words(words):
            return " ".join(words)
        case Prose():
            return STORY
        case _:
            return "hello"


def right_calls(want: Want | None) -> list[Json]:
    """Tool calls of a right answer."""
    calls: tuple[Call, ...] = want.calls if isinstance(want, Calls) else ()
    return [
        {
            "id": f"c{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(calls)
    ]


def completion(want: Want | None, *, thinks: bool, prompt_tokens: int, logprobs: bool) -> Json:
    """A whole chat completion with the right answer."""
    calls = right_calls(want)
    text = None if calls else right_text(want)
    message: Json = {"role": "assistant", "content": text, "tool_calls": calls}
    if thinks:
        message["reasoning"] = "let me see."
    words = (text or "").split()
    choice: Json = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    if logprobs:
        choice["logprobs"] = {"content": [{"token": word, "logprob": -0.1} for word in words]}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(words)}
    return {"choices": [choice], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 with whole answers."""

    protocol_version = "HTTP/1.1"
    script: Script

    def log_message(self, *_: object) -> None:
        """Silence."""

    def do_GET(self) -> None:
        script = self.script
        if self.path != "/v1/models":
            return self._json(404, {})
        if script.models_status != 200:
            return self._json(script.models_status, {"error": {"message": "no"}})
        facts = {"max_model_len": script.max_model_len, "root": script.root}
        rows = [{"id": name, **facts} for name in script.models]
        return self._json(200, {"data": rows})

    def do_POST(self) -> None:
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            found = {"count": count(body["messages"])} if script.has_tokenize else {"error": "no"}
            return self._json(200 if script.has_tokenize else 404, found)
        with script.lock:
            script.bodies.append(body)
            script.keys.append(self.headers.get("Authorization"))
            script.busy += 1
            script.busiest = max(script.busiest, script.busy)
        time.sleep(script.pause_s)
        status, reply = self._reply(body)
        with script.lock:
            script.busy -= 1
        if status == 0:  # as when the server dies
            self.close_connection = True
            return None
        return self._send(status, reply) if isinstance(reply, bytes) else self._json(status, reply)

    def _reply(self, body: Json) -> tuple[int, Json | bytes]:
        script = self.script
        if body.get("logprobs") and not script.knows_logprobs:
            return 400, {"error": {"message": "logprobs are not supported"}}
        limit = script.max_model_len
        if limit is not None and count(body["messages"]) + body["max_tokens"] > limit:
            return 400, {"error": {"message": "too long for this context"}}
        reply = script.reply(body)
        return script.spoil(body, reply) if script.spoil else (200, reply)

    def _json(self, status: int, body: Json) -> None:
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, payload: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """The base URL of a running endpoint."""
    handler = type("Scripted", (Handler,), {"script": script})
    with running(QuietServer(("127.0.0.1", 0), handler)) as url:
        yield f"{url}/v1"


def message_of(reply: Json) -> Json:
    """The message of a completion, to be spoilt."""
    message: Json = reply["choices"][0]["message"]
    return message
