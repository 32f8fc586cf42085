"""The kernel's own source on a CPU, thread by thread, element by element against the definition."""

from __future__ import annotations

import ctypes
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.kernels.emulator import compiled

from qwen_nvfp4_serve.kernels import gdn_decode
from qwen_nvfp4_serve.kernels.build import GDN_DECODE
from qwen_nvfp4_serve.kernels.gdn_decode import Step, binding, check, reference
from qwen_nvfp4_serve.kernels.gdn_decode.check import Form, random_step, whole

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
INVALID = 1  # cudaErrorInvalidValue
ROWS = (16, 32, 64)
BF16, FP32 = torch.bfloat16, torch.float32
PAIR = Form(key_heads=1, group=2)


def made_step(indices: list[int], form: Form = PAIR, seed: int = 0) -> Step:
    return random_step(form, tuple(indices), slots=6, seed=seed)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel compiled for a CPU, behind the same interface as for a card."""
    return binding.declared(compiled(GDN_DECODE, HERE / "emulate_gdn.cpp", tmp_path_factory.mktemp("emulator")))


class Run:
    """Runs steps and keeps their counters."""

    def __init__(self, library: ctypes.CDLL, step: Step) -> None:
        self.library = library
        self.counts = gdn_decode.counters("cpu", step.x.shape[0], max(step.key_heads, 1))

    def __call__(self, step: Step, *, rows: int = 0, early: bool = False, **changed: int) -> int:
        call = gdn_decode.call_of(step, self.counts, rows=rows, early=early, dependent=True)
        for name, value in changed.items():
            setattr(call, name, value)
        return int(self.library.gdn_decode(ctypes.byref(call), None))

    def check(self, step: Step, *, rows: int = 0, early: bool = False) -> None:
        """One step as the definition has it; counters are zero again, the pages' rests as they were."""
        expected = reference.expected(step)
        pages = whole(step.state).clone()
        assert self(step, rows=rows, early=early) == 0
        assert expected.holds(step)
        changed = (whole(step.state) != pages).view(step.state.shape[0], -1)
        assert not changed[:, step.state[0].numel() * step.state.element_size() :].any()
        assert not self.counts.any()


def test_interface_is_declared_as_it_is_compiled(library: ctypes.CDLL) -> None:
    assert library.gdn_decode_call_bytes() == ctypes.sizeof(binding.GdnDecodeCall)


