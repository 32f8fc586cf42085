"""The tiled GEMM of the linear layer in Triton's interpreter, which a process has from its start or not at all:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/nvfp4_linear/interpreted_tiled.py

`test_tiled.py` starts that. The interpreter cannot multiply BF16, so activations are float32 here.
"""

from __future__ import annotations

import os

import pytest
import torch

from qwen_nvfp4_serve.kernels import nvfp4_linear
from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight, reference, tiled

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)
pytest.importorskip("triton")

MARGIN = 64


def random_weight(n: int, k: int) -> LinearWeight:
    """Every code and all scales that are not negative, in two shards of unequal global scale."""
    generator = torch.Generator().manual_seed(n + k)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8, generator=generator)
    cut = n // 3 // 8 * 8
    return nvfp4_linear.prepare_weight(packed, scale.view(torch.float8_e4m3fn), (cut, n - cut), (3.1e-5, 1.7e-4))


def poisoned(x: torch.Tensor, weight: LinearWeight, **more: object) -> torch.Tensor:
    """y out of memory full of NaN with a margin behind it."""
    m, n = x.shape[0], weight.packed.shape[0]
    memory = torch.full((m * n + MARGIN,), float("nan"))
    y = memory[: m * n].view(m, n)
    tiled.linear(x, weight, y, **more)  # type: ignore[arg-type]
    assert memory[m * n :].isnan().all()
    return y


def assert_equals_the_definition(
    y: torch.Tensor, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None
) -> None:
    expected = reference.linear_reference(x, weight.packed, weight.scales, weight.row_scale, bias)
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


def activations(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m))


@pytest.mark.parametrize("tile", tiled.WGMMA_TILES, ids=lambda tile: f"rows{tile.rows}")
@pytest.mark.parametrize("parts", tiled.PARTS)
def test_linear_every_tile_and_number_of_parts_equals_the_definition(tile: tiled.Tile, parts: int) -> None:
    weight, x = random_weight(200, 384), activations(70, 384)  # three steps: some parts are empty
    assert_equals_the_definition(poisoned(x, weight, tile=tile, parts=parts), x, weight)


@pytest.mark.parametrize(("n", "k"), [(8, 128), (96, 512), (1000, 256)])
@pytest.mark.parametrize("m", [17, 65])
def test_linear_sizes_that_fill_no_tile_equal_the_definition(m: int, n: int, k: int) -> None:
    weight, x = random_weight(n, k), activations(m, k)
    assert_equals_the_definition(poisoned(x, weight), x, weight)


@pytest.mark.parametrize("parts", [1, 2])
def test_linear_with_a_bias_adds_it_once(parts: int) -> None:
    weight, x = random_weight(96, 256), activations(20, 256)
    bias = torch.randn(96, generator=torch.Generator().manual_seed(9))
    assert_equals_the_definition(poisoned(x, weight, bias=bias, parts=parts), x, weight, bias)
