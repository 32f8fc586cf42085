"""Launches and their questions to torch, with a pretended card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qwen_nvfp4_serve.kernels import cards

SECOND = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The current card, which `torch.cuda.device` changes; the stream of card i has handle 100 + i."""
    now = [0]

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, now[0] = now[0], self.index

        def __exit__(self, *_: object) -> None:
            now[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    cards._capability.cache_clear()
    yield now
    cards._capability.cache_clear()


@pytest.mark.parametrize("before", [0, 1])
def test_launch_runs_on_the_tensors_card_and_stream_and_leaves_the_current_one(current: list[int], before: int) -> None:
    current[0], seen = before, []

    def function(*arguments: Any) -> int:
        seen.append((current[0], arguments))
        return 7

    assert cards.launch(function, SECOND, "call", 3) == 7
    assert seen == [(1, ("call", 3, 101))]
    assert current == [before]


def test_launch_that_raises_leaves_the_current_card(current: list[int]) -> None:
    def function(*_: Any) -> int:
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="luck"):
        cards.launch(function, SECOND)
    assert current == [0]


def test_stream_key_is_that_of_the_tensors_card(current: list[int]) -> None:
    assert cards.stream_key(SECOND) == (1, 101)


def test_capability_is_asked_once_for_each_card_and_always_without_one(
    current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def answer(device: Any) -> tuple[int, int]:
        asked.append(device)
        return (9, 0) if device == 1 else (12, len(asked))

    monkeypatch.setattr(torch.cuda, "get_device_capability", answer)
    assert cards.capability(SECOND) == cards.capability(torch.device("cuda", 1)) == (9, 0)
    assert asked == [1]
    anywhere = torch.device("cuda")
    assert [cards.capability(anywhere), cards.capability(anywhere)] == [(12, 2), (12, 3)]
