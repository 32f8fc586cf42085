"""The NVFP4 format: every code with every scale, the scale order, and both checkpoint conventions."""

from __future__ import annotations

import pytest
import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import nvfp4

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_value(byte: int) -> float:
    """The OCP E4M3 value of a nonnegative byte, from its bits."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def all_scales() -> torch.Tensor:
    """The 127 finite nonnegative E4M3 values, as float8."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_dequantize_every_code_and_scale_is_exact() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    got = nvfp4.dequantize_nvfp4(nvfp4.pack_codes(codes), all_scales()[:, None], 1.0)
    for byte in range(127):
        for code in range(16):
            sign = -1.0 if code >= 8 else 1.0
            assert got[byte, code].item() == sign * MAGNITUDES[code & 7] * e4m3_value(byte)


def test_dequantize_low_nibble_is_the_even_column() -> None:
    packed = torch.zeros(1, 8, dtype=torch.uint8)
    packed[0, 0] = 0x72  # low nibble 2 is 1.0, high nibble 7 is 6.0
    got = nvfp4.dequantize_nvfp4(packed, torch.ones(1, 1).to(torch.float8_e4m3fn), 1.0)
    assert got[0, :3].tolist() == [1.0, 6.0, 0.0]


@pytest.mark.parametrize("code", range(16))
def test_encode_each_code_survives_a_round_trip(code: int) -> None:
    codes = torch.tensor([code], dtype=torch.uint8)
    assert nvfp4.encode_e2m1(nvfp4.decode_e2m1(codes)).item() == code


def test_encode_between_codes_takes_the_nearest_and_ties_the_even() -> None:
    for low in range(7):
        a, b = MAGNITUDES[low], MAGNITUDES[low + 1]
        middle = (a + b) / 2
        even = low if low % 2 == 0 else low + 1
        values = torch.tensor([middle - 1e-3, middle, middle + 1e-3, -middle])
        assert nvfp4.encode_e2m1(values).tolist() == [low, even, low + 1, even | 8]


def test_encode_beyond_six_saturates() -> None:
    assert nvfp4.encode_e2m1(torch.tensor([6.1, 1e30, -1e30])).tolist() == [7, 7, 15]


