"""The linear op's limits, its shape under tracing, and its large-M path, without a card."""

from __future__ import annotations

import pytest
import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import nvfp4, nvfp4_linear
from qwen_nvfp4_serve.kernels.nvfp4_linear import launch, reference


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1)])
def test_supports_every_compiled_card(capability: tuple[int, int]) -> None:
    assert nvfp4_linear.supports(capability, 34816, 5120) is None


@pytest.mark.parametrize(
    ("capability", "n", "k", "word"),
    [
        ((7, 5), 128, 128, "7.5"),
        ((12, 0), 128, 192, "192"),
        ((12, 0), 0, 128, "N = 0"),
        ((9, 0), 2**22, 128, "N = 4194304"),
    ],
)
def test_supports_refuses_with_the_reason(capability: tuple[int, int], n: int, k: int, word: str) -> None:
    reason = nvfp4_linear.supports(capability, n, k)
    assert reason is not None
    assert word in reason


def quantized(n: int, k: int) -> nvfp4.Nvfp4Tensor:
    return nvfp4.quantize_nvfp4(torch.randn(n, k, generator=torch.Generator().manual_seed(n)), 1.0e-3)


def test_prepare_weight_keeps_each_shards_own_scale() -> None:
    tensor = quantized(48, 128)
    weight = nvfp4_linear.prepare_weight(tensor.packed, tensor.block_scale, (16, 32), (0.5, 0.25))
    assert weight.row_scale.tolist() == [0.5] * 16 + [0.25] * 32
    assert weight.packed is tensor.packed
    assert weight.scales.shape == (128, 8)


@pytest.mark.parametrize(("rows", "scales"), [((16, 16), (1.0, 1.0)), ((48,), (1.0, 2.0)), ((12, 36), (1.0, 1.0))])
def test_prepare_weight_shards_that_do_not_fit_are_refused(rows: tuple[int, ...], scales: tuple[float, ...]) -> None:
    tensor = quantized(48, 128)
    with pytest.raises(UsageError, match="fused projections"):
        nvfp4_linear.prepare_weight(tensor.packed, tensor.block_scale, rows, scales)


def test_op_traced_gives_the_output_shape() -> None:
    tensor = quantized(48, 128)
    weight = nvfp4_linear.prepare_weight(tensor.packed, tensor.block_scale, (48,), (1.0,))
    on_meta = [
        t.to("meta") for t in (torch.empty(2, 3, 128).bfloat16(), weight.packed, weight.scales, weight.row_scale)
    ]
    y = nvfp4_linear.linear_op(*on_meta, None, [48], [1.0])
    assert y.shape == (2, 3, 48)
    assert y.dtype is torch.bfloat16


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows_at_once", [128, 256, 1024])
def test_large_m_any_workspace_gives_each_shard_its_scale(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int, with_bias: bool
) -> None:
    n, k, scales = 400, 128, (0.5, 3.0e-3, 0.25)
    tensor = quantized(n, k)
    weight = nvfp4_linear.prepare_weight(tensor.packed, tensor.block_scale, (120, 200, 80), scales)
    exact = nvfp4.dequantize_nvfp4(tensor.packed, tensor.block_scale, 1.0, dtype=torch.bfloat16)
    workspace = torch.full((rows_at_once * k,), float("nan"), dtype=torch.bfloat16)

    def dequantize_rows(packed: torch.Tensor, scales: torch.Tensor, first_row: int, out: torch.Tensor) -> None:
        assert first_row % 128 == 0
        out.copy_(exact[first_row : first_row + out.shape[0]])

    monkeypatch.setattr(launch, "_dequantized_workspace", lambda _: workspace)
    monkeypatch.setattr(launch, "dequantize_rows", dequantize_rows)
    x = torch.randn(70, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).bfloat16() if with_bias else None
    y = torch.full((70, n), float("nan"), dtype=torch.bfloat16)
    shards = list(zip(weight.shard_rows, weight.shard_scales, strict=True))
    launch.large_m(x, weight.packed, weight.scales, bias, shards, y)
    expected = reference.linear_reference(x, weight.packed, weight.scales, weight.row_scale, bias)
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-3)


def test_reference_bound_catches_one_doubled_block_scale() -> None:
    tensor = quantized(128, 256)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    ones = torch.ones(128)
    expected = reference.linear_reference(x, tensor.packed, nvfp4.swizzle_scales(tensor.block_scale), ones)
    dense = nvfp4.dequantize_nvfp4(tensor.packed, tensor.block_scale, 1.0, dtype=torch.float64)
    bound = reference.error_bound(x, dense, expected)
    assert ((expected.bfloat16().double() - expected).abs() <= bound).all()
    wrong = tensor.block_scale.clone()
    wrong[5, 3] = wrong[5, 3].float() * 2
    broken = reference.linear_reference(x, tensor.packed, nvfp4.swizzle_scales(wrong), ones)
    assert ((broken - expected).abs() > bound).any()
