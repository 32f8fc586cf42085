"""Who serves which M, the shapes of a model, and what the kernels take beside it."""

from __future__ import annotations

import json

import pytest

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.kernels.admission import EXACT, Finding, Shape, Span, Table, Verdict, left_out, serving, summary
from qwen_nvfp4_serve.kernels.admission.shapes import TILED_BYTES, experts_shapes, linear_shapes, workspace_bytes
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, WITHOUT_LIMIT, from_json, to_json
from qwen_nvfp4_serve.models import find_model

SHAPE = Shape(1024, 512)


def finding(name: str, *, base_us: float, per_token_us: float = 0.0, most: int = 4096) -> Finding:
    times = tuple((m, base_us + per_token_us * m) for m in TIMED_TOKENS if m <= most)
    return Finding(candidate=name, shape=SHAPE, verdict=Verdict.ADMITTED, times_us=times)


SMALL = finding("small", base_us=5, per_token_us=1, most=64)
LARGE = finding("large", base_us=50)
WRONG = Finding(candidate="wrong", shape=SHAPE, verdict=Verdict.WRONG, reason="error 3 times what is allowed")
SLOW = finding("slow", base_us=100, per_token_us=2)


def table(*findings: Finding) -> Table:
    return Table(facts={"card": "x"}, findings=findings, took_s=2.5)


def test_serving_fastest_takes_each_m_and_neighbours_are_merged() -> None:
    assert serving(table(SMALL, LARGE, WRONG, SLOW), SHAPE) == (Span(32, "small"), Span(WITHOUT_LIMIT, "large"))


def test_serving_only_allowed_candidates() -> None:
    assert serving(table(SMALL, LARGE, SLOW), SHAPE, ("small", "slow"))[-1] == Span(WITHOUT_LIMIT, "slow")


@pytest.mark.parametrize("findings", [(), (SMALL,), (WRONG,)])
def test_serving_without_a_candidate_for_every_m_leaves_the_layer_to_vllm(findings: tuple[Finding, ...]) -> None:
    assert serving(table(*findings), SHAPE) == ()


def test_serving_another_shape_is_left_to_vllm() -> None:
    assert serving(table(LARGE), Shape(1, 2)) == ()


def test_left_out_names_wrong_and_slow_with_reasons() -> None:
    reasons = dict(left_out(table(SMALL, LARGE, WRONG, SLOW), SHAPE))
    assert set(reasons) == {"wrong", "slow"}
    assert reasons["wrong"] == "wrong: error 3 times what is allowed"
    assert reasons["slow"].startswith("slow: ")


def test_summary_says_who_serves_and_who_does_not() -> None:
    (line,) = summary(table(SMALL, LARGE, WRONG))
    assert line == ("[1024, 512]: M=1..32 small, M>=33 large (left out: wrong wrong: error 3 times what is allowed)")


def test_summary_of_a_shape_without_candidates_says_vllm() -> None:
    assert summary(table(WRONG))[0].startswith("[1024, 512]: vLLM (left out")


def test_table_through_json_is_the_same() -> None:
    before = table(SMALL, WRONG)
    assert from_json(json.loads(json.dumps(to_json(before)))) == before


@pytest.mark.parametrize("value", [{}, {"facts": {}, "findings": [{}], "took_s": 1}, {"facts": 3}])
def test_damaged_json_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(QwenNvfp4Error, match="kernel admission"):
        from_json(value)


@pytest.mark.parametrize("model", ["27b", "35b"])
def test_linear_shapes_cover_every_measured_layer(model: str) -> None:
    torch = pytest.importorskip("torch")
    assert torch
    from qwen_nvfp4_serve.kernels.nvfp4_linear.shapes import SHAPES

    row = find_model({"27b": "qwen3.5-27b", "35b": "qwen3.5-35b-a3b"}[model])
    assert row is not None
    measured = {Shape(s.n, s.k) for s in SHAPES if s.model == model}
    assert measured <= set(linear_shapes(row.dims))


def test_linear_shapes_of_two_cards_hold_half_of_each_weight() -> None:
    row = find_model("qwen3.5-27b")
    assert row is not None
    one, two = linear_shapes(row.dims), linear_shapes(row.dims, 2)
    assert len(one) == len(two)
    assert all(2 * b.n * b.k == a.n * a.k for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("model", "cards", "expected"),
    [
        ("qwen3.5-35b-a3b", 1, (Shape(1024, 2048, 256, 8),)),
        ("qwen3.5-35b-a3b", 2, (Shape(512, 2048, 256, 8),)),
        ("qwen3.5-27b", 1, ()),
    ],
)
def test_experts_shapes_are_the_routed_experts_of_one_card(model: str, cards: int, expected: tuple[Shape, ...]) -> None:
    row = find_model(model)
    assert row is not None
    assert experts_shapes(row.dims, cards) == expected


def test_workspace_covers_what_the_kernels_allocate() -> None:
    pytest.importorskip("torch")
    from qwen_nvfp4_serve.kernels.nvfp4_linear import launch, tiled
    from qwen_nvfp4_serve.kernels.nvfp4_moe import large_m

    assert TILED_BYTES == tiled.WORKSPACE_BYTES
    assert workspace_bytes(132, moe=False) >= 2 * (launch.DEQUANTIZED_BYTES + tiled.WORKSPACE_BYTES)
    assert workspace_bytes(132, moe=True) == workspace_bytes(132, moe=False) * 3 // 2 + large_m.WORKSPACE_BYTES


def test_default_candidates_have_the_names_that_tables_use() -> None:
    pytest.importorskip("torch")
    from qwen_nvfp4_serve.kernels import admission
    from qwen_nvfp4_serve.kernels.admission import candidates

    found = candidates.default_candidates()
    assert tuple(c.name for c in found) == admission.CANDIDATES
    assert tuple(c.name for c in found if not (c.rounds_activations or c.one_scale)) == EXACT
    assert candidates.DEFAULT == admission.SPEC


@pytest.mark.parametrize(
    ("environment", "counted"),
    [({"NVFP4_BACKEND": "hybrid"}, True), ({}, False), ({"NVFP4_BACKEND": "hybrid", "PATCHES": "off"}, False)],
    ids=["hybrid", "auto", "patches off"],
)
def test_plan_counts_our_workspace_only_where_our_kernels_are_asked_for(
    environment: dict[str, str], counted: bool
) -> None:
    from qwen_nvfp4_serve.capacity import plan_capacity
    from qwen_nvfp4_serve.host import Gpu
    from qwen_nvfp4_serve.planner import PlanModel
    from qwen_nvfp4_serve.settings import load_settings

    row = find_model("qwen3.5-27b")
    assert row is not None
    card = Gpu(name="NVIDIA GeForce RTX 5090", capability=(12, 0), memory_bytes=None, free_bytes=None, driver=None)
    found = plan_capacity(load_settings(None, environment).settings, PlanModel.from_row(row, row.dims), card).plan
    assert found is not None
    assert found.request.workspace_bytes == (workspace_bytes(170, moe=False) if counted else 0)
    assert any("our kernels" in reason for reason in found.reasons) is counted
