"""Replays of decode graphs, with a torch and graphs of known speed in their places."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_nvfp4_serve.bench import decode_graphs


class Clock:
    """A card's time, in milliseconds."""

    now = 0.0


@dataclass(frozen=True)
class Kind:
    """What a graph was captured for."""

    num_tokens: int


class Graph:
    """One that takes so long, and longer the first few times."""

    def __init__(self, clock: Clock, ms: float) -> None:
        self.clock, self.ms, self.replays = clock, ms, 0

    def replay(self) -> None:
        self.replays += 1
        self.clock.now += self.ms * (3 if self.replays < 5 else 1)


def torch_of(clock: Clock, *, card: bool = True) -> Any:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    return SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: card, Event=Event))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = Clock()
    monkeypatch.setattr(decode_graphs, "import_module", lambda _name: torch_of(clock))
    graphs = {Kind(tokens): Graph(clock, tokens / 10) for tokens in (1, 2, 8, 16)}
    return SimpleNamespace(cudagraph_manager=SimpleNamespace(graphs=graphs))


def test_graphs_of_the_streams_asked_for_are_replayed(runner: SimpleNamespace) -> None:
    assert decode_graphs.replay_us(runner, [1, 8, 4]) == pytest.approx({1: 100.0, 8: 800.0})


def test_engine_without_graphs_tells_nothing(runner: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (None, SimpleNamespace(), SimpleNamespace(cudagraph_manager=None)):
        assert decode_graphs.replay_us(other, [1]) == {}
    assert decode_graphs.replay_us(SimpleNamespace(cudagraph_manager=SimpleNamespace(graphs=[1])), [1]) == {}
    monkeypatch.setattr(decode_graphs, "import_module", lambda _name: torch_of(Clock(), card=False))
    assert decode_graphs.replay_us(runner, [1]) == {}
