"""The tiled GEMM on a card: every tile and number of parts against FP64, repeats, poison, graphs, torch.compile."""

from __future__ import annotations

import pytest
import torch

from qwen_nvfp4_serve.kernels import nvfp4, nvfp4_linear
from qwen_nvfp4_serve.kernels.admission import Span, dispatch
from qwen_nvfp4_serve.kernels.nvfp4_linear import reference, tiled

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SIZES = ((96, 5120), (1000, 640), (200, 128), (5120, 6144), (34816, 5120))
TOKENS = (1, 17, 24, 63, 64, 65, 100, 128, 129, 200, 256, 257, 300, 511, 512)
MARGIN = 64
SPANS = (Span(16, "qwen-dequantized"), Span(512, "qwen-tiled"), Span(2**31 - 1, "qwen-dequantized"))


class Case:
    """A random weight with two shards of unequal scale, activations, and what they should give."""

    def __init__(self, n: int, k: int) -> None:
        generator = torch.Generator("cuda").manual_seed(n + k)
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=generator)
        bytes_ = torch.randint(1, 127, (n, k // 16), dtype=torch.uint8, device="cuda", generator=generator)
        scales = bytes_.view(torch.float8_e4m3fn)
        cut = n // 16 * 8
        self.n, self.k = n, k
        self.weight = nvfp4_linear.prepare_weight(packed, scales, (cut, n - cut), (2.0e-4, 7.7e-3))
        self.x = torch.randn(tiled.MAX_TOKENS, k, device="cuda", generator=generator).bfloat16()
        self.bias = torch.randn(n, device="cuda", generator=generator).bfloat16()
        dense = nvfp4.dequantize_nvfp4(packed, scales, self.weight.row_scale, dtype=torch.float64)
        self.expected = self.x.double() @ dense.T
        self.shards, self.plan = dispatch.shard_tensor(self.weight), dispatch.plan_tensor(SPANS)
        self.bound = reference.error_bound(self.x, dense, self.expected)
        torch.cuda.synchronize()

    def run(self, m: int, *, bias: bool = False, tile: tiled.Tile | None = None, parts: int | None = None) -> None:
        """Twice into memory full of NaN with a margin behind it: equal, and every element within its bound."""
        results = []
        for _ in range(2):
            memory = torch.full((m * self.n + MARGIN,), float("nan"), dtype=torch.bfloat16, device="cuda")
            y = memory[: m * self.n].view(m, self.n)
            tiled.linear(self.x[:m], self.weight, y, bias=self.bias if bias else None, tile=tile, parts=parts)
            assert memory[m * self.n :].isnan().all()
            results.append(y)
        assert torch.equal(*results)
        self.check(results[0], bias=bias)

    def check(self, y: torch.Tensor, *, bias: bool = False, factor: float = 1.0) -> None:
        """Every element of y, for activations times `factor`, a power of two."""
        m = y.shape[0]
        extra = self.bias.double() if bias else torch.zeros_like(self.bias, dtype=torch.float64)
        bound = self.bound[:m] + extra.abs() * 2**-8
        assert ((y.double() / factor - self.expected[:m] - extra).abs() <= bound).all()


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


@pytest.fixture(scope="module")
def small() -> Case:
    return Case(1000, 640)


def in_use() -> tuple[tiled.Tile, ...]:
    return tiled.tiles_of(torch.cuda.get_device_capability())


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_linear_every_m_is_within_the_bound_and_repeats(case: Case, bias: bool) -> None:
    for m in TOKENS:
        case.run(m, bias=bias)


@pytest.mark.parametrize("index", range(len(tiled.WGMMA_TILES)))
@pytest.mark.parametrize("parts", tiled.PARTS)
def test_linear_every_tile_and_number_of_parts_is_within_the_bound(case: Case, index: int, parts: int) -> None:
    if index >= len(in_use()):
        pytest.skip("this card has fewer tiles")
    for m in (17, 130, 300):
        case.run(m, tile=in_use()[index], parts=parts)
    case.run(70, bias=True, tile=in_use()[index], parts=parts)


@pytest.mark.parametrize("factor", [2.0**-12, 2.0**12])
def test_linear_inputs_beyond_the_range_of_fp16_are_within_the_bound(case: Case, factor: float) -> None:
    for m in (64, 200):
        y = torch.empty(m, case.n, dtype=torch.bfloat16, device="cuda")
        tiled.linear(case.x[:m] * factor, case.weight, y)
        case.check(y, factor=factor)


def test_linear_codes_of_every_value_and_scale_are_exact() -> None:
    """The activations are the identity: each output is one weight, which BF16 holds at a global scale of 1."""
    n = k = 512
    generator = torch.Generator("cuda").manual_seed(7)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=generator)
    every = (torch.arange(n * k // 16, device="cuda") % 127).to(torch.uint8).view(n, k // 16)
    weight = nvfp4_linear.prepare_weight(packed, every.view(torch.float8_e4m3fn), (n,), (1.0,))
    dense = nvfp4.dequantize_nvfp4(packed, every.view(torch.float8_e4m3fn), weight.row_scale, dtype=torch.float64)
    x = torch.eye(k, dtype=torch.bfloat16, device="cuda")
    for tile in in_use():
        for parts in tiled.PARTS:
            y = torch.empty(k, n, dtype=torch.bfloat16, device="cuda")
            tiled.linear(x, weight, y, tile=tile, parts=parts)
            assert torch.equal(y.double(), dense.T)


def test_linear_takes_no_more_than_its_workspace(case: Case) -> None:
    for m in (64, 128, 512):
        y = torch.empty(m, case.n, dtype=torch.bfloat16, device="cuda")
        tiled.linear(case.x[:m], case.weight, y)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        tiled.linear(case.x[:m], case.weight, y)
        taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        assert taken <= tiled.WORKSPACE_BYTES
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        parts = tiled.parts_for(m, case.n, case.k, tiled.tile_for(m, in_use()), processors)
        assert taken == tiled.workspace_bytes(m, case.n, case.k, parts)


def admitted(case: Case, x: torch.Tensor) -> torch.Tensor:
    """The op that a model calls, under a plan that has the tiled GEMM in its middle."""
    w, op = case.weight, torch.ops.qwen_nvfp4.admitted_linear
    result: torch.Tensor = op(x, w.packed, w.scales, w.row_scale, case.shards, case.plan, None, case.bias)
    return result


@pytest.mark.parametrize("m", [17, 64, 100, 300, 512])
def test_op_in_a_graph_follows_new_inputs(small: Case, m: int) -> None:
    dispatch.warm_up(SPANS, small.weight)
    x, stream = small.x[:m].clone(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        y = admitted(small, x)  # the first call with so many tokens is the captured one
    graph.replay()
    torch.cuda.synchronize()
    small.check(y, bias=True)
    assert torch.equal(y, admitted(small, x))
    x.copy_(-small.x[:m])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, admitted(small, x))
    assert not torch.equal(y, admitted(small, -x))


def test_warm_up_leaves_nothing_to_compile(small: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    dispatch.warm_up(SPANS, small.weight)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a kernel was compiled after the warm-up")

    monkeypatch.setattr(JITFunction, "_do_compile", refuse)
    for m in TOKENS:
        small.run(m)
        small.run(m, bias=True)


def test_op_compiled_by_torch_equals_the_eager_one(small: Case) -> None:
    dispatch.warm_up(SPANS, small.weight)
    step = torch.compile(lambda x: admitted(small, x) * 2, backend="aot_eager", dynamic=True, fullgraph=True)
    for m in (17, 64, 200):
        x = small.x[:m]
        assert torch.equal(step(x), admitted(small, x) * 2)
