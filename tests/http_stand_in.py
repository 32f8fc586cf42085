"""Runs a stand-in HTTP server for as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer

POLL_S = 0.02  # how soon it notices that it should stop
BACKLOG = 128  # connections that may wait: of socketserver's own 5, dozens at once are reset on a busy machine


@contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    """The URL of `server`, which answers until the block ends, however it ends: a thread that still polls a closed
    socket turns at full speed, and takes the time of every later test."""
    with server:
        server.socket.listen(BACKLOG)
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
