# ruff: noqa: ARG002
"""Trials of candidates for a block's experts: one right, the others broken each in its own way, all on a CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_serve.errors import UsageError  # noqa: E402
from qwen_nvfp4_serve.kernels import admission, build  # noqa: E402
from qwen_nvfp4_serve.kernels.admission import Finding, Shape, Span, Table, Verdict, experts, experts_trial  # noqa: E402
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, WITHOUT_LIMIT, from_json, to_json  # noqa: E402
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, reference  # noqa: E402

SHAPE = Shape(128, 128, 8, 2)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as show each fault."""
    monkeypatch.setattr(experts_trial, "CHECKED_TOKENS", (1, 8, 33))
    monkeypatch.setattr(experts_trial, "TIMED_TOKENS", (1, 4))
    monkeypatch.setattr(experts_trial, "TIMED_ELECTIONS", 1)
    monkeypatch.setattr(experts_trial, "CROWD", slice(40, 60))
    monkeypatch.setattr(experts_trial, "PADDING", (50, 59))


class Right:
    """The definition."""

    name = "right"
    max_tokens: int | None = None
    rounds_activations = False
    one_scale = False
    compiles = False

    def unavailable(self) -> str | None:
        return None

    def supports(self, capability: tuple[int, int], shape: Shape) -> str | None:
        return None if shape.k % 128 == 0 else f"hidden size {shape.k}"

    def run(self, x: Any, weights: ExpertWeights, ids: Any, shares: Any, y: Any) -> None:
        y[:] = reference.moe_experts(x, weights, ids, shares).value.bfloat16()


class FewTokens(Right):
    """Takes up to eight tokens."""

    max_tokens = 8


class OneScaleForBoth(Right):
    """Gives the up rows the gate's scale, as vLLM's own loading does."""

    def run(self, x: Any, weights: ExpertWeights, ids: Any, shares: Any, y: Any) -> None:
        super().run(x, dataclasses.replace(weights, up_scale=weights.gate_scale), ids, shares, y)


class PaddingIsTheLastExpert(Right):
    """Indexes with what it is given."""

    def run(self, x: Any, weights: ExpertWeights, ids: Any, shares: Any, y: Any) -> None:
        super().run(x, weights, ids.remainder(weights.experts).int(), shares, y)


class FullAtSixteen(Right):
    """Drops what an expert gets beyond sixteen tokens."""

    def run(self, x: Any, weights: ExpertWeights, ids: Any, shares: Any, y: Any) -> None:
        kept = ids.clone()
        for expert in range(weights.experts):
            token, rank = (ids == expert).nonzero(as_tuple=True)
            kept[token[16:], rank[16:]] = -1
        super().run(x, weights, kept, shares, y)


class LeavesPaddingUnwritten(Right):
    """Writes the rows of tokens that elected somebody."""

    def run(self, x: Any, weights: ExpertWeights, ids: Any, shares: Any, y: Any) -> None:
        some = (ids >= 0).any(dim=1)
        y[some] = reference.moe_experts(x[some], weights, ids[some], shares[some]).value.bfloat16()


class WritesPast(Right):
    """Writes one element behind its output."""

    def run(self, x: Any, weights: ExpertWeights, ids: Any, shares: Any, y: Any) -> None:
        super().run(x, weights, ids, shares, y)
        if y.untyped_storage().nbytes() > 2 * y.numel():
            torch.as_strided(y, (1,), (1,), y.numel()).zero_()


class Restless(Right):
    """Not the same twice."""

    def run(self, x: Any, weights: ExpertWeights, ids: Any, shares: Any, y: Any) -> None:
        super().run(x, weights, ids, shares, y)
        y *= torch.where(torch.rand_like(y) < 0.5, 1 + 2.0**-8, 1.0)


def judge(candidate: Any, shape: Shape = SHAPE, say: Callable[[str], None] = lambda _stage: None) -> Finding:
    return experts_trial.try_one(
        candidate, shape, device=torch.device("cpu"), capability=(12, 0), timer=lambda calls: len(calls) / 2, say=say
    )


def test_right_candidate_is_admitted_and_timed_at_every_m() -> None:
    stages: list[str] = []
    found = judge(Right(), say=stages.append)
    assert (found.verdict, found.times_us) == (Verdict.ADMITTED, ((1, 0.5), (4, 0.5)))
    assert list(dict.fromkeys(stages)) == ["first", "check", "time"]


