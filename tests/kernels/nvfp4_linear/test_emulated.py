"""The kernels' own source on a CPU, thread by thread, against the definition: everything but the machine's timing."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qwen_nvfp4_serve.kernels import build, nvfp4, nvfp4_linear
from qwen_nvfp4_serve.kernels.admission import shapes
from qwen_nvfp4_serve.kernels.nvfp4_linear import binding, reference

HERE = Path(__file__).parent
EMULATED = HERE.parent / "nvfp4_moe" / "emulated"
ROOT = Path(__file__).parents[3]
H200, RTX_5090 = (9, 0), (12, 0)
PROCESSORS = 9  # of the emulated cards
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels compiled for a CPU, behind the same interface as for a card."""
    folder = tmp_path_factory.mktemp("emulator")
    # Copied, because a source finds the headers beside it first.
    for name in build.NVFP4_LINEAR.sources:
        if not (EMULATED / name).exists():
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
        self.x = torch.randn(64, k + 16, generator=generator).bfloat16()[:, 8 : k + 8]
        self.bias = torch.randn(n, generator=generator).bfloat16()
        dense = nvfp4.dequantize_nvfp4(packed, scales, self.weight.row_scale, dtype=torch.float64)
        self.expected = reference.linear_reference(self.x, packed, self.weight.scales, self.weight.row_scale, self.bias)
        self.bound = reference.error_bound(self.x, dense, self.expected)

    def run(self, library: ctypes.CDLL, m: int, variant: int, grid: int = 0) -> torch.Tensor:
        """One launch into poisoned memory, with a poisoned margin that must stay as it was."""
        error, y = self.call(library, m, variant, grid)
        assert error == 0
        return y

    def call(self, library: ctypes.CDLL, m: int, variant: int, grid: int = 0) -> tuple[int, torch.Tensor]:
        """The same, whether it was launched or refused."""
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
        error = library.nvfp4_linear(ctypes.byref(call), None)
        assert memory[m].isnan().all()
        assert memory[:, n:].isnan().all()
        assert not workspace[: 2**16].any(), "the counters are left as they were found"
        return error, memory[:m, :n]

    def check(self, y: torch.Tensor) -> None:
        """Every element within its bound."""
        m = y.shape[0]
        assert ((y.double() - self.expected[:m]).abs() <= self.bound[:m]).all()


def tokens(row: binding.LinearVariant) -> list[int]:
    """Numbers of tokens to try: all that it takes, and a little more than half."""
    return sorted({row.tokens, row.tokens // 2 + 1})


@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 512), (96, 640)])
def test_every_variant_is_within_the_bound(library: ctypes.CDLL, n: int, k: int) -> None:
    case = Case(n, k)
    for index, row in enumerate(binding.variants(library)):
        for m in (m for m in tokens(row) if row.takes(m, k, H200)):
            case.check(case.run(library, m, index))


@pytest.mark.parametrize("grid", [1, 3, 7])
def test_any_split_of_the_work_is_within_the_bound(library: ctypes.CDLL, grid: int) -> None:
    case = Case(600, 384)  # two blocks of the most rows
    for index, row in enumerate(binding.variants(library)):
        if row.takes(row.tokens, case.x.shape[1], H200):
            case.check(case.run(library, row.tokens, index, grid))


def with_grids(library: ctypes.CDLL, case: Case) -> list[torch.Tensor]:
    """What each variant gives by one CTA, which has several windows of activations, and by three."""
    rows = enumerate(binding.variants(library))
    return [case.run(library, row.tokens, index, grid) for index, row in rows for grid in (1, 3)]


@pytest.fixture(scope="module")
def in_order(library: ctypes.CDLL) -> tuple[Case, list[torch.Tensor]]:
    """A case, and what it gives with threads in their usual order."""
    case = Case(200, 2560)
    return case, with_grids(library, case)


@pytest.mark.parametrize(("last_first", "warp_by_warp"), [(True, False), (False, True), (True, True)])
def test_threads_in_another_order_give_the_same(
    library: ctypes.CDLL, in_order: tuple[Case, list[torch.Tensor]], last_first: bool, warp_by_warp: bool
) -> None:
    case, expected = in_order
    library.run_last_first(last_first)
    library.run_warp_by_warp(warp_by_warp)
    try:
        assert all(map(torch.equal, with_grids(library, case), expected))
    finally:
        library.run_last_first(0)
        library.run_warp_by_warp(0)


