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
from qwen_nvfp4_serve.kernels.admission.experts import ExpertsCall  # noqa: E402
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, WITHOUT_LIMIT, from_json, to_json  # noqa: E402
from qwen_nvfp4_serve.kernels.nvfp4_moe import reference  # noqa: E402

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
    compiles = False

    def unavailable(self) -> str | None:
        return None

    def supports(self, capability: tuple[int, int], shape: Shape) -> str | None:
        return None if shape.k % 128 == 0 else f"hidden size {shape.k}"

    def run(self, call: ExpertsCall) -> None:
        call.y[:] = reference.moe_experts(call.x, call.weights, call.ids, call.shares).value.bfloat16()


class FewTokens(Right):
    """Takes up to eight tokens."""

    max_tokens = 8


class OneScaleForBoth(Right):
    """Gives the up rows the gate's scale, as vLLM's own loading does."""

    def run(self, call: ExpertsCall) -> None:
        weights = dataclasses.replace(call.weights, up_scale=call.weights.gate_scale)
        super().run(dataclasses.replace(call, weights=weights))


class PaddingIsTheLastExpert(Right):
    """Indexes with what it is given."""

    def run(self, call: ExpertsCall) -> None:
        super().run(dataclasses.replace(call, ids=call.ids.remainder(call.weights.experts).int()))


class FullAtSixteen(Right):
    """Drops what an expert gets beyond sixteen tokens."""

    def run(self, call: ExpertsCall) -> None:
        kept = call.ids.clone()
        for expert in range(call.weights.experts):
            token, rank = (call.ids == expert).nonzero(as_tuple=True)
            kept[token[16:], rank[16:]] = -1
        super().run(dataclasses.replace(call, ids=kept))


class LeavesPaddingUnwritten(Right):
    """Writes the rows of tokens that elected somebody."""

    def run(self, call: ExpertsCall) -> None:
        some = (call.ids >= 0).any(dim=1)
        x, ids, shares = call.x[some], call.ids[some], call.shares[some]
        call.y[some] = reference.moe_experts(x, call.weights, ids, shares).value.bfloat16()


class WritesPast(Right):
    """Writes one element behind its output."""

    def run(self, call: ExpertsCall) -> None:
        super().run(call)
        if call.y.untyped_storage().nbytes() > 2 * call.y.numel():
            torch.as_strided(call.y, (1,), (1,), call.y.numel()).zero_()


class Restless(Right):
    """Not the same twice."""

    def run(self, call: ExpertsCall) -> None:
        super().run(call)
        call.y.mul_(torch.where(torch.rand_like(call.y) < 0.5, 1 + 2.0**-8, 1.0))


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


class Rounds(Right):
    """Rounds activations before both products, as FlashInfer does."""

    rounds_activations = True
    factor = 1.0

    def run(self, call: ExpertsCall) -> None:
        assert call.input_scales is not None
        case = experts_trial.Case(call.weights, call.x, call.ids, call.shares, call.input_scales * self.factor)
        call.y[:] = experts_trial.rounded_reference(case, len(call.x)).value.bfloat16()


class RoundsForOneScale(Rounds):
    """Takes one input scale for all experts, with which the products are not multiplied again."""

    def run(self, call: ExpertsCall) -> None:
        assert call.input_scales is not None
        same = call.input_scales.max(1, keepdim=True).values
        super().run(call)
        call.y.mul_(float(same[0, 0] / call.input_scales[0, 0]))


def test_candidate_that_rounds_is_held_to_the_rounded_definition() -> None:
    found = judge(Rounds())
    assert found.verdict is Verdict.ADMITTED, found.reason
    for candidate, words in ((RoundsForOneScale(), "times what is allowed"), (OneScaleForBoth(), "times what")):
        candidate.rounds_activations = True
        found = judge(candidate)
        assert found.verdict is Verdict.WRONG
        assert words in found.reason


def test_candidate_that_rounds_is_not_held_to_the_exact_one() -> None:
    candidate = Right()
    candidate.rounds_activations = True
    found = judge(candidate)
    assert found.verdict is Verdict.WRONG  # activations as they are differ by more than the format's rounding does


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
    small, grouped, library = found = experts.default_candidates()
    assert tuple(candidate.name for candidate in found) == admission.EXPERTS
    exact = tuple(candidate.name for candidate in found if not candidate.rounds_activations)
    assert exact == admission.EXACT_EXPERTS
    assert "9.0 is not 12.x" in (library.supports((9, 0), Shape(1024, 2048, 256, 8)) or "")
    assert "64" in (library.supports((12, 0), Shape(128, 256, 16, 4)) or "")
    assert library.supports((12, 1), Shape(512, 2048, 256, 8)) is None
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

        def run(self, call: ExpertsCall) -> None:
            assert call.ids.dtype is torch.int32
            assert call.shares.dtype is torch.float32
            assert call.input_scales is case.input_scales
            calls.append((self.name, call.x.shape[0]))
            super().run(call)

    monkeypatch.setattr(experts, "servers", lambda: {name: Named(name) for name in ("few", "many")})
    case = experts_trial.make_case(SHAPE, torch.device("cpu"))
    spans = (Span(4, "few"), Span(WITHOUT_LIMIT, "many"))
    for tokens in (0, 1, 4, 5):
        x, ids, shares = case.x[:tokens], case.ids[:tokens].long(), case.shares[:tokens].double()
        y = torch.full_like(x, float("nan"))
        call = ExpertsCall(x=x, weights=case.weights, ids=ids, shares=shares, y=y, input_scales=case.input_scales)
        experts.run(spans, call)
        assert torch.equal(y, reference.moe_experts(x, case.weights, ids.int(), shares.float()).value.bfloat16())
    assert calls == [("few", 1), ("few", 4), ("many", 5)]


def test_warm_up_calls_each_server_of_the_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from qwen_nvfp4_serve.kernels.nvfp4_moe import large_m

    calls: list[str] = []

    class Named(Right):
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, call: ExpertsCall) -> None:
            assert call.x.shape == (1, SHAPE.k)
            assert call.ids.tolist() == [[0, 1]]
            calls.append(self.name)

    small, grouped, library = admission.EXPERTS
    monkeypatch.setattr(experts, "servers", lambda: {name: Named(name) for name in admission.EXPERTS})
    monkeypatch.setattr(large_m, "warm_up", lambda _weights, top_k: calls.append(f"tiles for {top_k}"))
    case = experts_trial.make_case(SHAPE, torch.device("cpu"))
    spans = (Span(8, small), Span(64, grouped), Span(128, small), Span(WITHOUT_LIMIT, library))
    experts.warm_up(spans, case.weights, SHAPE.top_k, case.input_scales)
    assert calls == [small, "tiles for 2", library]


def test_plan_given_another_dtype_is_refused() -> None:
    case = experts_trial.make_case(SHAPE, torch.device("cpu"))
    call = case.call(Right(), slice(0, 1), case.x[:1].float())
    with pytest.raises(UsageError, match="activations of experts"):
        experts.run((), dataclasses.replace(call, x=case.x[:1].float()))


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
