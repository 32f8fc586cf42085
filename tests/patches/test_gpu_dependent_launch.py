"""Compiled kernels that wait for the kernel ahead: as torch writes them for a pretended card, and on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches import backend, gpu_dependent_launch, seams  # noqa: E402

WAIT, RELEASE = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


@pytest.fixture
def filter_pdl() -> Iterator[Any]:
    """torch's class of Triton kernels, restored afterwards."""
    from torch._inductor.codegen.triton import TritonKernel

    stock = seams.stock_of(TritonKernel._filter_pdl)
    yield TritonKernel
    TritonKernel._filter_pdl = stock


def lines_of(kernel_class: Any, lines: list[Any], *, dependent: bool = True) -> list[Any]:
    """What is left of a kernel's lines."""
    code = SimpleNamespace(_lines=list(lines))
    kernel = SimpleNamespace(
        _enable_pdl_codegen=lambda: dependent, GDC_WAIT=kernel_class.GDC_WAIT, GDC_LAUNCH=kernel_class.GDC_LAUNCH
    )
    kernel_class._filter_pdl(kernel, code)
    return code._lines


@pytest.fixture
def patched(filter_pdl: Any) -> Any:
    """torch's class with our filter."""
    seams.replace_function(filter_pdl, "_filter_pdl", gpu_dependent_launch.waiting_first, parameters=("self", "code"))
    return filter_pdl


def test_kernel_that_only_stores_waits_too(patched: Any) -> None:
    """torch writes no wait into one that reads nothing of the kernel ahead: what follows would wait for it alone."""
    assert lines_of(patched, ["tl.store(out_ptr0 + x0, 0.0)"]) == [WAIT, RELEASE, "tl.store(out_ptr0 + x0, 0.0)"]


def test_wait_comes_before_the_first_load_and_the_release_right_after(patched: Any) -> None:
    written = ["a = tl.load(p)", WAIT, RELEASE, WAIT, "b = tl.load(q)", WAIT, RELEASE, "tl.store(o, a + b)"]
    expected = [WAIT, RELEASE, "a = tl.load(p)", "b = tl.load(q)", "tl.store(o, a + b)"]
    assert lines_of(patched, written) == expected


def test_kernel_that_is_not_launched_so_is_left_alone(patched: Any) -> None:
    assert lines_of(patched, ["tl.store(o, 0.0)"], dependent=False) == ["tl.store(o, 0.0)"]


def test_lines_that_are_no_text_stay(patched: Any) -> None:
    deferred = object()
    assert lines_of(patched, [deferred, WAIT]) == [WAIT, RELEASE, deferred]


@pytest.mark.usefixtures("cpu_vllm")
class TestInVllm:
    """The place where vLLM says how a graph is compiled."""

    @pytest.fixture
    def interface(self, filter_pdl: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        from vllm.compilation import compiler_interface

        monkeypatch.setenv(backend.VARIABLE, "hybrid")
        stock = seams.stock_of(compiler_interface.set_inductor_config)
        assert filter_pdl
        yield compiler_interface
        compiler_interface.set_inductor_config = stock

    def config(self, interface: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        interface.set_inductor_config(found, SimpleNamespace(is_single_size=lambda: False))
        return found

    def test_graph_is_compiled_for_dependent_launch(self, interface: Any, filter_pdl: Any) -> None:
        assert self.config(interface) == {}
        gpu_dependent_launch._apply()
        gpu_dependent_launch._apply()
        assert self.config(interface) == {gpu_dependent_launch.OPTION: True}
        assert seams.stock_of(filter_pdl._filter_pdl) is not filter_pdl._filter_pdl
        # torch knows the option by this name
        assert hasattr(torch._inductor.config.triton, gpu_dependent_launch.OPTION.removeprefix("triton."))

    def test_vllm_calls_it_by_that_name(self, interface: Any) -> None:
        """A compiler adaptor that keeps a reference of its own would not see the change."""
        import inspect

        for adaptor in (interface.InductorStandaloneAdaptor, interface.InductorAdaptor):
            assert "set_inductor_config(current_config, compile_range)" in inspect.getsource(adaptor.compile)

    def test_torch_that_writes_kernels_otherwise_is_refused(
        self, interface: Any, filter_pdl: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from qwen_nvfp4_serve.errors import UnsupportedHostError

        monkeypatch.setattr(filter_pdl, "_filter_pdl", lambda this, code, more: (this, code, more))
        gpu_dependent_launch._apply()
        with pytest.raises(UnsupportedHostError, match="seen this, code, more, expected self, code"):
            self.config(interface)


def test_only_hybrid_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, needed in (("hybrid", True), ("auto", False), ("stock", False)):
        monkeypatch.setenv(backend.VARIABLE, chosen)
        assert gpu_dependent_launch.PATCH.needed().needed is needed


@pytest.mark.gpu
@pytest.mark.usefixtures("patched")
def test_chain_of_compiled_kernels_is_right_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow kernels, fills for an op that cannot be seen through, and kernels that read both, all in one graph."""
    from torch._inductor.utils import run_and_get_code

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no programmatic dependent launch before compute capability 9.0")

    @torch.library.custom_op("qwen_nvfp4_tests::raise_to", mutates_args=("filled",))
    def raise_to(filled: torch.Tensor, y: torch.Tensor) -> None:
        filled.add_(y[: filled.shape[0]])

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            y = torch.softmax(x.float() * 3.0, -1).sin()
            filled = torch.zeros_like(y)
            torch.ops.qwen_nvfp4_tests.raise_to(filled, y)
            x = (filled - y * 0.5 + x.float() * 0.25).to(x.dtype)
        return x

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)  # or the code would not be written
    compiled = torch.compile(chain, options={gpu_dependent_launch.OPTION: True}, fullgraph=True)
    first, codes = run_and_get_code(compiled, x)
    kernels = [part for code in codes for part in code.split("def triton_")[1:]]
    assert kernels
    assert all(part.count(WAIT) == part.count(RELEASE) == 1 for part in kernels)
    assert all(part.index(RELEASE) < part.index("tl.load") for part in kernels if "tl.load" in part)
    torch.testing.assert_close(first, chain(x), rtol=2**-7, atol=2**-7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = compiled(x)
    for _ in range(50):
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(again, first)
