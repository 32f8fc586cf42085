"""Compiled norms that hold a row at once: torch's own choice for a pretended graph, vLLM's place, and a real card."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sympy = pytest.importorskip("sympy")

from qwen_nvfp4_patches import backend, gpu_whole_rows, seams  # noqa: E402
from qwen_nvfp4_serve.errors import UnsupportedHostError  # noqa: E402

NAME = "should_use_persistent_reduction"


@pytest.fixture
def choices() -> Iterator[Any]:
    """torch's class of choices with ours in it, restored afterwards."""
    from torch._inductor.choices import InductorChoices

    stock = seams.stock_of(InductorChoices.should_use_persistent_reduction)
    for _ in range(2):
        seams.replace_function(
            InductorChoices, NAME, gpu_whole_rows.at_once, parameters=("features", "cooperative_reduction")
        )
    assert seams.stock_of(InductorChoices.should_use_persistent_reduction) is stock
    yield InductorChoices
    InductorChoices.should_use_persistent_reduction = staticmethod(stock)


def chosen(choices: Any, columns: int, *, hint: str = "INNER", cooperative: bool = False) -> bool:
    """What an instance of torch's class answers, as torch asks it."""
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    whole = sympy.Integer(columns)
    features = SimpleNamespace(get_reduction_hint=lambda: ReductionHint[hint], reduction_numel=whole, numel=whole * 8)
    sizes = SimpleNamespace(
        statically_known_leq=lambda a, b: a <= b, optimization_hint=lambda size: size, size_hint=lambda size: size
    )
    with V.set_graph_handler(SimpleNamespace(sizevars=sizes)):
        return bool(choices().should_use_persistent_reduction(features, cooperative))


@pytest.mark.parametrize("columns", [128, 1024, 2048, 5120, 8192])
def test_rows_of_the_models_are_held_at_once(choices: Any, columns: int) -> None:
    assert chosen(choices, columns)


def test_longer_rows_and_other_reductions_are_torchs_to_choose(choices: Any) -> None:
    assert not chosen(choices, 8193)
    assert not chosen(choices, 2048, hint="OUTER")
    assert not chosen(choices, 17_408, cooperative=True)
    with torch._inductor.config.patch({"triton.persistent_reductions": False}):
        assert not chosen(choices, 1024)


@pytest.mark.usefixtures("cpu_vllm")
class TestInVllm:
    """The place where vLLM says how a graph is compiled."""

    @pytest.fixture
    def interface(self, choices: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        from vllm.compilation import compiler_interface

        monkeypatch.setenv(backend.VARIABLE, "hybrid")
        choices.should_use_persistent_reduction = staticmethod(seams.stock_of(choices.should_use_persistent_reduction))
        stock = seams.stock_of(compiler_interface.set_inductor_config)
        compiler_interface.set_inductor_config = stock
        yield compiler_interface
        compiler_interface.set_inductor_config = stock

    def test_choice_is_replaced_when_a_graph_is_compiled(self, interface: Any, choices: Any) -> None:
        gpu_whole_rows._apply()
        gpu_whole_rows._apply()
        assert not chosen(choices, 5120)
        found: dict[str, Any] = {}
        interface.set_inductor_config(found, SimpleNamespace(is_single_size=lambda: False))
        assert chosen(choices, 5120)
        assert found == {}

    def test_torch_that_chooses_otherwise_is_refused(
        self, interface: Any, choices: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(choices, NAME, lambda this, features: (this, features))
        gpu_whole_rows._apply()
        with pytest.raises(UnsupportedHostError, match="seen this, features"):
            interface.set_inductor_config({}, SimpleNamespace(is_single_size=lambda: False))


def test_only_hybrid_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for which, needed in (("hybrid", True), ("auto", False), ("stock", False)):
        monkeypatch.setenv(backend.VARIABLE, which)
        assert gpu_whole_rows.PATCH.needed().needed is needed


@pytest.mark.gpu
@pytest.mark.usefixtures("choices")
@pytest.mark.parametrize("columns", [2048, 5120])
def test_compiled_norm_is_one_block_a_row_and_right_on_a_card(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """As vLLM writes the norm that it compiles: what is added and what is normed."""
    from torch._inductor.utils import run_and_get_code

    def norm(y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = y.float() + residual.float()
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (weight.float() + 1.0)
        return scaled.to(y.dtype), x.to(y.dtype)

    weight = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)  # or the code would not be written
    compiled = torch.compile(norm, dynamic=True, fullgraph=True)
    for rows in (4096, 8, 1):
        y, residual = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for tensor in (y, residual):
            torch._dynamo.mark_static(tensor, 1)
        torch._dynamo.mark_static(weight, 0)
        found, codes = run_and_get_code(compiled, y, residual, weight)
        assert all("triton_red" not in code for code in codes)
        assert rows != 4096 or any("triton_per" in code for code in codes)
        exact = norm(y.double(), residual.double(), weight.double())
        for ours, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(ours.double(), expected, rtol=2**-7, atol=2**-8)
