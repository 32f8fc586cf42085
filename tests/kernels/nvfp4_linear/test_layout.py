"""The kernel's layout and bit tricks, run on the CPU from the kernel's own header."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from qwen_nvfp4_serve.kernels import nvfp4, nvfp4_linear

HERE = Path(__file__).parent
CSRC = Path(nvfp4_linear.__file__).parent / "csrc"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`emulate.cpp` as a loaded library."""
    library = tmp_path_factory.mktemp("emulator") / "emulate.so"
    source = HERE / "emulate.cpp"
    subprocess.run(
        ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", f"-I{CSRC}", str(source), "-o", str(library)], check=True
    )
    loaded = ctypes.CDLL(str(library))
    loaded.decode_one.restype = ctypes.c_float
    return loaded


def test_decode_every_code_with_every_scale_is_exact_in_every_place(emulator: ctypes.CDLL) -> None:
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = nvfp4.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    for byte in range(127):
        for code in range(16):
            expected = values[code].item() * scales[byte].item()
            for column in range(8):
                got = emulator.decode_one(code, byte, column, column % 4)
                assert got == expected, (code, byte, column)


def test_orders_of_weights_and_activations_agree(emulator: ctypes.CDLL) -> None:
    assert emulator.orders_agree() == 1


@pytest.mark.parametrize(
    ("parts", "m", "n", "k"), [(1, 1, 128, 128), (1, 3, 256, 384), (1, 8, 128, 512), (2, 1, 128, 256), (2, 4, 256, 768)]
)
def test_layout_against_dequantized_weights_is_exact(emulator: ctypes.CDLL, parts: int, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    block_scale = torch.randint(1, 127, (n, k // 16), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    swizzled = nvfp4.swizzle_scales(block_scale)
    x = torch.randn(m, k, generator=generator).bfloat16()
    y = torch.zeros(m, n, dtype=torch.float64)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (packed, swizzled, x, y)]
    emulator.emulate(parts, *pointers, m, n, k)
    expected = x.double() @ nvfp4.dequantize_nvfp4(packed, block_scale, 1.0, dtype=torch.float64).T
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-9)
