"""Admission and its op on a card."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from qwen_nvfp4_serve.host import Gpu
from qwen_nvfp4_serve.kernels import graph_timing, nvfp4, nvfp4_linear
from qwen_nvfp4_serve.kernels.admission import EXACT, Shape, Span, Table, Verdict, admit, dispatch, serving, timing
from qwen_nvfp4_serve.kernels.nvfp4_linear import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SHAPES = (Shape(1024, 2048), Shape(2048, 512), Shape(96, 5120))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admission")


@pytest.fixture(scope="module")
def card() -> Gpu:
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return Gpu(name=name, capability=capability, memory_bytes=None, free_bytes=None, driver=None)


@pytest.fixture(scope="module")
def table(directory: Path, card: Gpu) -> Table:
    return admit(SHAPES, card=card, directory=directory, names=EXACT)


@pytest.mark.parametrize("name", EXACT)
def test_ours_are_admitted_for_every_shape(table: Table, name: str) -> None:
    found = [finding for finding in table.findings if finding.candidate == name]
    assert [(finding.verdict, finding.reason) for finding in found] == [(Verdict.ADMITTED, "")] * len(SHAPES)
    assert all(us > 0 for finding in found for _, us in finding.times_us)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_is_served(table: Table, shape: Shape) -> None:
    assert serving(table, shape)


def test_second_admission_takes_less_than_a_second(table: Table, directory: Path, card: Gpu) -> None:
    begin = time.monotonic()
    assert admit(SHAPES, card=card, directory=directory, names=EXACT) == table
    assert time.monotonic() - begin < 1


def test_small_kernel_adds_to_a_graph_about_what_it_takes_alone() -> None:
    between = graph_timing.small_kernel()
    assert between is not None
    assert graph_timing._alone_us() / 2 < timing.cuda_timer([between] * 32) < 2 * graph_timing._alone_us()


@pytest.mark.parametrize("m", [1, 9, 64, 65, 300])
def test_op_follows_its_plan_in_a_graph_and_outside(m: int) -> None:
    generator = torch.Generator("cuda").manual_seed(m)
    packed = torch.randint(0, 256, (384, 256), dtype=torch.uint8, device="cuda", generator=generator)
    bytes_ = torch.randint(32, 127, (384, 32), dtype=torch.uint8, device="cuda", generator=generator)
    block_scale = bytes_.view(torch.float8_e4m3fn)
    weight = nvfp4_linear.prepare_weight(packed, block_scale, (128, 256), (2e-4, 7e-3))
    spans = (Span(64, "qwen-small-m"), Span(2**31 - 1, "qwen-dequantized"))
    shards, plan = dispatch.shard_tensor(weight), dispatch.plan_tensor(spans)
    x, bias = (torch.randn(*size, device="cuda", generator=generator).bfloat16() for size in ((m, 512), (384,)))
    torch.cuda.synchronize()

    def call() -> torch.Tensor:
        op = torch.ops.qwen_nvfp4.admitted_linear
        result: torch.Tensor = op(x, packed, weight.scales, weight.row_scale, shards, plan, None, bias)
        return result

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = call()
        graph.replay()
    torch.cuda.synchronize()
    dense = nvfp4.dequantize_nvfp4(packed, block_scale, weight.row_scale, dtype=torch.float64)
    expected = x.double() @ dense.T
    bound = reference.error_bound(x, dense, expected) + bias.double().abs() * 2**-8
    assert ((y.double() - expected - bias.double()).abs() <= bound).all()
    assert torch.equal(eager, y)
