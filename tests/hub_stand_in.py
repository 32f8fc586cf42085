"""A hub on loopback: one repository, its API entry and its files with range requests, and the ways a hub can fail."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

from tests.http_stand_in import running

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/model"
LARGE_BYTES = 100_000  # above it a file has a sha256, as files in large-file storage have
CHUNK_BYTES = 16 * 1024


@dataclass
class Hub:
    """What is served and how. status: an error to answer with; token: the only one accepted; chunk_delay_s: slowness.

    cut_after_bytes: each response breaks off after so many bytes; ranges: honour Range; damage: flip the last byte;
    listings: offer the tree of files. log: method, path and range of each request.
    """

    files: Mapping[str, bytes]
    status: int | None = None
    error_code: str | None = None
    token: str | None = None
    chunk_delay_s: float = 0.0
    cut_after_bytes: int | None = None
    ranges: bool = True
    damage: bool = False
    listings: bool = True
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    @property
    def sent_requests(self) -> list[str]:
        """Paths of the files that were asked for."""
        return [path for _, path, _ in self.log if "/resolve/" in path]


def _identity(data: bytes) -> str:
    """What a hub calls a content: SHA-256 of a large one, git's SHA-1 of a small one."""
    if len(data) > LARGE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _tree(hub: Hub) -> list[dict[str, object]]:
    entries = []
    for name, data in hub.files.items():
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
        if len(data) > LARGE_BYTES:
            entry["lfs"] = {"oid": _identity(data), "size": len(data), "pointerSize": 134}
        else:
            entry["oid"] = _identity(data)
        entries.append(entry)
    return entries


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, urlparse(self.path).path
        hub.log.append((self.command, path, self.headers.get("Range")))
        refused = hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}"
        if hub.status is not None or refused:
            self._error(hub.status or 401, hub.error_code)
        elif match := re.fullmatch(rf"/api/models/{REPO}(?:/revision/(.+))?", path):
            if match[1] not in (None, "main", COMMIT):
                self._error(404, "RevisionNotFound")
                return
            siblings = [{"rfilename": name} for name in hub.files]
            text = json.dumps({"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings}).encode()
            self._send(text, {"Content-Type": "application/json"}, body=body)
        elif path == f"/api/models/{REPO}/tree/{COMMIT}":
            if not hub.listings:
                self._error(404, None)
                return
            self._send(json.dumps(_tree(hub)).encode(), {"Content-Type": "application/json"}, body=body)
        elif match := re.fullmatch(rf"/{REPO}/resolve/(?:main|{COMMIT})/(.+)", path):
            if match[1] in hub.files:
                self._send_file(hub.files[match[1]], body=body)
            else:
                self._error(404, "EntryNotFound")
        else:
            self._error(404, "RepoNotFound")

    def _error(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_file(self, data: bytes, *, body: bool) -> None:
        tag = {"ETag": f'"{_identity(data)}"', "X-Repo-Commit": COMMIT}
        if self.hub.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None or not self.hub.ranges:
            self._send(data, tag, body=body)
            return
        first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
        part = data[first : last + 1]
        headers = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}", **tag}
        self._send(part, headers, body=body, status=206)

    def _send(self, data: bytes, headers: Mapping[str, str], *, body: bool, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        end = len(data) if self.hub.cut_after_bytes is None else min(len(data), self.hub.cut_after_bytes)
        for start in range(0, end, CHUNK_BYTES):
            self.wfile.write(data[start : min(end, start + CHUNK_BYTES)])
            if self.hub.chunk_delay_s:
                time.sleep(self.hub.chunk_delay_s)
        if end < len(data):
            self.close_connection = True
            self.connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that is killed on purpose breaks its connection; that is no news."""


@contextmanager
def serve(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """A running hub with these files; its `url` is what HF_ENDPOINT takes."""
    hub = Hub(files)
    with running(_Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))) as hub.url:
        yield hub
