"""The kernels' own source on a CPU, thread by thread, against the definition: everything but the machine's timing."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from qwen_nvfp4_serve.kernels import build, nvfp4, nvfp4_linear
from qwen_nvfp4_serve.kernels.nvfp4_linear import binding, reference

HERE = Path(__file__).parent
EMULATED = HERE.parent / "nvfp4_moe" / "emulated"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels compiled for a CPU, behind the same interface as for a card."""
    folder = tmp_path_factory.mktemp("emulator")
    # Copied, because a source finds the headers beside it first.
    for name in ("linear.cu", "linear.h", "layout.cuh"):
        shutil.copy(build.NVFP4_LINEAR.folder / name, folder)
    shutil.copy(HERE / "emulate_linear.cpp", folder)
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{EMULATED}", f"-I{folder}"]
    subprocess.run([*command, str(folder / "emulate_linear.cpp"), "-o", str(folder / "linear.so")], check=True)
    loaded = ctypes.CDLL(str(folder / "linear.so"))
    loaded.nvfp4_linear_workspace_bytes.restype = ctypes.c_int64
    return loaded


class Case:
    """A random weight with two shards of unequal scale, activations further apart than they are long, a bias."""

    def __init__(self, n: int, k: int) -> None:
        generator = torch.Generator().manual_seed(n + k)
        packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
        bytes_ = torch.randint(1, 127, (n, k // 16), dtype=torch.uint8, generator=generator)
        scales = bytes_.view(torch.float8_e4m3fn)
        self.weight = nvfp4_linear.prepare_weight(packed, scales, (n // 16 * 8, n - n // 16 * 8), (2.0e-4, 7.7e-3))
        self.x = torch.randn(128, k + 16, generator=generator).bfloat16()[:, 8 : k + 8]
        self.bias = torch.randn(n, generator=generator).bfloat16()
        dense = nvfp4.dequantize_nvfp4(packed, scales, self.weight.row_scale, dtype=torch.float64)
        self.expected = reference.linear_reference(self.x, packed, self.weight.scales, self.weight.row_scale, self.bias)
        self.bound = reference.error_bound(self.x, dense, self.expected)

    def run(self, library: ctypes.CDLL, m: int, variant: int, grid: int = 0) -> torch.Tensor:
        """One launch into poisoned memory, with a poisoned margin that must stay as it was."""
        w, n = self.weight, self.weight.packed.shape[0]
        memory = torch.full((m + 1, n + 8), float("nan"), dtype=torch.bfloat16)
        workspace = torch.zeros(library.nvfp4_linear_workspace_bytes(), dtype=torch.uint8)
        names = {"packed": w.packed, "scales": w.scales, "row_scale": w.row_scale, "bias": self.bias}
        pointers = {name: tensor.data_ptr() for name, tensor in {**names, "workspace": workspace}.items()}
        call = binding.LinearCall(
            **pointers,
            x=self.x.data_ptr(),
            y=memory.data_ptr(),
            x_stride=self.x.stride(0),
            y_stride=memory.stride(0),
            m=m,
            n=n,
            k=self.x.shape[1],
            variant=variant,
            grid=grid,
            dependent=1,
        )
        assert library.nvfp4_linear(ctypes.byref(call), None) == 0
        assert memory[m].isnan().all()
        assert memory[:, n:].isnan().all()
        assert not workspace[: 2**16].any(), "the counters are left as they were found"
        return memory[:m, :n]

    def check(self, y: torch.Tensor) -> None:
        """Every element within its bound."""
        m = y.shape[0]
        assert ((y.double() - self.expected[:m]).abs() <= self.bound[:m]).all()


def tokens(row: binding.LinearVariant) -> list[int]:
    """Numbers of tokens to try: all, one less, and one more than the next smaller variant takes."""
    return sorted({row.tokens, row.tokens // 2 + 1})


@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 512), (96, 640)])
def test_every_variant_is_within_the_bound(library: ctypes.CDLL, n: int, k: int) -> None:
    case = Case(n, k)
    for index, row in enumerate(binding.variants(library)):
        for m in tokens(row) if k % row.step_columns == 0 else ():
            case.check(case.run(library, m, index))


@pytest.mark.parametrize("grid", [1, 3, 7])
def test_any_split_of_the_work_is_within_the_bound(library: ctypes.CDLL, grid: int) -> None:
    case = Case(300, 384)
    for index, row in enumerate(binding.variants(library)):
        if case.x.shape[1] % row.step_columns == 0:
            case.check(case.run(library, row.tokens, index, grid))


def test_threads_in_another_order_give_the_same(library: ctypes.CDLL) -> None:
    case = Case(200, 512)
    for index, row in enumerate(binding.variants(library)):
        forward = case.run(library, row.tokens, index, 3)
        library.run_last_first(1)
        try:
            assert torch.equal(case.run(library, row.tokens, index, 3), forward)
        finally:
            library.run_last_first(0)


def test_a_wrong_scale_is_seen(library: ctypes.CDLL) -> None:
    case = Case(128, 256)
    bytes_ = case.weight.scales.view(torch.uint8).flatten()
    bytes_[int(bytes_.argmax())] -= 8  # halves the largest block's scale
    for index, row in enumerate(binding.variants(library)):
        with pytest.raises(AssertionError):
            case.check(case.run(library, row.tokens, index))