def test_candidate_of_few_tokens_is_judged_by_those() -> None:
    found = judge(FewTokens())
    assert found.verdict is Verdict.ADMITTED, found.reason


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (OneScaleForBoth(), "times what is allowed"),
        (PaddingIsTheLastExpert(), "times what is allowed at tokens 40"),
        (FullAtSixteen(), "times what is allowed at tokens 40"),
        (LeavesPaddingUnwritten(), "unwritten or NaN at M=20"),
        (WritesPast(), "writes past its output at M=1"),
        (Restless(), "two calls differ at M=1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_wrong_candidate_is_left_out_with_what_is_wrong(candidate: Right, words: str) -> None:
    found = judge(candidate)
    assert found.verdict is Verdict.WRONG
    assert words in found.reason


def test_candidate_that_must_have_one_scale_is_given_one() -> None:
    candidate = OneScaleForBoth()
    candidate.one_scale = True
    assert judge(candidate).verdict is Verdict.ADMITTED


def test_candidate_that_does_not_take_the_shape_is_unsupported() -> None:
    found = judge(Restless(), Shape(128, 192, 8, 2))
    assert (found.verdict, found.reason) == (Verdict.UNSUPPORTED, "hidden size 192")


def test_small_sizes_are_tried_before_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_trial, "PADDED", (Shape(128, 128, 8, 2),))
    device = torch.device("cpu")
    assert experts_trial.try_padded(Right(), device, (12, 0), lambda _stage: None) is None
    reason = experts_trial.try_padded(OneScaleForBoth(), device, (12, 0), lambda _stage: None)
    assert reason is not None
    assert "8 experts [128, 128], 2 a token" in reason


def test_our_candidates_say_why_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    small, grouped = experts.default_candidates()
    assert (small.name, grouped.name) == admission.EXPERTS
    monkeypatch.setattr(build, "find", lambda _library: None)
    assert "not built" in (small.unavailable() or "")
    assert "2080" in (small.supports((9, 0), Shape(1024, 2080, 256, 8)) or "")
    assert "2080" in (grouped.supports((9, 0), Shape(1024, 2080, 256, 8)) or "")
    assert (
        small.supports((9, 0), Shape(1024, 2048, 256, 8)) is grouped.supports((9, 0), Shape(1024, 2048, 256, 8)) is None
    )


def test_plan_follows_the_number_of_tokens_and_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Named(Right):
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, x: Any, weights: ExpertWeights, ids: Any, shares: Any, y: Any) -> None:
            assert ids.dtype is torch.int32
            assert shares.dtype is torch.float32
            calls.append((self.name, x.shape[0]))
            super().run(x, weights, ids, shares, y)

    monkeypatch.setattr(experts, "servers", lambda: {name: Named(name) for name in ("few", "many")})
    case = experts_trial.make_case(SHAPE, torch.device("cpu"), one_scale=False)
    spans = (Span(4, "few"), Span(WITHOUT_LIMIT, "many"))
    for tokens in (0, 1, 4, 5):
        x, ids, shares = case.x[:tokens], case.ids[:tokens].long(), case.shares[:tokens].double()
        y = torch.full_like(x, float("nan"))
        experts.run(spans, x, case.weights, ids, shares, y)
        assert torch.equal(y, reference.moe_experts(x, case.weights, ids.int(), shares.float()).value.bfloat16())
    assert calls == [("few", 1), ("few", 4), ("many", 5)]


def test_plan_given_another_dtype_is_refused() -> None:
    case = experts_trial.make_case(SHAPE, torch.device("cpu"), one_scale=False)
    with pytest.raises(UsageError, match="activations of experts"):
        experts.run((), case.x[:1].float(), case.weights, case.ids[:1], case.shares[:1], case.x[:1].float())


@pytest.mark.parametrize(
    ("spans", "most"),
    [((), 0), ((Span(WITHOUT_LIMIT, "b"),), 0), ((Span(16, "a"), Span(WITHOUT_LIMIT, "b")), 16)],
)
def test_tokens_of_counts_from_one_on(spans: tuple[Span, ...], most: int) -> None:
    assert experts.tokens_of(spans, "a") == most


def test_table_of_experts_survives_its_file_and_names_them() -> None:
    times = tuple((m, 1.0) for m in TIMED_TOKENS)
    found = Finding(candidate="right", shape=SHAPE, verdict=Verdict.ADMITTED, times_us=times)
    table = Table(facts={}, findings=(found,), took_s=0.0)
    assert from_json(json.loads(json.dumps(to_json(table)))) == table
    assert admission.summary(table) == ["8 experts [128, 128], 2 a token: M>=1 right"]
    assert admission.serving(table, Shape(128, 128)) == ()
