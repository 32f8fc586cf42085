"""How calls are timed on a card: the arithmetic and the order of launches, with a stand-in for the card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.kernels import bf16_linear, build, graph_timing
from qwen_nvfp4_serve.kernels.admission import timing, trial
from qwen_nvfp4_serve.kernels.admission.parent import SMALL_KERNEL
from qwen_nvfp4_serve.kernels.nvfp4_linear import launch

SMALL, SMALL_US = "small", 1.5


class Card:
    """Launches take what they say. Graphs are measured as `graph_us` does: one call, then all are captured."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.graphs: list[list[str]] = []
        self.ready: set[str] = set()  # who has a workspace on this measurement's stream
        self.capturing = False
        self.busy_us = 0.0

    def kernel(self, name: str, takes_us: float) -> Callable[[], None]:
        def call() -> None:
            assert name in self.ready or not self.capturing, f"{name} makes its workspace in a capture"
            self.ready.add(name)
            self.launched.append(name)
            self.busy_us += takes_us

        return call

    def graph_us(self, calls: Sequence[Callable[[], object]]) -> float:
        self.ready.clear()
        calls[0]()
        self.launched, self.busy_us, self.capturing = [], 0.0, True
        for call in calls:
            call()
        self.capturing = False
        self.graphs.append(list(self.launched))
        return self.busy_us / len(calls)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card with the small kernel, and workspaces that earlier streams left behind."""
    found = Card()
    monkeypatch.setattr(graph_timing, "graph_us", found.graph_us)
    monkeypatch.setattr(graph_timing, "small_kernel", lambda: found.kernel(SMALL, SMALL_US))
    for workspaces in (launch._partials, launch._dequantized):
        monkeypatch.setitem(workspaces, (0, 1), torch.empty(0))
    graph_timing._alone_us.cache_clear()
    return found


@pytest.mark.parametrize("takes_us", [1.5, 43.0])
def test_time_on_a_card_is_what_a_call_adds_to_a_small_kernel(card: Card, takes_us: float) -> None:
    assert timing.cuda_timer([card.kernel("a", takes_us)] * 3) == pytest.approx(takes_us)


def test_every_timed_call_follows_a_small_kernel_and_its_workspace_is_there(card: Card) -> None:
    timing.cuda_timer([card.kernel("a", 4.0), card.kernel("a", 4.0)])
    assert card.graphs[0] == [SMALL, "a", SMALL, "a"]


def test_small_kernel_is_timed_alone_once_for_all_candidates(card: Card) -> None:
    times = [timing.cuda_timer([card.kernel(name, us)] * 2) for name, us in (("a", 4.0), ("b", 5.0))]
    assert times == pytest.approx([4.0, 5.0])
    assert card.graphs.count([SMALL] * graph_timing.SMALL_CALLS) == 1
    assert len(card.graphs) == 3


def test_time_that_noise_takes_below_nothing_stays_one_to_divide_by(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_timing, "_alone_us", lambda: 100.0)
    assert timing.cuda_timer([card.kernel("a", 4.0)] * 2) == graph_timing.LEAST_US > 0


def test_calls_without_the_small_kernel_are_timed_one_after_the_other(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_timing, "small_kernel", lambda: None)
    assert timing.cuda_timer([card.kernel("a", 4.0), card.kernel("a", 6.0)]) == pytest.approx(5.0)
    assert card.graphs == [["a", "a"]]


def test_small_kernels_first_run_is_a_step_of_its_own_before_any_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []
    monkeypatch.setattr(graph_timing, "try_small_kernel", lambda: happened.append("run"))
    monkeypatch.setattr(trial, "synchronize", lambda _: happened.append("card is up"))
    device = torch.device("cuda", 0)
    assert trial._timer(device, True, happened.append) is timing.cuda_timer
    assert happened == ["card is up", {"step": {"stage": SMALL_KERNEL}}, "run"]
    assert trial._timer(device, False, happened.append) is timing.bare_cuda_timer
    assert len(happened) == 3


def test_trying_the_small_kernel_leaves_nothing_to_run_first_with_a_candidate(card: Card) -> None:
    graph_timing.try_small_kernel()
    assert card.graphs == [[SMALL] * graph_timing.SMALL_CALLS]
    timing.cuda_timer([card.kernel("a", 4.0)])
    assert card.graphs[1:] == [[SMALL, "a"]]


@pytest.mark.parametrize("built", [True, False])
def test_workspaces_of_a_measurements_stream_are_dropped(
    card: Card, monkeypatch: pytest.MonkeyPatch, built: bool
) -> None:
    if not built:
        monkeypatch.setattr(graph_timing, "small_kernel", lambda: None)
    timing.cuda_timer([card.kernel("a", 4.0)])
    assert not launch._partials
    assert not launch._dequantized


class Library:
    """The small kernel's library on a card of some capability, without either."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, built: bool = True, capability: tuple[int, int] = (9, 0)):
        self.calls: list[tuple[tuple[int, ...], ...]] = []
        self.error: Exception | None = None
        self.waits = 0
        zeros = torch.zeros
        monkeypatch.setattr(build, "find", lambda _: "a file" if built else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype))  # noqa: ARG005
        monkeypatch.setattr(bf16_linear, "small_m", self.small_m)

    def wait(self) -> None:
        self.waits += 1

    def small_m(self, x: Any, weight: Any, bias: Any, y: Any, *, dependent: bool = True) -> None:
        assert self.waits == 1, "it reads weights before it waits"
        assert bias is None
        assert dependent
        if self.error:
            raise self.error
        self.calls.append((tuple(x.shape), tuple(weight.shape), tuple(y.shape)))


@pytest.fixture(autouse=True)
def fresh() -> None:
    graph_timing.small_kernel.cache_clear()


def test_small_kernel_is_ours_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    between = graph_timing.small_kernel()
    assert between is not None
    between()
    assert library.calls == [((1, 2048), (64, 2048), (1, 64))] * 2  # tried once, then called
    assert graph_timing.small_kernel() is between


@pytest.mark.parametrize("missing", [{"built": False}, {"capability": (10, 0)}], ids=str)
def test_small_kernel_that_was_not_built_or_is_for_other_cards_is_none(
    monkeypatch: pytest.MonkeyPatch, missing: dict[str, Any]
) -> None:
    library = Library(monkeypatch, **missing)
    assert graph_timing.small_kernel() is None
    assert library.calls == []


@pytest.mark.parametrize(
    "error", [QwenNvfp4Error("BF16 linear", seen="no kernel image"), OSError("invalid ELF header")]
)
def test_small_kernel_that_fails_is_none_and_blames_no_candidate(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    library = Library(monkeypatch)
    library.error = error
    assert graph_timing.small_kernel() is None