def test_a_wrong_scale_is_seen(library: ctypes.CDLL) -> None:
    case = Case(128, 256)
    bytes_ = case.weight.scales.view(torch.uint8).flatten()
    bytes_[int(bytes_.argmax())] -= 8  # halves the largest block's scale
    for index, row in enumerate(binding.variants(library)):
        with pytest.raises(AssertionError):
            case.check(case.run(library, row.tokens, index))


@pytest.fixture
def rtx_5090(library: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """The same library on a card of capability 12.0 and its shared memory."""
    library.choose_card(1)
    yield library
    library.choose_card(0)


def chosen(library: ctypes.CDLL, n: int, k: int, m: int) -> binding.LinearVariant:
    """The variant that would serve a call, by the threads and the shared memory that are asked for. Nothing runs."""
    library.run_launches(0)
    try:
        call = binding.LinearCall(x_stride=k, y_stride=n, m=m, n=n, k=k, variant=-1)
        assert library.nvfp4_linear(ctypes.byref(call), None) == 0
    finally:
        library.run_launches(1)
    seen = (library.last_threads(), library.last_shared_bytes())
    found = [
        row
        for row in binding.variants(library)
        if (row.warps * 32, row.shared_bytes) == seen and row.tokens >= m and k % row.step_columns == 0
    ]
    return found[0]


def test_an_h200_takes_products_of_four_warps_beyond_16_tokens(library: ctypes.CDLL) -> None:
    few, many = (5120, 6144), (5120, 17408)
    for m in (1, 8, 16):
        assert chosen(library, *few, m).capability == chosen(library, *many, m).capability == 0
    beyond = (17, 24, 25, 32, 33, 48, 49, 64)
    for size in (few, many):
        assert {chosen(library, *size, m).capability for m in beyond} == {90}
    assert [chosen(library, *few, m).rows for m in beyond] == [256] * 8
    assert [chosen(library, *many, m).rows for m in beyond] == [384] * 8
    assert [chosen(library, *few, m).tokens for m in beyond] == [32, 32, 32, 32, 48, 48, 64, 64]
    assert [chosen(library, *many, m).tokens for m in beyond] == [24, 24, 32, 32, 48, 48, 64, 64]


def test_small_layers_are_shared_out_in_smaller_blocks(library: ctypes.CDLL) -> None:
    few, many = (5120, 6144), (5120, 17408)
    assert [chosen(library, *few, m).warps for m in (1, 4, 8, 16)] == [8, 8, 8, 8]
    assert [chosen(library, *many, m).warps for m in (1, 4, 8, 16)] == [16, 16, 8, 16]
    short_rows = (9216, 2048)
    assert [chosen(library, *short_rows, m).warps for m in (1, 4, 8, 16)] == [16, 16, 16, 16]
    assert chosen(library, 2**12, 2**20, 16).warps == 16, "more weights than 32 bits count"


def test_another_card_takes_none_of_them_and_refuses_to_be_asked(rtx_5090: ctypes.CDLL) -> None:
    case = Case(128, 256)
    for m in (1, 4, 8, 16, 17, 24, 32, 48, 64):
        assert chosen(rtx_5090, *case.weight.packed.shape[:1], 256, m).capability == 0
    for index, row in enumerate(binding.variants(rtx_5090)):
        error, y = case.call(rtx_5090, row.tokens, index)
        assert (error == 0) == row.takes(row.tokens, 256, RTX_5090)
        assert y.isnan().all() == (error != 0)


@pytest.mark.parametrize("card", [0, 1], ids=["9.0", "12.0"])
def test_partial_sums_are_within_what_the_planner_counts(library: ctypes.CDLL, card: int) -> None:
    library.choose_card(card)
    needed = library.nvfp4_linear_workspace_bytes()
    library.choose_card(0)
    assert 0 < needed <= PROCESSORS * shapes.PARTIAL_BYTES_PER_PROCESSOR + shapes.COUNTER_BYTES


def test_the_variants_are_those_that_were_measured(library: ctypes.CDLL) -> None:
    result = json.loads((ROOT / "docs/results/linear-h200.json").read_text())
    names = [field[0] for field in binding.LinearVariant._fields_]
    assert [{name: getattr(row, name) for name in names} for row in binding.variants(library)] == result["variants"]
