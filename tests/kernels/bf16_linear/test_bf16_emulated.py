"""The kernel's own source on a CPU, thread by thread, element by element against FP64."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from tests.kernels.emulator import compiled

from qwen_nvfp4_serve.kernels.bf16_linear import binding
from qwen_nvfp4_serve.kernels.build import BF16_LINEAR
from qwen_nvfp4_serve.kernels.nvfp4_linear import reference

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
INVALID = 1  # cudaErrorInvalidValue
# Rows that fill no block, columns that leave warps without work, several batches, and more row blocks than CTAs.
SHAPES = ((64, 2048), (100, 128), (7, 640), (40, 4224), (700, 256))
TOKENS = (1, 2, 7, 8, 9, 16)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel compiled for a CPU, behind the same interface as for a card."""
    return compiled(BF16_LINEAR, HERE / "emulate_bf16.cpp", tmp_path_factory.mktemp("emulator"))


class Case:
    """Random weights, activations whose rows are further apart than they are long, and what they give."""

    def __init__(self, n: int, k: int, m: int, *, bias: bool = False) -> None:
        generator = torch.Generator().manual_seed(n + k + m)
        self.weight = torch.randn(n, k, generator=generator).bfloat16()
        self.x = torch.randn(m, k + 16, generator=generator).bfloat16()[:, 8 : k + 8]
        self.bias = torch.randn(n, generator=generator).bfloat16() if bias else None
        self.memory = torch.full((m + 1, n + 8), float("nan"), dtype=torch.bfloat16)
        offset = 0.0 if self.bias is None else self.bias.double()
        self.expected = self.x.double() @ self.weight.double().T + offset
        self.bound = reference.error_bound(self.x, self.weight.double(), self.expected)

    def run(self, library: ctypes.CDLL, variant: int = -1, **changed: int) -> int:
        """The call's return value; results lie in memory full of NaN."""
        (m, k), n = self.x.shape, self.weight.shape[0]
        call = binding.Bf16LinearCall(
            weight=self.weight.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            x=self.x.data_ptr(),
            y=self.memory.data_ptr(),
            x_stride=self.x.stride(0),
            y_stride=self.memory.stride(0),
            **({"m": m, "n": n, "k": k, "variant": variant, "dependent": 1} | changed),
        )
        return int(library.bf16_linear(ctypes.byref(call), None))

    @property
    def y(self) -> torch.Tensor:
        return self.memory[:-1, : self.weight.shape[0]]

    def check(self) -> None:
        """Every element within its bound, nothing written beside them."""
        assert ((self.y.double() - self.expected).abs() <= self.bound).all()
        assert self.memory[-1].isnan().all()
        assert self.memory[:, self.weight.shape[0] :].isnan().all()


def test_interface_is_declared_as_it_is_compiled(library: ctypes.CDLL) -> None:
    assert library.bf16_linear_call_bytes() == ctypes.sizeof(binding.Bf16LinearCall)
    assert max(row.tokens for row in binding.variants(library)) == 16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_variant_and_m_is_within_the_bound(library: ctypes.CDLL, shape: tuple[int, int]) -> None:
    for index, row in enumerate(binding.variants(library)):
        for m in TOKENS:
            if m <= row.tokens:
                case = Case(*shape, m)
                assert case.run(library, index) == 0
                case.check()


def test_first_cache_keeps_weights_of_long_rows_for_few_tokens(library: ctypes.CDLL) -> None:
    library.cache_of_weights()
    found = {}
    for k in (2048, 5120):
        for m in (1, 4, 5, 8, 9):
            assert Case(8, k, m).run(library) == 0
            found[k, m] = library.cache_of_weights()
    assert [found[5120, m] for m in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 0]
    assert [found[2048, m] for m in (1, 4, 5, 8, 9)] == [0, 0, 2, 2, 0]


def test_bias_is_added_before_the_only_rounding(library: ctypes.CDLL) -> None:
    case = Case(100, 256, 5, bias=True)
    assert case.run(library) == 0
    case.check()


def test_threads_in_another_order_give_the_same_bits(library: ctypes.CDLL) -> None:
    first, second = Case(700, 640, 3), Case(700, 640, 3)
    assert first.run(library) == 0
    library.run_last_first(1)
    try:
        assert second.run(library) == 0
    finally:
        library.run_last_first(0)
    assert torch.equal(first.y, second.y)


def test_activations_are_read_and_results_written_only_after_waiting(library: ctypes.CDLL) -> None:
    case = Case(100, 256, 4)
    library.reset_rules()
    storage = case.x.untyped_storage()
    library.add_rule(0, ctypes.c_void_p(storage.data_ptr()), ctypes.c_int64(storage.nbytes()), 1)
    written = case.memory.untyped_storage()
    library.add_rule(0, ctypes.c_void_p(written.data_ptr()), ctypes.c_int64(written.nbytes()), 0)
    assert case.run(library) == 0
    assert library.broken_rules() == 0
    case.check()


@pytest.mark.parametrize("changed", [{"m": 0}, {"m": 17}, {"k": 100}, {"n": 0}, {"variant": 99}], ids=str)
def test_call_outside_the_limits_is_refused(library: ctypes.CDLL, changed: dict[str, int]) -> None:
    assert Case(16, 128, 1).run(library, **changed) == INVALID  # type: ignore[arg-type]
