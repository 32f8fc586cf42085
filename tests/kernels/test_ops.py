"""Ops as the dispatcher knows them: traced, compiled, checked by torch's own rules, and cheap to call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from qwen_nvfp4_serve.kernels import ops
from qwen_nvfp4_serve.kernels.admission import bf16

SCHEMA = "(Tensor x, Tensor[] more, Tensor? bias, int times) -> Tensor"


def scaled(x: torch.Tensor, more: list[torch.Tensor], bias: torch.Tensor | None, times: int) -> torch.Tensor:
    total = x * times + sum(more)
    return total if bias is None else total + bias


def like_x(x: torch.Tensor, more: list[torch.Tensor], bias: torch.Tensor | None, times: int) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture
def op() -> Iterator[Any]:
    yield ops.register("scaled_for_tests", SCHEMA, scaled, like_x)
    ops._libraries.pop("scaled_for_tests")._destroy()


def test_op_computes_what_its_function_does(op: Any) -> None:
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(op(x, [x, x], None, 3), 5 * x)
    assert torch.equal(torch.ops.qwen_nvfp4.scaled_for_tests(x, [], x, 1), 2 * x)


def test_op_passes_torchs_own_checks(op: Any) -> None:
    x = torch.randn(4, 8)
    result = torch.library.opcheck(op, (x, [x], x.clone(), 2))
    assert set(result.values()) == {"SUCCESS"}


def test_op_on_tensors_without_data_gives_the_fakes_shape(op: Any) -> None:
    x = torch.empty(4, 8, device="meta", dtype=torch.bfloat16)
    y = op(x, [x], None, 2)
    assert (y.shape, y.dtype, y.device.type) == ((4, 8), torch.bfloat16, "meta")


def test_op_is_one_node_of_a_whole_graph_for_every_size(op: Any) -> None:
    graphs: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module

    compiled = torch.compile(lambda x: op(x + 1, [x], None, 2) * 2, backend=backend, fullgraph=True, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), 2 * (2 * (x + 1) + x))
    (graph,) = graphs
    assert [n.target for n in graph.graph.nodes if "scaled_for_tests" in str(n.target)] == [op]


def test_op_without_a_backend_says_so_there() -> None:
    op = ops.register("card_alone_for_tests", "(Tensor x) -> Tensor", torch.clone, torch.empty_like, backends=("CUDA",))
    with pytest.raises(NotImplementedError, match="card_alone_for_tests"):
        op(torch.zeros(1))


def test_name_registered_again_is_the_later_function(op: Any) -> None:
    x = torch.ones(2)
    again = ops.register("scaled_for_tests", SCHEMA, lambda x, *_: x - 1, like_x)
    assert torch.equal(again(x, [], None, 3), x - 1)
    assert torch.equal(torch.ops.qwen_nvfp4.scaled_for_tests(x, [], None, 3), x - 1)
    assert torch.equal(torch.compile(again, backend="aot_eager", fullgraph=True)(x, [], None, 3), x - 1)


def python_files(function: Callable[[], object]) -> list[str]:
    """The files of the Python functions that `function` runs, itself aside."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen[1:]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_call_of_an_op_runs_no_python_but_the_ops_own(mode: Any) -> None:
    x, weight = torch.zeros(1, 128).bfloat16(), torch.zeros(8, 128).bfloat16()
    with mode():
        bf16.op(x, weight, None)
        seen = python_files(lambda: bf16.op(x, weight, None))
    assert set(seen) - {torch._ops.__file__} == {bf16.__file__}  # the call's own first frame is torch's
