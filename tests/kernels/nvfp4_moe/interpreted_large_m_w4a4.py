"""What lies around FlashInfer's grouped FP4 GEMM, in Triton's interpreter; `test_large_m.py` starts this, see there.

The GEMM is stood in for by its documented meaning, in float32 like everything the interpreter is given.
"""

from __future__ import annotations

import os

import pytest
import torch
from tests.kernels.nvfp4_moe.made_experts import dense, made_experts
from torch.nn import functional

from qwen_nvfp4_serve.kernels import nvfp4
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, large_m, large_m_w4a4

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("qwen_nvfp4_serve.kernels.nvfp4_moe.large_m_w4a4_kernels")

EXPERTS, HIDDEN, WIDTH, TOP_K = 3, 256, 128, 2


def random_experts() -> ExpertWeights:
    """Gates of about one."""
    return made_experts(EXPERTS, HIDDEN, WIDTH, block_scales=(48, 80), global_scales=(0.006, 0.006, 0.006))


def first_row(starts: list[int], expert: int) -> int:
    """Where the library looks for the scales of an expert's activations (group_gemm_nvfp4_groupwise_sm120.cuh)."""
    return (starts[expert] + expert * 127) // 128 * 128


def activations(packed: torch.Tensor, scales: torch.Tensor, starts: list[int], expert: int) -> torch.Tensor:
    """Rounded activations of one expert, without their global scale."""
    count, groups = starts[expert + 1] - starts[expert], packed.shape[1] // 8
    rows = -(-count // 128) * 128
    from_row = first_row(starts, expert)
    own = scales[from_row : from_row + rows].contiguous().view(torch.float8_e4m3fn)
    block = nvfp4.unswizzle_scales(own, count, groups)
    return nvfp4.dequantize_nvfp4(packed[starts[expert] : starts[expert + 1]], block, 1.0)


def stand_in(  # noqa: PLR0917
    packed: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The library's grouped GEMM; what it does not write is NaN."""
    out.fill_(float("nan"))
    at, (experts, rows, half) = starts.tolist(), weight.shape
    assert not any(start % 4 for start in at)
    assert weight_scales.shape == (experts, -(-rows // 128) * 128, half // 8)
    for expert in range(experts):
        if at[expert] == at[expert + 1]:
            continue
        block = nvfp4.unswizzle_scales(weight_scales[expert].view(torch.float8_e4m3fn), rows, half // 8)
        dense = nvfp4.dequantize_nvfp4(weight[expert], block, 1.0)
        out[at[expert] : at[expert + 1]] = activations(packed, scales, at, expert) @ dense.T


@triton.jit
def to_e4m3(values, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out + at, kernels._to_e4m3(tl.load(values + at)))


def test_e4m3_rounds_to_nearest_ties_to_even() -> None:
    steps = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (steps[1:] + steps[:-1]) / 2
    drawn = torch.rand(200, generator=torch.Generator().manual_seed(1)) * 448
    values = torch.cat([steps, middle, middle * (1 - 1e-6), middle * (1 + 1e-6), drawn, drawn * 2.0**-12])
    values = functional.pad(values, (0, 1024 - len(values)))
    out = torch.zeros(1024, dtype=torch.int32)
    to_e4m3[(1,)](values, out, SIZE=1024)
    assert torch.equal(out.to(torch.uint8), values.to(torch.float8_e4m3fn).view(torch.uint8))


def test_activations_are_rounded_as_the_format_says_with_their_experts_scale() -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.tensor([[0, 2], [2, 0], [-1, 2], [2, EXPERTS], [0, 2]], dtype=torch.int32)
    x = torch.randn(5, HIDDEN, generator=generator).bfloat16().float()
    x[1, 32:48] = 0
    scale = torch.tensor([0.002, 0.1, 0.0005])
    blocks = large_m.deal(ids, EXPERTS, 4)
    places = blocks.expert.numel() * 4
    packed, scales = large_m_w4a4._rounded(places, HIDDEN, EXPERTS, x.device)
    kernels.round_activations[(blocks.expert.numel(), 1)](
        x, blocks.order, blocks.expert, blocks.starts, scale, packed, scales, TOP_K, HIDDEN, GROUPS=16
    )
    starts = blocks.starts.tolist()
    for expert in (0, 2):
        rounded = activations(packed, scales, starts, expert)
        for place, pair in enumerate(blocks.order[starts[expert] : starts[expert + 1]].tolist()):
            row = torch.zeros(1, HIDDEN) if pair < 0 else x[pair // TOP_K].unsqueeze(0)
            wanted = nvfp4.quantize_nvfp4(row, scale[expert]).dequantize()
            assert torch.equal(rounded[place] * scale[expert], wanted[0]), (expert, place)


def test_experts_equal_the_definition_with_rounded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, generator = random_experts(), torch.Generator().manual_seed(3)
    ids = torch.tensor([[0, 2], [2, 0], [-1, -1], [2, EXPERTS], [0, 2], [2, 0]], dtype=torch.int32)
    shares = torch.rand(6, TOP_K, generator=generator)
    x = torch.randn(6, HIDDEN, generator=generator).bfloat16().float()
    input_scales = torch.tensor([[0.002, 0.1, 0.0015], [0.003, 0.1, 0.001]])
    y = torch.full_like(x, float("nan"))
    large_m_w4a4.experts(x, weights, ids, shares, input_scales, y, gemm=stand_in)
    wanted = expected(x, weights, ids, shares, input_scales)
    # A value next to a rounding point may go the other way.
    assert float((y - wanted).norm()) <= 2e-3 * float(wanted.norm())
    assert not y[2].any()
    monkeypatch.setattr(large_m_w4a4, "tokens_in_round", lambda *_: 4)
    again = torch.full_like(x, float("nan"))
    large_m_w4a4.experts(x, weights, ids, shares, input_scales, again, gemm=stand_in)
    torch.testing.assert_close(again, y)


def expected(
    x: torch.Tensor, weights: ExpertWeights, ids: torch.Tensor, shares: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    y = torch.zeros_like(x)
    for token, chosen in enumerate(ids.tolist()):
        for rank, expert in enumerate(chosen):
            if not 0 <= expert < EXPERTS:
                continue
            first, second = dense(weights, expert, torch.float32)
            inputs = nvfp4.quantize_nvfp4(x[token].unsqueeze(0), scales[0, expert]).dequantize()
            gate, up = (inputs @ first.T).chunk(2, dim=-1)
            middle = nvfp4.quantize_nvfp4(functional.silu(gate) * up, scales[1, expert]).dequantize()
            y[token] += shares[token, rank] * (middle @ second.T)[0]
    return y