def test_quantize_representable_weight_returns_it_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8, generator=generator)
    codes[:, ::16] = 7  # a full-range element per block pins its scale
    scales = torch.randint(8, 127, (8, 4), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    weight = nvfp4.dequantize_nvfp4(nvfp4.pack_codes(codes), scales, 0.25)
    again = nvfp4.quantize_nvfp4(weight, 0.25)
    assert torch.equal(again.block_scale.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(again.dequantize(), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize_random_weight_errs_by_at_most_a_step(dtype: torch.dtype) -> None:
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    quantized = nvfp4.quantize_nvfp4(weight)
    block_amax = weight.float().unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    error = (quantized.dequantize() - weight.float()).unflatten(-1, (-1, 16)).abs()
    # Half of the widest step (4 to 6) is 1/6 of the block's largest element; the scale itself rounds by at most 1/16.
    assert (error <= block_amax * (1 / 6 + 1 / 8)).all()
    assert quantized.packed.shape == (32, 48)
    assert quantized.block_scale.shape == (32, 6)


def test_quantize_zero_weight_gives_zero_and_scale_one() -> None:
    quantized = nvfp4.quantize_nvfp4(torch.zeros(4, 32))
    assert quantized.global_scale.item() == 1.0
    assert torch.equal(quantized.dequantize(), torch.zeros(4, 32))


def test_quantize_block_below_the_scale_range_becomes_zero_not_nan() -> None:
    weight = torch.full((1, 32), 1e-9)
    weight[0, 0] = 1000.0
    got = nvfp4.quantize_nvfp4(weight).dequantize()
    assert got.isfinite().all()
    assert (got[0, 16:] == 0).all()


def test_quantize_default_scale_uses_the_whole_range() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    assert nvfp4.quantize_nvfp4(weight).block_scale.float().max().item() == 448.0


@pytest.mark.parametrize("shape", [(), (3,), (3, 8)])
def test_quantize_experts_with_each_scale_shape_round_trips(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(3, 8, 32, generator=generator)
    scale = torch.rand(shape, generator=generator) * 1e-3 + 2e-3
    quantized = nvfp4.quantize_nvfp4(weight, scale)
    rows = scale if scale.ndim in (0, 2) else scale[:, None]
    for expert in range(3):
        row = rows.expand(3, 8)[expert]
        alone = nvfp4.quantize_nvfp4(weight[expert], row)
        assert torch.equal(quantized.packed[expert], alone.packed)
        assert torch.equal(quantized.dequantize()[expert], alone.dequantize())


def test_dequantize_row_scales_multiply_their_rows() -> None:
    packed = torch.full((4, 8), 0x22, dtype=torch.uint8)
    ones = torch.ones(4, 1).to(torch.float8_e4m3fn)
    scale = torch.tensor([1.0, 2.0, 3.0, 0.1])
    assert torch.equal(nvfp4.dequantize_nvfp4(packed, ones, scale), scale[:, None].expand(4, 16))


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (128, 4), (129, 5), (200, 6), (96, 3), (384, 8)])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_swizzle_every_scale_lands_on_its_byte_and_padding_is_zero(
    lead: tuple[int, ...], rows: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    scales = torch.randint(1, 127, (*lead, rows, groups), dtype=torch.uint8, generator=generator).view(
        torch.float8_e4m3fn
    )
    swizzled = nvfp4.swizzle_scales(scales)
    padded_rows, padded_groups = nvfp4.swizzled_scale_shape(rows, groups)
    assert swizzled.shape == (*lead, padded_rows, padded_groups)
    assert swizzled.is_contiguous()
    expected = torch.zeros(*lead, padded_rows * padded_groups, dtype=torch.uint8)
    for r in range(rows):
        for g in range(groups):
            tile = (r // 128) * (padded_groups // 4) + g // 4
            expected[..., tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + g % 4] = scales.view(torch.uint8)[
                ..., r, g
            ]
    assert torch.equal(swizzled.view(torch.uint8).flatten(-2), expected)
    assert torch.equal(nvfp4.unswizzle_scales(swizzled, rows, groups).view(torch.uint8), scales.view(torch.uint8))


def test_unswizzle_wrong_size_is_refused() -> None:
    with pytest.raises(UsageError, match="expected"):
        nvfp4.unswizzle_scales(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)


def test_global_scale_conventions_name_the_same_weight() -> None:
    multiplier = torch.tensor([0.25, 3.0e-4])
    divisor = nvfp4.divisor_from_global_scale(multiplier)
    assert divisor.tolist() == pytest.approx([4.0, 1 / 3.0e-4])
    assert torch.allclose(nvfp4.global_scale_from_divisor(divisor), multiplier, rtol=2e-7)
    assert torch.equal(nvfp4.global_scale_from_modelopt(multiplier), multiplier)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_global_scale_bad_values_are_refused(bad: float) -> None:
    scale = torch.tensor(bad)
    for convert in (nvfp4.global_scale_from_divisor, nvfp4.divisor_from_global_scale, nvfp4.global_scale_from_modelopt):
        with pytest.raises(UsageError):
            convert(scale)
    with pytest.raises(UsageError):
        nvfp4.quantize_nvfp4(torch.ones(1, 16), scale)


def test_quantize_width_not_in_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 16"):
        nvfp4.quantize_nvfp4(torch.ones(2, 24))


def test_global_scale_of_wrong_length_is_refused() -> None:
    with pytest.raises(UsageError, match="global scale"):
        nvfp4.quantize_nvfp4(torch.ones(4, 16), torch.ones(3))
