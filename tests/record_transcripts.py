"""Records real conversations into tests/data/transcripts, which tests/test_transcripts.py replays without a server.

    scripts/serve &                                  # the embedded model
    .venv/bin/python -m tests.record_transcripts [http://127.0.0.1:8000/v1]

A transcript is a list of exchanges: path, request as sent, the answer (whole, or the data lines of the stream), and for
chat also the prompt that the server rendered and the text that the model wrote, special tokens included.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.agent_tools import PARAMETERS, House, Job, jobs, run

FOLDER = Path(__file__).parent / "data" / "transcripts"
MODEL = "embedded"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
SHAPE = {
    "type": "object",
    "properties": {"pet": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["pet", "age"],
    "additionalProperties": False,
}


class Recorder:
    """Asks a server and keeps what was said."""

    def __init__(self, url: str) -> None:
        self._root = url.removesuffix("/v1")
        self._http = httpx.Client(timeout=300)
        self.exchanges: list[dict[str, Any]] = []

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        answer = self._http.post(self._root + path, json=body)
        answer.raise_for_status()
        return answer

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One exchange; what was answered, streams as the list of their data lines under `chunks`."""
        text = self._post(path, body).text
        if body.get("stream"):
            answer = {"chunks": [line[6:] for line in text.splitlines() if line.startswith("data: ")]}
        else:
            answer = {"answer": json.loads(text)}
        self.exchanges.append({"path": path, "request": body, **answer})
        return answer

    def chat(self, **body: Any) -> dict[str, Any]:
        """A chat exchange with its prompt and output, and the message that was answered."""
        asked = {"model": MODEL, "temperature": 0, "max_tokens": 300} | body
        self.ask("/v1/chat/completions", asked)
        whole = self._post("/v1/chat/completions", {**asked, "stream": False, "return_token_ids": True}).json()
        choice = whole["choices"][0]
        self.exchanges[-1]["prompt"] = self._text(whole["prompt_token_ids"])
        self.exchanges[-1]["output"] = self._text(choice["token_ids"]).removesuffix("<|im_end|>")
        self.exchanges[-1]["message"] = {
            "reasoning": choice["message"].get("reasoning"),
            "content": choice["message"].get("content"),
            "calls": [
                [call["function"]["name"], call["function"]["arguments"]]
                for call in choice["message"].get("tool_calls") or ()
            ],
        }
        message: dict[str, Any] = choice["message"]
        return message

    def _text(self, ids: list[int]) -> str:
        text: str = self._post("/detokenize", {"model": MODEL, "tokens": ids}).json()["prompt"]
        return text

    def save(self, name: str, about: str) -> None:
        """Writes what was kept, and forgets it."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        kept = {"about": about, "exchanges": self.exchanges}
        (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        self.exchanges = []


def chat_job(recorder: Recorder, job: Job, *, thinking: bool, stream: bool) -> House:
    """The job through chat: two orders in one conversation."""
    house, messages = job.house(), list[dict[str, Any]]()
    asked: dict[str, Any] = {"tools": TOOLS, "stream": stream}
    asked["chat_template_kwargs"] = {"enable_thinking": thinking}
    for order in (job.first, job.second):
        messages.append({"role": "user", "content": order})
        calls: list[dict[str, Any]] | None = None
        while calls is None or calls:
            said = recorder.chat(messages=list(messages), **asked)
            calls = said.get("tool_calls") or []
            kept = {name: said[name] for name in ("role", "content", "reasoning", "tool_calls") if said.get(name)}
            messages.append({"content": None, **kept})
            for call in calls:
                content = run(house, call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return house


def messages_order(recorder: Recorder, job: Job, *, stream: bool) -> None:
    """One order through the Messages API: the call, and the answer after its result."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2000, "temperature": 0, "stream": stream}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    body["tools"] = [{"name": name, "input_schema": parameters} for name, parameters in PARAMETERS.items()]
    first = {"role": "user", "content": job.find}
    recorder.ask("/v1/messages", {**body, "messages": [first]})
    call = {"type": "tool_use", "id": "call_1", "name": "find_price", "input": {"item": job.item, "city": job.city}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": str(job.price)}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    recorder.ask("/v1/messages", {**body, "messages": [first, *turns]})


def main() -> None:
    recorder = Recorder(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
    job = jobs(1, seed=1)[0]
    for thinking in (True, False):
        for stream in (True, False):
            name = f"job-{'thinking' if thinking else 'direct'}-{'streamed' if stream else 'whole'}"
            if not job.is_done(chat_job(recorder, job, thinking=thinking, stream=stream)):
                raise SystemExit(f"{name}: the job did not end right")
            recorder.save(name, "a conversation of two orders with an agent with tools, through chat")
    shape = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SHAPE}}
    for stream in (True, False):
        order = [{"role": "user", "content": "ok, write json for pet corn, age 335. keys pet, age"}]
        recorder.chat(messages=order, response_format=shape, stream=stream)
        recorder.save(f"json-{'streamed' if stream else 'whole'}", "an answer under a schema, after thinking")
        messages_order(recorder, job, stream=stream)
        recorder.save(f"messages-{'streamed' if stream else 'whole'}", "an order through the Messages API")


if __name__ == "__main__":
    main()