@pytest.mark.parametrize("group", gdn_decode.GROUPS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_every_group_and_slice_is_within_the_bound(library: ctypes.CDLL, group: int, dtype: torch.dtype) -> None:
    for rows in ROWS:
        step = made_step([3, 1], Form(2, group, dtype), seed=rows)
        Run(library, step).check(step, rows=rows)


@pytest.mark.parametrize("early", [False, True])
def test_bias_and_bf16_gate_parameters_are_taken(library: ctypes.CDLL, early: bool) -> None:
    step = made_step([2], Form(1, 2, FP32, BF16, BF16, bias=True))
    Run(library, step).check(step, early=early)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_states_that_would_fill_the_cache_pass_through_it(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """The emulated card's L2 has 1 MiB: a sixth is less than the states of three heads in float32, of six in BF16."""
    staying = 2 if dtype == FP32 else 5
    library.passing_stores()
    for tokens in (staying, staying + 1):
        step = made_step([1 + i % 5 for i in range(tokens)], Form(1, 1, dtype))
        assert Run(library, step)(step) == 0
        pieces = tokens * 128 * 128 * step.state.element_size() // 16
        assert library.passing_stores() == (pieces if tokens > staying else 0)


@pytest.mark.parametrize(
    ("tokens", "key_heads", "value_heads", "rows"),
    [(1, 36, 144, 64), (1, 35, 140, 32), (3, 16, 48, 64), (2, 16, 48, 32), (5, 16, 32, 64), (4, 16, 32, 32)],
)
def test_many_heads_take_more_rows_to_a_cta(
    library: ctypes.CDLL, tokens: int, key_heads: int, value_heads: int, rows: int
) -> None:
    step = made_step([1] * tokens)
    library.run_launches(0)
    try:
        assert Run(library, step)(step, key_heads=key_heads, value_heads=value_heads) == 0
    finally:
        library.run_launches(1)
    assert library.last_blocks() == value_heads * (128 // rows)


def test_tokens_of_no_request_leave_states_alone_and_give_zero(library: ctypes.CDLL) -> None:
    step = made_step([0, 4, -1, 2, 0], Form(1, 1))
    Run(library, step).check(step)
    assert not step.out[[0, 2, 4]].any()
    assert step.out[[1, 3]].any(-1).all()


def test_steps_after_each_other_follow_the_definition(library: ctypes.CDLL) -> None:
    step = made_step([5, 1, 2], Form(1, 3))
    run = Run(library, step)
    for seed in range(4):
        fresh = made_step([5, 1, 2], Form(1, 3), seed=100 + seed)
        step = replace(step, x=fresh.x, a=fresh.a, b=fresh.b)
        run.check(step, rows=ROWS[seed % 3])


def test_slots_in_another_order_give_the_same(library: ctypes.CDLL) -> None:
    step, other = made_step([1, 2, 3]), made_step([3, 1, 2])
    other.state[[3, 1, 2]] = step.state[[1, 2, 3]]
    other.conv_state[[3, 1, 2]] = step.conv_state[[1, 2, 3]]
    assert Run(library, step)(step) == Run(library, other)(other) == 0
    assert torch.equal(step.out, other.out)
    assert torch.equal(step.state[[1, 2, 3]], other.state[[3, 1, 2]])


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**6], ids=str)
def test_scaled_inputs_are_within_the_bound(library: ctypes.CDLL, scale: float) -> None:
    step = made_step([1, 2])
    step = replace(step, x=step.x * scale, a=step.a * 16)
    step.conv_state.mul_(scale)
    Run(library, step).check(step)


def test_threads_in_another_order_give_the_same_bits(library: ctypes.CDLL) -> None:
    first, second = made_step([3, 1], Form(1, 3)), made_step([3, 1], Form(1, 3))
    assert Run(library, first)(first) == 0
    library.run_last_first(1)
    try:
        assert Run(library, second)(second) == 0
    finally:
        library.run_last_first(0)
    for name in ("out", "state", "conv_state"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def add_rule(library: ctypes.CDLL, tensor: torch.Tensor, *, hidden: bool) -> None:
    """Until the launch has waited, what `tensor` lies in is not to be read, or not to be written."""
    memory = tensor.untyped_storage()
    library.add_rule(0, ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.nbytes()), int(hidden))


@pytest.mark.parametrize("early", [False, True])
def test_what_the_kernel_ahead_writes_is_read_only_after_waiting(library: ctypes.CDLL, early: bool) -> None:
    step = made_step([0, 2, 1])
    states = [step.indices, step.state, step.conv_state]
    library.reset_rules()
    # What is hidden until then comes back as it was: what was written there before is lost, and missed below.
    for tensor in (step.x, step.a, step.b, *([] if early else states)):
        add_rule(library, tensor, hidden=True)
    for tensor in (step.out, *(states if early else [])):
        add_rule(library, tensor, hidden=False)
    try:
        Run(library, step).check(step, early=early)
        assert library.broken_rules() == 0
    finally:
        library.reset_rules()


@pytest.mark.parametrize(
    "changed",
    [{"tokens": 0}, {"tokens": 65536}, {"key_heads": 0}, {"value_heads": 3}, {"value_heads": 10}, {"rows": 8}],
    ids=str,
)
def test_call_outside_the_limits_is_refused(library: ctypes.CDLL, changed: dict[str, int]) -> None:
    step = made_step([1], Form(2, 1))
    assert Run(library, step)(step, **changed) == INVALID  # type: ignore[arg-type]


@pytest.fixture
def tried(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """The check before serving, of the emulated kernel; `spoil` is what happens to a step after it."""

    def check_of(spoil: Callable[[Step, torch.Tensor], object] = lambda _step, _counts: None) -> str | None:
        def decode(step: Step, counts: torch.Tensor, *, early: bool = False) -> None:
            call = gdn_decode.call_of(step, counts, rows=0, early=early, dependent=True)
            assert library.gdn_decode(ctypes.byref(call), None) == 0
            spoil(step, counts)

        monkeypatch.setattr(gdn_decode, "decode", decode)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        return check.wrong(PAIR, "cpu")

    return check_of


def test_check_before_serving_finds_the_kernel_right(tried: Callable[..., str | None]) -> None:
    assert tried() is None


TURNS = itertools.count()
SPOILED: dict[str, Callable[[Step, torch.Tensor], object]] = {
    "outputs": lambda step, _: step.out.mul_(1.02),
    "a state": lambda step, _: step.state[3, 1, 5, 7].mul_(1.001),
    "another slot": lambda step, _: step.state[1].add_(1),
    "what was kept of a channel": lambda step, _: step.conv_state[2, 0, 9].add_(1),
    "a counter": lambda _, counts: counts[0, 0].add_(1),
    "unequal bits": lambda step, _: step.state[2, 0, 0, 0].mul_(1 + 1e-6 * (next(TURNS) % 2)),
}


@pytest.mark.parametrize("what", SPOILED)
def test_check_before_serving_sees_what_is_wrong(tried: Callable[..., str | None], what: str) -> None:
    assert tried(SPOILED[what])
