"""The BF16 kernel on a card, element by element against FP64."""

from __future__ import annotations

import pytest
import torch

from qwen_nvfp4_serve.kernels import bf16_linear
from qwen_nvfp4_serve.kernels.bf16_linear import binding
from qwen_nvfp4_serve.kernels.nvfp4_linear import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SHAPES = ((12288, 2048), (64, 2048), (2048, 4096), (16384, 5120), (5120, 6144), (96, 5120), (200, 768), (7, 128))
TOKENS = (1, 2, 3, 4, 7, 8, 9, 15, 16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_variant_and_m_is_within_the_bound(shape: tuple[int, int]) -> None:
    n, k = shape
    generator = torch.Generator("cuda").manual_seed(n + k)
    weight = torch.randn(n, k, device="cuda", generator=generator).bfloat16()
    x = torch.randn(max(TOKENS), k + 8, device="cuda", generator=generator).bfloat16()[:, :k]
    bias = torch.randn(n, device="cuda", generator=generator).bfloat16()
    torch.cuda.synchronize()
    plain = x.double() @ weight.double().T
    for variant, row in enumerate(binding.variants(binding.library())):
        for m in (m for m in TOKENS if m <= row.tokens):
            for offset in (None, bias):
                expected = plain[:m] + (0 if offset is None else offset.double())
                bound = reference.error_bound(x[:m], weight.double(), plain[:m]) + (expected - plain[:m]).abs() * 2**-8
                memory = torch.full((m + 1, n + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
                y = memory[:m, :n]
                bf16_linear.small_m(x[:m], weight, offset, y, variant=variant)
                assert ((y.double() - expected).abs() <= bound).all()
                assert memory[m].isnan().all()
                assert memory[:, n:].isnan().all()


def test_results_repeat_bit_for_bit_eager_and_in_a_graph() -> None:
    weight = torch.randn(12288, 2048, device="cuda").bfloat16()
    x, y = torch.randn(3, 2048, device="cuda").bfloat16(), torch.empty(3, 12288, device="cuda").bfloat16()
    torch.cuda.synchronize()
    bf16_linear.small_m(x, weight, None, y)
    first = y.clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for _ in range(4):  # each may begin before the one ahead has ended
            bf16_linear.small_m(x, weight, None, y)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, first)
