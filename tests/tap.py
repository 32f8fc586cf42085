"""A proxy between a harness and a server that notes when the server's tokens passed.

What two harnesses say of one server differs by the server itself: on a machine of few cores each harness takes some
of its time, and a burst of other work hits one of them. Through the tap it is known how fast the server was while each
of them measured. It also has the model answer in words alone: tokens without text count in our rates, and not in
llama-benchy's."""

from __future__ import annotations

import http.client
import json
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from tests.bench_stand_in import QuietServer
from tests.http_stand_in import running

PIECE_BYTES = 65536
TOKENIZER = Path(__file__).resolve().parents[1] / "src" / "qwen_nvfp4_serve" / "data" / "reference" / "tokenizer.json"
MOST_WORDS = 100


def words() -> list[int]:
    """Tokens that are a space and letters: each is text at once, with no tag or character that it is a part of."""
    vocabulary: dict[str, int] = json.loads(TOKENIZER.read_text())["model"]["vocab"]
    return [id for text, id in vocabulary.items() if re.fullmatch("Ġ[a-z]+", text)][:MOST_WORDS]


@dataclass
class Tap:
    """The streamed answers so far, each as (seconds from the request to the first token, tokens/s after it)."""

    upstream: str
    in_words: list[int]
    answers: list[tuple[float, float]] = field(default_factory=list)

    def speed(self, runs: int) -> dict[str, float]:
        """Medians of the last `runs` answers, under the names of llama-benchy's figures that go with them."""
        first_s, rate = (statistics.median(values) for values in zip(*self.answers[-runs:], strict=True))
        return {"pp": 1.0 / first_s, "tg": rate, "peak": rate, "e2e_ttft": first_s}

    def note(self, began_s: float, pieces: list[tuple[float, bytes]]) -> None:
        """Keeps an answer of more than one token."""
        at_s: list[float] = []
        rest = b""
        for now_s, piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            at_s += [now_s for line in lines if _has_text(line)]
        if len(at_s) > 1:
            after = [moment for moment in at_s if moment > at_s[0]]
            self.answers.append((at_s[0] - began_s, len(after) / (after[-1] - at_s[0]) if after else float("inf")))


def _has_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line.removeprefix(b"data: ")).get("choices") or [{}]
    delta = choices[0].get("delta", {})
    return bool(choices[0].get("text") or delta.get("content") or delta.get("reasoning"))


class Handler(BaseHTTPRequestHandler):
    """Hands on requests, and pieces of answers as they come."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    tap: Tap

    def log_message(self, *_: object) -> None:
        """Silence."""

    def do_GET(self) -> None:
        self._pass_on(b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.tap.in_words and body.get("stream"):
            body["allowed_token_ids"] = self.tap.in_words
        self._pass_on(json.dumps(body).encode())

    def _pass_on(self, body: bytes) -> None:
        began_s = time.perf_counter()
        upstream = http.client.HTTPConnection(urlsplit(self.tap.upstream).netloc)
        upstream.request(self.command, self.path, body, {"Content-Type": "application/json"})
        answer = upstream.getresponse()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type", "text/plain"))
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pieces: list[tuple[float, bytes]] = []
        while piece := answer.read1(PIECE_BYTES):
            pieces.append((time.perf_counter(), piece))
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()
        upstream.close()
        self.tap.note(began_s, pieces)  # before the end: who has read it may ask
        self.wfile.write(b"0\r\n\r\n")


@contextmanager
def tapped(upstream: str) -> Iterator[tuple[str, Tap]]:
    """The base URL to use instead of `upstream`, and what passes."""
    tap = Tap(upstream, words())
    with running(QuietServer(("127.0.0.1", 0), type("Tapped", (Handler,), {"tap": tap}))) as url:
        yield f"{url}/v1", tap
