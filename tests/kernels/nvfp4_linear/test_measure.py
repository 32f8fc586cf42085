"""What a measurement's rows hold, with stand-ins for the card's timers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from qwen_nvfp4_serve.kernels.graph_timing import Call
from qwen_nvfp4_serve.kernels.nvfp4_linear import measure


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "graph_us", lambda calls: float(len(calls)))
    monkeypatch.setattr(measure, "behind_us", lambda calls: len(calls) + 0.5)


def calls(many: int) -> list[Call]:
    return measure.in_turn(["a", "b"], many, str.upper)


def test_few_tokens_are_timed_behind_a_small_kernel_too() -> None:
    assert measure.times("ours", calls(3), 64) == {"ours_us": 3.0, "ours_behind_us": 3.5}
    assert measure.times("ours", calls(3), 65) == {"ours_us": 3.0}


def test_what_has_no_call_has_no_time() -> None:
    assert measure.times("marlin", measure.in_turn([], 0, str.upper), 1) == {
        "marlin_us": None,
        "marlin_behind_us": None,
    }


def test_card_without_the_small_kernel_has_no_time_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: Sequence[Call]) -> None:
        return None

    monkeypatch.setattr(measure, "behind_us", none)
    assert measure.times("ours", calls(2), 1) == {"ours_us": 2.0, "ours_behind_us": None}


def test_calls_go_round_the_weights() -> None:
    found: list[Any] = [call() for call in calls(5)]
    assert found == ["A", "B", "A", "B", "A"]
