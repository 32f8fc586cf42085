"""The kernels' own source on a CPU, thread by thread, against the definition: everything but the machine's timing."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from tests.kernels.emulator import compiled

from qwen_nvfp4_serve.kernels import nvfp4_moe
from qwen_nvfp4_serve.kernels.build import NVFP4_MOE
from qwen_nvfp4_serve.kernels.nvfp4_moe import MoeDims, binding, check, launch, reference

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
EMBEDDED = check.SHAPES["embedded"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels compiled for a CPU, behind the same interface as for a card."""
    return compiled(NVFP4_MOE, HERE / "emulate_moe.cpp", tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def emulator(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The same, with the launches going there."""
    slots = launch.empty_slots(library, "cpu")

    def enqueue(function: str, call: ctypes.Structure, device: torch.device) -> int:
        result: int = getattr(library, function)(ctypes.byref(call), None)
        assert (slots == launch.EMPTY_SLOT).all(), "the router's slots are left as they were found"
        return result

    monkeypatch.setattr(launch, "_enqueue", enqueue)
    monkeypatch.setattr(launch, "_slots_of", lambda _: slots)
    return library


def activations(m: int, hidden: int) -> torch.Tensor:
    """Rows further apart than they are long."""
    generator = torch.Generator().manual_seed(hidden + m)
    return torch.randn(m, hidden + 16, generator=generator).bfloat16()[:, 8 : hidden + 8]


def test_interface_is_declared_as_it_is_compiled(library: ctypes.CDLL) -> None:
    assert library.nvfp4_moe_call_bytes() == ctypes.sizeof(binding.MoeCall)
    assert library.nvfp4_route_call_bytes() == ctypes.sizeof(binding.RouteCall)
    assert library.nvfp4_moe_tokens() == nvfp4_moe.KERNEL_TOKENS


@pytest.mark.parametrize(
    ("m", "kind", "with_shared"),
    [
        *((m, kind, True) for m in (1, 2, 3, 8) for kind in check.ELECTIONS),
        (1, "uniform", False),
        (4, "one", False),
        (17, "uniform", True),
    ],
)
def test_experts_of_the_embedded_model_are_within_the_bounds(
    emulator: ctypes.CDLL, m: int, kind: str, with_shared: bool
) -> None:
    block = check.random_block(EMBEDDED, device="cpu")
    share, ids = check.election(kind, m, EMBEDDED, torch.Generator().manual_seed(m))
    assert check.worst_error(block, activations(m, 256), ids, share, with_shared=with_shared) <= 1


@pytest.mark.parametrize(
    ("dims", "m"),
    [
        (MoeDims(hidden=2048, intermediate=128, experts=8, top_k=2, shared_intermediate=128), 2),  # four warps' columns
        (MoeDims(hidden=1152, intermediate=256, experts=8, top_k=3, shared_intermediate=64), 1),  # a short last step
        (MoeDims(hidden=256, intermediate=640, experts=8, top_k=2), 3),  # two steps of the second product
        (MoeDims(hidden=256, intermediate=640, experts=8, top_k=2), 1),
        (MoeDims(hidden=2176, intermediate=128, experts=8, top_k=2), 1),  # eight warps, a short last step
        (MoeDims(hidden=4224, intermediate=128, experts=8, top_k=1), 2),  # more steps than warps
        (MoeDims(hidden=128, intermediate=128, experts=16, top_k=10, shared_intermediate=256), 5),  # more experts
    ],
)
def test_experts_of_other_shapes_are_within_the_bounds(emulator: ctypes.CDLL, dims: MoeDims, m: int) -> None:
    block = check.random_block(dims, device="cpu")
    share, ids = check.election("uniform", m, dims, torch.Generator().manual_seed(m))
    x, shared = activations(m, dims.hidden), block.shared is not None
    assert check.worst_error(block, x, ids, share, with_shared=shared) <= 1


def test_experts_ids_out_of_range_and_repeated_ones_add_what_they_say(emulator: ctypes.CDLL) -> None:
    block = check.random_block(MoeDims(hidden=128, intermediate=128, experts=8, top_k=3), device="cpu")
    x, share = activations(3, 128), torch.rand(3, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[8, 2, 2], [-1, 2, 5], [1000, -7, 8]], dtype=torch.int32)
    expected = reference.moe_experts(x, block.experts, ids, share)
    for rows in (slice(0, 3), slice(0, 1), slice(2, 3)):
        y, _ = check.run_poisoned(block.experts, x[rows], ids[rows], share[rows])
        assert y is not None
        assert ((y.double() - expected.value[rows]).abs() <= expected.bound[rows]).all()


def test_experts_one_expert_for_more_pairs_than_a_round_holds(emulator: ctypes.CDLL) -> None:
    dims = MoeDims(hidden=128, intermediate=128, experts=8, top_k=3)
    block = check.random_block(dims, device="cpu")
    share, ids = check.election("uniform", 20, dims, torch.Generator().manual_seed(0))
    same = torch.full_like(ids, 5)
    assert check.worst_error(block, activations(20, 128), same, share, with_shared=False) <= 1


@pytest.mark.parametrize("m", [2, 5, 17])
def test_experts_dealt_out_in_other_octets_give_the_same(emulator: ctypes.CDLL, m: int) -> None:
    dims = MoeDims(hidden=128, intermediate=128, experts=8, top_k=2, shared_intermediate=256)
    block = check.random_block(dims, device="cpu")
    share, ids = check.election("uniform", m, dims, torch.Generator().manual_seed(m))
    x = activations(m, 128)
    results = [
        launch.experts(x, block.experts, ids, share, shared=block.shared, octets=octets) for octets in (0, 1, 2, 4, 16)
    ]
    assert all(torch.equal(y, results[0]) for y in results)


def whole(block: check.Block, x: torch.Tensor) -> torch.Tensor:
    """The block's result from its kernels."""
    return launch.block(
        x,
        block.router,
        block.experts,
        top_k=block.dims.top_k,
        renormalize=True,
        shared=block.shared,
        gate=block.shared_gate,
    )


def test_block_a_tokens_result_does_not_depend_on_the_others(emulator: ctypes.CDLL) -> None:
    block = check.random_block(EMBEDDED, device="cpu")
    x = activations(9, 256)
    together = whole(block, x)
    exact = reference.moe_block(
        x, block.router, block.experts, top_k=4, shared=block.shared, shared_gate=block.shared_gate
    )
    assert ((together.double() - exact.value).abs() <= exact.bound).all()
    for token in (0, 4, 8):
        assert torch.equal(whole(block, x[token : token + 1]), together[token : token + 1])


def test_block_a_token_of_nans_leaves_the_others_alone(emulator: ctypes.CDLL) -> None:
    block = check.random_block(EMBEDDED, device="cpu")
    x = activations(4, 256)
    broken = x.clone()
    broken[1] = float("nan")
    kept = [0, 2, 3]
    y = whole(block, broken)
    assert y[1].isnan().all()
    assert torch.equal(y[kept], whole(block, x)[kept])


def test_block_the_same_slots_serve_calls_of_any_size(emulator: ctypes.CDLL) -> None:
    dims = MoeDims(hidden=128, intermediate=64, experts=24, top_k=3, shared_intermediate=64)
    block, x = check.random_block(dims, device="cpu"), activations(32, 128)
    together = whole(block, x)
    for m in (1, 32, 9, 1, 2, 17):
        first = 32 - m  # so that a token's slots have had another's logits
        assert torch.equal(whole(block, x[first:]), together[first:])


@pytest.mark.parametrize("m", [1, 5])
def test_block_threads_in_another_order_give_the_same(emulator: ctypes.CDLL, m: int) -> None:
    block = check.random_block(
        MoeDims(hidden=1152, intermediate=128, experts=16, top_k=4, shared_intermediate=64), device="cpu"
    )
    x = activations(m, 1152)
    forward = whole(block, x)
    emulator.run_last_first(1)
    try:
        assert torch.equal(whole(block, x), forward)
    finally:
        emulator.run_last_first(0)


class Rules:
    """What a launch may not see (hidden) or may not write before it has waited for the launch ahead."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.reset_rules()

    def add(self, launch_index: int, hidden: bool, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            self.library.add_rule(
                launch_index, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(size), ctypes.c_int(hidden)
            )


@pytest.mark.parametrize("m", [1, 3])
def test_experts_see_nothing_of_the_launch_ahead_before_they_wait_for_it(emulator: ctypes.CDLL, m: int) -> None:
    block = check.random_block(EMBEDDED, device="cpu")
    share, ids = check.election("uniform", m, EMBEDDED, torch.Generator().manual_seed(m))
    x, shares = activations(m, 256).contiguous(), torch.rand(m, generator=torch.Generator().manual_seed(m))
    h = launch.intermediate_buffer(x, block.experts, 4, block.shared)

    def run(y: torch.Tensor) -> torch.Tensor:
        return launch.experts(x, block.experts, ids, share, y, shared=block.shared, shared_share=shares, intermediate=h)

    free, y = run(torch.empty_like(x)), torch.empty_like(x)
    rules = Rules(emulator)
    rules.add(0, True, x, ids, share, shares)
    rules.add(0, False, h, y)
    rules.add(1, True, h)  # the elections are two launches back by now
    rules.add(1, False, y)
    assert torch.equal(run(y), free)
    assert emulator.broken_rules() == 0
    rules = Rules(emulator)
    rules.add(1, True, h, ids)  # these it may see, and does
    assert not torch.equal(run(y), free)
    emulator.reset_rules()


def test_router_sees_nothing_of_the_launch_ahead_before_it_waits_for_it(emulator: ctypes.CDLL) -> None:
    block = check.random_block(EMBEDDED, device="cpu")
    x = activations(3, 256).contiguous()
    logits, slots = torch.full((3, 16), float("nan")).bfloat16(), launch._slots_of(x.device)
    free = launch.route(x, block.router, 4, True, block.shared_gate)
    rules = Rules(emulator)
    rules.add(0, True, x)
    rules.add(0, False, logits, slots)  # the launch ahead may be a router's too
    choice = launch.route(x, block.router, 4, True, block.shared_gate, logits=logits)
    assert emulator.broken_rules() == 0
    assert torch.equal(choice.ids, free.ids)
    assert torch.equal(choice.weights, free.weights)
    emulator.reset_rules()


def test_experts_a_wrong_scale_is_seen(emulator: ctypes.CDLL) -> None:
    dims = MoeDims(hidden=256, intermediate=128, experts=8, top_k=2)
    block = check.random_block(dims, device="cpu")
    share, ids = check.election("one", 2, dims, torch.Generator().manual_seed(0))
    x = activations(2, 256)
    for name in ("w13_scales", "w2_scales"):
        scales = getattr(block.experts, name).clone()
        scales.view(torch.uint8).view(8, -1)[int(ids[1, 0]), 77] += 8  # doubles one block's scale
        _, h = check.run_poisoned(dataclasses.replace(block.experts, **{name: scales}), x, ids, share)
        exact = reference.intermediate(x, block.experts, ids, dtype=torch.float64)
        wrong = (h.view(2, 2, -1).double() - exact.value).abs() > exact.bound
        assert wrong.any() == (name == "w13_scales")


@pytest.mark.parametrize(
    "change",
    [{"m": 33}, {"m": 0}, {"top_k": 17}, {"hidden": 192}, {"hidden": 0}, {"octets": 3}, {"octets": 32}, {"octets": -1}],
)
def test_call_out_of_range_is_refused(library: ctypes.CDLL, change: dict[str, int]) -> None:
    call = binding.MoeCall(
        routed=binding.Experts(count=8, intermediate=128), **{"m": 1, "hidden": 128, "top_k": 2, **change}
    )
    assert library.nvfp4_moe_experts(ctypes.byref(call), None) == 1


@pytest.mark.parametrize(
    ("hidden", "experts", "m", "top_k"), [(256, 16, 1, 4), (2048, 64, 5, 8), (4224, 8, 2, 8), (128, 512, 3, 10)]
)
def test_router_elects_what_its_logits_say(
    emulator: ctypes.CDLL, hidden: int, experts: int, m: int, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x = activations(m, hidden)
    router, gate = check.random_rows(experts, hidden, generator), check.random_rows(1, hidden, generator)[0]
    logits = torch.full((m, experts), float("nan")).bfloat16()
    choice = launch.route(x, router, top_k, True, gate, logits=logits)
    exact = x.double() @ router.double().T
    allowed = exact.abs() * 2**-8 + reference.SUM_ERROR * (x.double().abs() @ router.double().abs().T)
    assert ((logits.double() - exact).abs() <= allowed).all()
    weights, ids = nvfp4_moe.select_experts(logits, top_k)
    assert torch.equal(choice.ids, ids)
    torch.testing.assert_close(choice.weights, weights, rtol=1e-6, atol=0)
    share = reference.shared_share(x, gate, dtype=torch.float64)
    assert choice.shared_share is not None
    assert ((choice.shared_share.double().unsqueeze(1) - share.value).abs() <= share.bound).all()


@pytest.mark.parametrize("experts", [8, 16, 64, 256, 512])
@pytest.mark.parametrize("renormalize", [True, False])
def test_election_of_coarse_logits_with_many_ties_is_the_definitions(
    emulator: ctypes.CDLL, experts: int, renormalize: bool
) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randint(-3, 4, (20, experts), generator=generator).bfloat16()
    logits[3] = 1.0
    logits[4] = float("nan")
    logits[5, 1:] = float("-inf")
    logits[6, 5] = float("nan")
    logits[7, 0], logits[7, 1:] = 100.0, -100.0
    weights, ids = launch.select(logits, 8, renormalize)
    expected_weights, expected_ids = reference.select_experts(logits, 8, renormalize=renormalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("intermediate", [64, 128, 256, 512, 1024])
def test_octets_cover_every_gate_row_once_and_find_its_up_row(library: ctypes.CDLL, intermediate: int) -> None:
    rows = []
    for octet in range(library.octets_of_gate(intermediate)):
        for value in range(8):
            row = library.row_of_value(octet, value)
            if row >= intermediate:
                continue
            rows.append(row)
            up = value + 2 * library.quarters_to_up(intermediate)
            assert library.row_of_value(library.octet_of_up(octet, intermediate), up) == row + intermediate
    assert sorted(rows) == list(range(intermediate))
