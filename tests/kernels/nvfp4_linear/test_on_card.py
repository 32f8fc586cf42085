"""The linear op on a card, element by element against FP64."""

from __future__ import annotations

import pytest
import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import nvfp4, nvfp4_linear
from qwen_nvfp4_serve.kernels.admission import shapes
from qwen_nvfp4_serve.kernels.nvfp4_linear import binding, launch, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SHAPES = ((128, 128), (200, 768), (96, 512), (1000, 640), (5120, 1024))
TOKENS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 25, 32, 33, 48, 63, 64)


class Case:
    """A random weight with two shards of unequal scale, activations, and what they should give."""

    def __init__(self, n: int, k: int, tokens: int = 64) -> None:
        generator = torch.Generator("cuda").manual_seed(n + k)
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=generator)
        bytes_ = torch.randint(1, 127, (n, k // 16), dtype=torch.uint8, device="cuda", generator=generator)
        scales = bytes_.view(torch.float8_e4m3fn)
        self.weight = nvfp4_linear.prepare_weight(packed, scales, (n // 16 * 8, n - n // 16 * 8), (2.0e-4, 7.7e-3))
        self.x = torch.randn(tokens, k, device="cuda", generator=generator).bfloat16()
        self.bias = torch.randn(n, device="cuda", generator=generator).bfloat16()
        dense = nvfp4.dequantize_nvfp4(packed, scales, self.weight.row_scale, dtype=torch.float64)
        self.expected = reference.linear_reference(self.x, packed, self.weight.scales, self.weight.row_scale)
        self.bound = reference.error_bound(self.x, dense, self.expected)
        torch.cuda.synchronize()

    def run(self, m: int, *, variant: int = -1, grid: int = 0, bias: bool = False) -> torch.Tensor:
        """One small-M launch into poisoned memory, with a poisoned margin that must stay as it was."""
        n = self.weight.packed.shape[0]
        memory = torch.full((m + 1, n + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
        w = self.weight
        offset = self.bias if bias else None
        y = memory[:m, :n]
        launch.small_m(self.x[:m], w.packed, w.scales, w.row_scale, offset, y, variant=variant, grid=grid)
        assert memory[m].isnan().all()
        assert memory[:, n:].isnan().all()
        return y

    def check(self, y: torch.Tensor, *, bias: bool = False) -> None:
        """Every element within its bound."""
        m = y.shape[0]
        extra = self.bias.double() if bias else torch.zeros_like(self.bias, dtype=torch.float64)
        bound = self.bound[:m] + extra.abs() * 2**-8
        assert ((y.double() - self.expected[:m] - extra).abs() <= bound).all()


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def test_kernel_every_variant_and_m_is_within_the_bound(case: Case) -> None:
    capability = torch.cuda.get_device_capability()
    for index, row in enumerate(binding.variants(binding.library())):
        for m in (m for m in TOKENS if row.takes(m, case.x.shape[1], capability)):
            case.check(case.run(m, variant=index))


@pytest.mark.parametrize("grid", [1, 3, 7, 10**6])
def test_kernel_any_split_of_the_work_is_within_the_bound(case: Case, grid: int) -> None:
    for m in (1, 5, 16, 64):
        case.check(case.run(m, grid=grid))


def test_kernel_with_bias_is_within_the_bound(case: Case) -> None:
    for m in (1, 8, 33):
        case.check(case.run(m, bias=True), bias=True)


def test_kernel_leaves_its_counters_at_zero_and_repeats_bit_for_bit(case: Case) -> None:
    for m in (1, 8, 64):
        first = case.run(m)
        for _ in range(5):
            assert torch.equal(case.run(m), first)
    assert all(int(workspace[: 2**16].max()) == 0 for workspace in launch._partials.values())


def test_workspace_is_within_what_the_planner_counts() -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    needed = binding.library().nvfp4_linear_workspace_bytes()
    assert 0 < needed <= processors * shapes.PARTIAL_BYTES_PER_PROCESSOR + shapes.COUNTER_BYTES


def test_kernel_wrong_scale_is_seen(case: Case) -> None:
    broken = case.weight.scales.clone()
    broken.view(torch.uint8).flatten()[0] += 8  # doubles one block's scale
    torch.cuda.synchronize()
    y = torch.empty(64, case.weight.packed.shape[0], dtype=torch.bfloat16, device="cuda")
    launch.small_m(case.x, case.weight.packed, broken, case.weight.row_scale, None, y)
    with pytest.raises(AssertionError):
        case.check(y)


@pytest.mark.parametrize("m", [1, 8, 64, 65, 200, 300])
def test_op_in_a_graph_equals_the_op_outside(m: int) -> None:
    case = Case(384, 512, tokens=300)
    x = case.x[:m].clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = nvfp4_linear.linear(x, case.weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = nvfp4_linear.linear(x, case.weight)
        graph.replay()
        graph.replay()
    torch.cuda.synchronize()
    case.check(y)
    assert torch.equal(eager, y)


@pytest.mark.parametrize("shards", [(24, 360), (104, 280), (384,)])
def test_op_large_m_with_unequal_shards_is_within_the_bound(
    shards: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "DEQUANTIZED_BYTES", 128 * 512 * 2)  # a third of the weight at a time
    launch._dequantized.clear()
    case = Case(384, 512, tokens=400)
    block_scale = nvfp4.unswizzle_scales(case.weight.scales, 384, 32)
    weight = nvfp4_linear.prepare_weight(case.weight.packed, block_scale, shards, (0.25, 1.0e-3)[: len(shards)])
    dense = nvfp4.dequantize_nvfp4(weight.packed, block_scale, weight.row_scale, dtype=torch.float64)
    expected = case.x.double() @ dense.T
    bound = reference.error_bound(case.x, dense, expected)
    assert ((nvfp4_linear.linear(case.x, weight).double() - expected).abs() <= bound).all()
    shifted, extra = nvfp4_linear.linear(case.x, weight, case.bias).double(), case.bias.double()
    twice = (expected + extra).abs() * 2**-8
    assert ((shifted - expected - extra).abs() <= bound + extra.abs() * 2**-8 + twice).all()
    launch._dequantized.clear()


def test_op_under_compile_gives_the_same(case: Case) -> None:
    compiled = torch.compile(lambda x: nvfp4_linear.linear(x, case.weight) * 2, backend="aot_eager")
    assert torch.equal(compiled(case.x[:5]), nvfp4_linear.linear(case.x[:5], case.weight) * 2)


def test_op_noncontiguous_activations_and_leading_dimensions_are_taken(case: Case) -> None:
    k = case.x.shape[1]
    wide = torch.randn(6, k + 4, device="cuda").bfloat16()
    got = nvfp4_linear.linear(wide[:, :k].unflatten(0, (2, 3)), case.weight)
    assert torch.equal(got.flatten(0, 1), nvfp4_linear.linear(wide[:, :k].contiguous(), case.weight))


def test_op_wrong_dtype_is_refused(case: Case) -> None:
    with pytest.raises(UsageError, match="bfloat16"):
        nvfp4_linear.linear(case.x.float(), case.weight)


def test_dequantize_rows_is_exact(case: Case) -> None:
    n, k = case.weight.packed.shape[0], case.x.shape[1]
    out = torch.full((n, k), float("nan"), dtype=torch.bfloat16, device="cuda")
    launch.dequantize_rows(case.weight.packed, case.weight.scales, 0, out)
    block_scale = nvfp4.unswizzle_scales(case.weight.scales, n, k // 16)
    assert torch.equal(out.float(), nvfp4.dequantize_nvfp4(case.weight.packed, block_scale, 1.0))
