"""Admission of BF16 layers and the op that follows it, with a stand-in for our kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import admission, bf16_linear
from qwen_nvfp4_serve.kernels.admission import Finding, Shape, Table, Verdict, bf16, trial
from qwen_nvfp4_serve.kernels.admission.table import BF16_BITS, TIMED_TOKENS, finding_from_json, finding_to_json

SHAPE = Shape(200, 256, bits=BF16_BITS)
CPU = torch.device("cpu")


def dense(x: Any, weight: Any, bias: Any, y: Any) -> None:
    """The definition: one rounding."""
    y[:] = (x.double() @ weight.double().T + (0 if bias is None else bias.double())).bfloat16()


class Exact(bf16.SmallM):
    """Our candidate with the definition in its kernel's place."""

    def unavailable(self) -> str | None:
        return None

    def run(self, x: Any, weight: Any, y: Any, *, bias: Any = None, scales: Any = None) -> None:  # noqa: ARG002
        dense(x, weight, bias, y)


class OneColumnOff(Exact):
    """Leaves out the last column."""

    def run(self, x: Any, weight: Any, y: Any, *, bias: Any = None, scales: Any = None) -> None:  # noqa: ARG002
        dense(x[:, :-1], weight[:, :-1], bias, y)


def judge(candidate: Any) -> Finding:
    return trial.try_one(
        candidate, SHAPE, device=CPU, capability=(9, 0), timer=lambda calls: float(len(calls)), say=lambda _: None
    )


def test_right_candidate_is_admitted_for_the_tokens_that_it_takes() -> None:
    found = judge(Exact())
    assert found.verdict is Verdict.ADMITTED
    assert [m for m, _ in found.times_us] == [m for m in TIMED_TOKENS if m <= bf16_linear.MAX_TOKENS]


def test_candidate_that_leaves_out_a_column_is_wrong() -> None:
    found = judge(OneColumnOff())
    assert found.verdict is Verdict.WRONG
    assert "what is allowed" in found.reason


def test_vendors_product_is_admitted_for_any_number_of_tokens() -> None:
    assert [m for m, _ in judge(bf16.Vendor()).times_us] == list(TIMED_TOKENS)


def test_padded_sizes_are_tried_in_bf16() -> None:
    reason = trial.try_padded(OneColumnOff(), BF16_BITS, CPU, (9, 0), lambda _: None)
    assert reason is not None
    assert "[200, 768]" in reason


def test_kernel_of_another_card_or_width_is_unsupported() -> None:
    assert "not among those compiled" in (bf16_linear.supports((7, 5), 64, 256) or "")
    assert "not a multiple of 128" in (bf16_linear.supports((9, 0), 64, 200) or "")
    assert bf16_linear.supports((12, 1), 248_320, 5120) is None


def test_finding_survives_json_with_its_bits() -> None:
    finding = Finding(candidate="a", shape=SHAPE, verdict=Verdict.WRONG, reason="b")
    assert finding_from_json(finding_to_json(finding)) == finding
    assert str(SHAPE) == "[200, 256] in BF16"


