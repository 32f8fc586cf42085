"""Stopping a server ends the requests that still wait."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from typing import Any

import pytest

from qwen_nvfp4_patches import stream_shutdown


class Client:
    """Stands in for AsyncLLM: a task that handles outputs, and requests waiting on the event loop's thread."""

    def __init__(self) -> None:
        self.stopped_with: float | None = None
        self.told: list[tuple[str, str]] = []
        self.output_handler: asyncio.Task[Any] | None = asyncio.ensure_future(asyncio.sleep(60))
        self.output_processor = self

    def shutdown(self, timeout: float | None = None) -> None:
        self.stopped_with = timeout

    def propagate_error(self, error: Exception) -> None:
        self.told.append((type(error).__name__, threading.current_thread().name))


@pytest.mark.usefixtures("cpu_vllm")
def test_waiting_requests_are_told_on_the_loop_after_the_engine_stopped() -> None:
    async def stop() -> Client:
        client = Client()
        patched = stream_shutdown.ending_streams(Client.shutdown)
        await asyncio.get_running_loop().run_in_executor(None, lambda: patched(client, timeout=3))
        assert client.stopped_with == 3
        await asyncio.sleep(0)
        return client

    assert asyncio.run(stop()).told == [("EngineDeadError", threading.current_thread().name)]


@pytest.mark.usefixtures("cpu_vllm")
def test_client_that_never_served_stops_quietly() -> None:
    async def stop() -> Client:
        client = Client()
        client.output_handler = None
        stream_shutdown.ending_streams(Client.shutdown)(client)
        return client

    assert asyncio.run(stop()).told == []


@pytest.mark.parametrize(("name", "needed"), [("EngineCore", False), ("VllmWorker-0", False), ("ApiServer_1", True)])
def test_only_processes_that_serve_http_need_it(monkeypatch: pytest.MonkeyPatch, name: str, needed: bool) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    assert stream_shutdown._needed().needed is needed
