"""The kernels' own source on a CPU, thread by thread, against the definition: everything but the machine's timing."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_moe_op import random_experts

from qwen_nvfp4_serve.kernels import nvfp4_moe
from qwen_nvfp4_serve.kernels.build import NVFP4_MOE
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, binding, launch, reference

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels compiled for a CPU, behind the same interface as for a card."""
    library = tmp_path_factory.mktemp("emulator") / "moe.so"
    folders = [f"-I{HERE / 'emulated'}", f"-I{NVFP4_MOE.folder}", *NVFP4_MOE.include_flags()]
    command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", "-Wno-unknown-pragmas", *folders]
    subprocess.run([*command, str(HERE / "emulate_moe.cpp"), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    assert (loaded.nvfp4_moe_call_bytes(), loaded.nvfp4_route_call_bytes()) == (
        ctypes.sizeof(binding.MoeCall),
        ctypes.sizeof(binding.RouteCall),
    )
    return loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A block's arguments on a CPU, as the launches take them."""

    x: torch.Tensor
    weights: ExpertWeights
    ids: torch.Tensor
    share: torch.Tensor
    shared: ExpertWeights | None = None
    shared_share: torch.Tensor | None = None

    def run(self, emulator: ctypes.CDLL) -> tuple[torch.Tensor, torch.Tensor]:
        """y and h, from memory full of NaN, behind margins that must stay so."""
        m, hidden = self.x.shape
        memory = torch.full((m + 1, hidden + 8), float("nan"), dtype=torch.bfloat16)
        h = torch.full_like(
            launch.intermediate_buffer(self.x, self.weights, self.ids.shape[1], self.shared), float("nan")
        )
        call = binding.MoeCall(
            routed=launch._experts(self.weights),
            shared=binding.Experts() if self.shared is None else launch._experts(self.shared),
            x=self.x.data_ptr(),
            y=memory.data_ptr(),
            ids=self.ids.data_ptr(),
            weights=self.share.data_ptr(),
            shared_share=None if self.shared_share is None else self.shared_share.data_ptr(),
            intermediate=h.data_ptr(),
            x_stride=self.x.stride(0),
            y_stride=memory.stride(0),
            m=m,
            hidden=hidden,
            top_k=self.ids.shape[1],
            dependent=1,
        )
        assert emulator.nvfp4_moe_experts(ctypes.byref(call), None) == 0
        assert memory[m].isnan().all()
        assert memory[:, hidden:].isnan().all()
        return memory[:m, :hidden], h

    def check(self, emulator: ctypes.CDLL) -> None:
        """Both stages, each against the definition from the values that it was given."""
        y, h = self.run(emulator)
        pairs = self.ids.numel()
        routed_h = h[: pairs * self.weights.intermediate].view(*self.ids.shape, self.weights.intermediate)
        exact = reference.intermediate(self.x, self.weights, self.ids, dtype=torch.float64)
        served = (self.ids >= 0) & (self.ids < self.weights.experts)
        assert ((routed_h.double() - exact.value).abs() <= exact.bound)[served].all()
        result = reference.combine(routed_h.double().nan_to_num(), self.weights, self.ids, self.share)
        value, bound = result.value, result.bound
        if self.shared is not None:
            m = self.x.shape[0]
            zeros = torch.zeros(m, 1, dtype=torch.int32)
            share = torch.ones(m, 1) if self.shared_share is None else self.shared_share.unsqueeze(1)
            own = h[pairs * self.weights.intermediate :].view(m, 1, -1)
            exact = reference.intermediate(self.x, self.shared, zeros, dtype=torch.float64)
            assert ((own.double() - exact.value).abs() <= exact.bound).all()
            common = reference.combine(own.double(), self.shared, zeros, share)
            value, bound = value + common.value, bound + common.bound
        assert ((y.double() - value).abs() <= bound).all()


def call_of(  # noqa: PLR0917
    hidden: int, intermediate: int, experts: int, m: int, top_k: int, *, shared: int | None = None, skew: bool = False
) -> Call:
    generator = torch.Generator().manual_seed(hidden + m)
    logits = torch.randn(m, experts, generator=generator)
    if skew:
        logits = logits[:1].expand(m, -1).contiguous()
    share, ids = reference.select_experts(logits, top_k)
    wide = torch.randn(m, hidden + 16, generator=generator).bfloat16()
    return Call(
        x=wide[:, 8 : hidden + 8],
        weights=random_experts(experts, hidden, intermediate),
        ids=ids,
        share=share,
        shared=None if shared is None else random_experts(1, hidden, shared, seed=1),
        shared_share=None if shared is None else torch.rand(m, generator=generator),
    )


@pytest.mark.parametrize("m", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("skew", [False, True])
def test_experts_of_the_embedded_models_shape_are_within_the_bounds(emulator: ctypes.CDLL, m: int, skew: bool) -> None:
    call_of(256, 64, 16, m, 4, shared=128, skew=skew).check(emulator)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "m", "top_k", "shared"),
    [
        (2048, 128, 8, 2, 2, 128),  # columns shared by four warps
        (1152, 256, 8, 1, 3, 64),  # a last step that is not full
        (256, 640, 8, 3, 2, None),  # two steps of the second product
        (2176, 128, 8, 1, 2, None),  # eight warps, a last step that is not full
        (4224, 128, 8, 2, 1, None),  # more steps than warps
        (128, 128, 16, 32, 10, 256),  # more elected experts than warps
    ],
)
def test_experts_of_other_shapes_are_within_the_bounds(  # noqa: PLR0917
    emulator: ctypes.CDLL, hidden: int, intermediate: int, experts: int, m: int, top_k: int, shared: int | None
) -> None:
    call_of(hidden, intermediate, experts, m, top_k, shared=shared).check(emulator)


def test_experts_ids_out_of_range_and_repeated_ones_add_what_they_say(emulator: ctypes.CDLL) -> None:
    call = call_of(128, 128, 8, 3, 3)
    ids = torch.tensor([[8, 2, 2], [-1, 2, 5], [1000, -7, 8]], dtype=torch.int32)
    dataclasses.replace(call, ids=ids).check(emulator)
    once = dataclasses.replace(
        call, x=call.x[:1], ids=torch.tensor([[2, -1, 2]], dtype=torch.int32), share=call.share[:1]
    )
    once.check(emulator)


def test_experts_one_expert_for_more_pairs_than_a_round_holds(emulator: ctypes.CDLL) -> None:
    call = call_of(128, 128, 8, 20, 3)
    dataclasses.replace(call, ids=torch.full_like(call.ids, 5)).check(emulator)


def test_experts_a_tokens_result_does_not_depend_on_the_others(emulator: ctypes.CDLL) -> None:
    call = call_of(256, 128, 16, 9, 4, shared=128)
    together, _ = call.run(emulator)
    assert call.shared_share is not None
    for token in (0, 4, 8):
        one = slice(token, token + 1)
        alone = dataclasses.replace(
            call, x=call.x[one], ids=call.ids[one], share=call.share[one], shared_share=call.shared_share[one]
        )
        assert torch.equal(alone.run(emulator)[0], together[one])


def test_experts_a_wrong_scale_is_seen(emulator: ctypes.CDLL) -> None:
    call = call_of(256, 128, 8, 2, 2)
    right = call.run(emulator)
    for name in ("w13_scales", "w2_scales"):
        scales = getattr(call.weights, name).clone()
        scales.view(torch.uint8).view(8, -1)[int(call.ids[1, 0]), 77] += 8
        wrong = dataclasses.replace(call, weights=dataclasses.replace(call.weights, **{name: scales})).run(emulator)
        assert not torch.equal(wrong[0], right[0])


@pytest.mark.parametrize("change", [{"m": 33}, {"m": 0}, {"top_k": 17}, {"hidden": 192}, {"hidden": 0}])
def test_call_out_of_range_is_refused(emulator: ctypes.CDLL, change: dict[str, int]) -> None:
    sizes = {"m": 1, "hidden": 128, "top_k": 2, **change}
    good = binding.Experts(count=8, intermediate=128)
    call = binding.MoeCall(routed=good, **sizes)
    assert emulator.nvfp4_moe_experts(ctypes.byref(call), None) == 1


def route(
    emulator: ctypes.CDLL, x: torch.Tensor, router: torch.Tensor, top_k: int, gate: torch.Tensor | None
) -> tuple[torch.Tensor, launch.Choice]:
    """Logits and choice from the router's kernel."""
    logits = torch.full((x.shape[0], router.shape[0]), float("nan")).bfloat16()
    choice = launch._choice(x, top_k, with_share=gate is not None)
    arrived = torch.zeros(1, dtype=torch.int32)
    call = binding.RouteCall(
        x=x.data_ptr(),
        router=router.data_ptr(),
        shared_gate=None if gate is None else gate.data_ptr(),
        logits=logits.data_ptr(),
        shared_share=None if choice.shared_share is None else choice.shared_share.data_ptr(),
        arrived=arrived.data_ptr(),
        x_stride=x.stride(0),
        hidden=x.shape[1],
        dependent=1,
        **launch._election(choice, router.shape[0], True),
    )
    assert emulator.nvfp4_moe_route(ctypes.byref(call), None) == 0
    assert arrived.item() == 0
    return logits, choice


@pytest.mark.parametrize(
    ("hidden", "experts", "m", "top_k"), [(256, 16, 1, 4), (2048, 64, 5, 8), (4224, 8, 2, 8), (128, 512, 3, 10)]
)
def test_router_elects_what_its_logits_say(
    emulator: ctypes.CDLL, hidden: int, experts: int, m: int, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(m, hidden, generator=generator).bfloat16()
    router = (torch.randn(experts, hidden, generator=generator) / hidden**0.5).bfloat16()
    gate = torch.randn(hidden, generator=generator).bfloat16() / 32
    logits, choice = route(emulator, x, router, top_k, gate)
    exact = x.double() @ router.double().T
    allowed = exact.abs() * 2**-8 + reference.SUM_ERROR * (x.double().abs() @ router.double().abs().T)
    assert ((logits.double() - exact).abs() <= allowed).all()
    weights, ids = nvfp4_moe.select_experts(logits, top_k)
    assert torch.equal(choice.ids, ids)
    torch.testing.assert_close(choice.weights, weights, rtol=1e-6, atol=0)
    share = reference.shared_share(x, gate, dtype=torch.float64)
    assert choice.shared_share is not None
    assert ((choice.shared_share.double().unsqueeze(1) - share.value).abs() <= share.bound).all()


def elected(emulator: ctypes.CDLL, logits: torch.Tensor, top_k: int, *, renormalize: bool = True) -> launch.Choice:
    choice = launch._choice(logits, top_k, with_share=False)
    call = binding.RouteCall(logits=logits.data_ptr(), **launch._election(choice, logits.shape[1], renormalize))
    assert emulator.nvfp4_moe_route(ctypes.byref(call), None) == 0
    return choice


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
    choice = elected(emulator, logits, 8, renormalize=renormalize)
    weights, ids = nvfp4_moe.select_experts(logits, 8, renormalize=renormalize)
    assert torch.equal(choice.ids, ids)
    torch.testing.assert_close(choice.weights, weights, rtol=1e-6, atol=1e-30)