def test_names_of_the_candidates_are_those_that_are_asked_for() -> None:
    assert tuple(candidate.name for candidate in bf16.default_candidates()) == admission.BF16


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ours admitted for up to four tokens; the numbers of tokens that it was called with."""
    seen: list[int] = []

    def small_m(x: Any, weight: Any, bias: Any, y: Any) -> None:
        assert x.data_ptr() % 16 == 0
        assert x.stride(0) * 2 % 16 == 0
        seen.append(x.shape[0])
        dense(x, weight, bias, y)

    monkeypatch.setattr(bf16_linear, "small_m", small_m)
    few = tuple((m, 1.0) for m in TIMED_TOKENS if m <= 4)
    every = tuple((m, 2.0) for m in TIMED_TOKENS)
    ours, vendor = admission.BF16
    found = (
        Finding(candidate=ours, shape=SHAPE, verdict=Verdict.ADMITTED, times_us=few),
        Finding(candidate=vendor, shape=SHAPE, verdict=Verdict.ADMITTED, times_us=every),
    )
    bf16.follow(Table(facts={}, findings=found, took_s=0.0), (SHAPE,))
    yield seen
    bf16.follow(Table(facts={}, findings=(), took_s=0.0), ())


@pytest.mark.parametrize("m", [0, 1, 4, 5, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_op_follows_the_plan_for_every_number_of_tokens(calls: list[int], m: int, with_bias: bool) -> None:
    weight, x = torch.randn(200, 256).bfloat16(), torch.randn(m, 256).bfloat16()
    bias = torch.randn(200).bfloat16() if with_bias else None
    y = torch.ops.qwen_nvfp4.bf16_linear(x, weight, bias)
    assert calls == ([m] if 0 < m <= 4 else [])
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=2**-6)


def test_op_takes_any_strides_shapes_and_places(calls: list[int]) -> None:
    weight = torch.randn(200, 256).bfloat16()
    wide = torch.randn(2, 2, 600).bfloat16()
    for x in (wide[..., :256], wide[..., 1:257], wide[0, 0, :256], wide.transpose(0, 1)[..., 8:264]):
        y = torch.ops.qwen_nvfp4.bf16_linear(x, weight, None)
        assert y.shape == (*x.shape[:-1], 200)
        torch.testing.assert_close(y.float(), x.float() @ weight.float().T, rtol=2**-7, atol=2**-6)
    assert calls == [4, 4, 1, 4]


def test_op_leaves_other_shapes_and_views_of_weights_to_the_vendor(calls: list[int]) -> None:
    x = torch.randn(2, 256).bfloat16()
    for weight in (torch.randn(100, 256).bfloat16(), torch.randn(256, 200).bfloat16().T):
        assert torch.equal(torch.ops.qwen_nvfp4.bf16_linear(x, weight, None), torch.nn.functional.linear(x, weight))
    assert calls == []


def test_op_refuses_what_does_not_fit() -> None:
    weight = torch.randn(200, 256).bfloat16()
    for x in (torch.randn(1, 128).bfloat16(), torch.randn(1, 256)):
        with pytest.raises(UsageError, match="activations of a BF16 layer"):
            torch.ops.qwen_nvfp4.bf16_linear(x, weight, None)


def test_op_is_one_node_of_a_compiled_graph(calls: list[int]) -> None:
    weight = torch.randn(200, 256).bfloat16()
    compiled = torch.compile(lambda x: torch.ops.qwen_nvfp4.bf16_linear(x, weight, None) * 2, backend="aot_eager")
    for m in (1, 9):
        x = torch.randn(m, 256).bfloat16()
        torch.testing.assert_close(compiled(x).float(), 2 * (x.float() @ weight.float().T), rtol=2**-7, atol=2**-5)
    assert calls == [1]


def halves(first: int, second: int, k: int, *, apart: int = 0) -> tuple[Any, Any]:
    """Two weights in one memory, so many rows apart."""
    memory = torch.randn(first + apart + second, k).bfloat16()
    return memory[:first], memory[first + apart :]


def test_two_layers_that_lie_behind_each_other_are_one_product(calls: list[int]) -> None:
    first, second = halves(192, 8, 256)
    found = bf16.joined(first, second)
    assert found is not None
    assert found.data_ptr() == first.data_ptr()
    assert torch.equal(found, torch.cat((first, second)))
    x = torch.randn(3, 256).bfloat16()
    y = torch.ops.qwen_nvfp4.bf16_linear_of_two(x, first, second)
    assert calls == [3]  # the plan is for both together
    torch.testing.assert_close(y.float(), x.float() @ found.float().T, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("m", [0, 1, 9])
def test_two_layers_that_lie_elsewhere_are_two_products(calls: list[int], m: int) -> None:
    first, second = halves(192, 8, 256)
    columns = torch.randn(200, 512).bfloat16()
    x = torch.randn(m, 256).bfloat16()
    others = (
        (first, second.clone()),
        (second, first),
        halves(192, 8, 256, apart=1),
        (columns[:192, :256], columns[192:, :256]),
    )
    memory = torch.randn(6, 256).bfloat16().flatten()  # the second one's rows are shorter
    assert bf16.joined(memory[:1024].view(4, 256), memory[1024:1280].view(2, 128)) is None
    for one, other in others:
        assert bf16.joined(one, other) is None
        y = torch.ops.qwen_nvfp4.bf16_linear_of_two(x, one, other)
        expected = torch.cat([torch.nn.functional.linear(x, weight) for weight in (one, other)], dim=-1)
        assert torch.equal(y, expected)
    assert calls == []


def test_product_of_two_layers_is_one_node_of_a_compiled_graph(calls: list[int]) -> None:
    first, second = halves(192, 8, 256)

    def columns(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.qwen_nvfp4.bf16_linear_of_two(x, first, second)[:, 192:] * 2

    for m in (1, 9):
        x = torch.randn(m, 256).bfloat16()
        y = torch.compile(columns, backend="aot_eager", dynamic=True)(x)
        torch.testing.assert_close(y.float(), 2 * (x.float() @ second.float().T), rtol=2**-7, atol=2**-5)
    assert calls == [1]
