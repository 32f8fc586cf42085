"""The mixture-of-experts block on a card: element by element against FP64, its elections against the stock ones."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import nvfp4_moe
from qwen_nvfp4_serve.kernels.nvfp4_moe import check, launch, reference
from qwen_nvfp4_serve.kernels.nvfp4_moe.check import Block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
TOKENS = (1, 2, 3, 4, 8, 15, 16, 17, 32)
# Fewer experts than the models have where only their size matters.
SHAPES = {
    **{name: check.SHAPES[name] for name in ("embedded", "35b", "35b/tp2")},
    "397b": dataclasses.replace(check.SHAPES["397b"], experts=64),
    "more steps than warps": nvfp4_moe.MoeDims(hidden=4224, intermediate=640, experts=16, top_k=3),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def block(request: pytest.FixtureRequest) -> Block:
    return check.random_block(SHAPES[request.param])


@pytest.fixture(scope="module")
def small() -> Block:
    return check.random_block(check.SHAPES["embedded"], seed=3)


def activations(block: Block, m: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + m)
    return torch.randn(m, block.dims.hidden, device="cuda", generator=generator).bfloat16()


def whole(block: Block, x: torch.Tensor) -> torch.Tensor:
    return nvfp4_moe.moe_block(
        x,
        block.router,
        block.experts,
        top_k=block.dims.top_k,
        shared=block.shared,
        shared_gate=block.shared_gate,
    )


@pytest.mark.parametrize("kind", check.ELECTIONS)
def test_experts_every_m_and_election_are_within_the_bounds(block: Block, kind: str) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for m in TOKENS:
        share, ids = check.election(kind, m, block.dims, generator)
        x = activations(block, m)
        for with_shared in {False, block.shared is not None}:
            assert check.worst_error(block, x, ids, share, with_shared=with_shared) <= 1, (m, with_shared)


def test_experts_wrong_scale_is_seen(small: Block) -> None:
    x = activations(small, 4)
    share, ids = check.election("one", 4, small.dims, torch.Generator("cuda").manual_seed(1))
    h = launch.intermediate_buffer(x, small.experts, small.dims.top_k, None)
    for name in ("w13_scales", "w2_scales"):
        scales = getattr(small.experts, name).clone()
        scales.view(torch.uint8).view(small.dims.experts, -1)[int(ids[0, 0]), 40] += 8  # doubles one block's scale
        torch.cuda.synchronize()
        broken = dataclasses.replace(small.experts, **{name: scales})
        y = launch.experts(x, broken, ids, share, intermediate=h)
        middle = h.view(*ids.shape, -1)
        exact = reference.intermediate(x, small.experts, ids, dtype=torch.float64)
        result = reference.combine(middle.double(), small.experts, ids, share)
        assert ((middle.double() - exact.value).abs() > exact.bound).any() == (name == "w13_scales")
        assert ((y.double() - result.value).abs() > result.bound).any() == (name == "w2_scales")


def test_experts_ids_out_of_range_and_repeated_ones_add_what_they_say(small: Block) -> None:
    x = activations(small, 3)
    ids = torch.tensor([[16, 2, 2, -1], [-1, 2, 5, 1000], [-7, 16, 99, -1]], dtype=torch.int32, device="cuda")
    share = torch.rand(3, 4, device="cuda")
    expected = reference.moe_experts(x, small.experts, ids, share)
    for rows in (slice(0, 3), slice(0, 1), slice(2, 3)):
        y = nvfp4_moe.moe_experts(x[rows], small.experts, ids[rows], share[rows])
        assert ((y.double() - expected.value[rows]).abs() <= expected.bound[rows]).all()


def test_block_equals_its_parts_and_the_definition(block: Block) -> None:
    for m in TOKENS:
        x = activations(block, m)
        choice = launch.route(x, block.router, block.dims.top_k, True, block.shared_gate)
        weights, ids = reference.select_experts(reference.router_logits(x, block.router), block.dims.top_k)
        y = whole(block, x)
        parts = launch.experts(
            x, block.experts, choice.ids, choice.weights, shared=block.shared, shared_share=choice.shared_share
        )
        assert torch.equal(y, parts)
        routed = reference.moe_experts(x, block.experts, choice.ids, choice.weights)
        exact = routed if block.shared is None else reference.add_shared(routed, x, block.shared, block.shared_gate)
        assert ((y.double() - exact.value).abs() <= exact.bound).all()
        same = (choice.ids == ids).all(dim=1)
        torch.testing.assert_close(choice.weights[same], weights[same], rtol=2**-4, atol=1e-3)


def test_block_elections_move_only_within_one_step_of_bf16(block: Block) -> None:
    for seed in range(8):
        _, unexplained = check.moved_elections(block, activations(block, 32, seed))
        assert unexplained == 0


def test_block_a_tokens_result_does_not_depend_on_the_others(block: Block) -> None:
    x = activations(block, 16)
    together = whole(block, x)
    for token in range(16):
        assert torch.equal(whole(block, x[token : token + 1]), together[token : token + 1])


def test_block_a_token_of_nans_leaves_the_others_alone(block: Block) -> None:
    x = activations(block, 8)
    broken = x.clone()
    broken[3] = float("nan")
    kept = [token for token in range(8) if token != 3]
    assert torch.equal(whole(block, broken)[kept], whole(block, x)[kept])


def slots_are_empty() -> bool:
    torch.cuda.synchronize()
    return all(bool((slots == launch.EMPTY_SLOT).all()) for slots in launch._slots.values())


def test_block_repeats_bit_for_bit_and_leaves_its_slots_empty(block: Block) -> None:
    for m in (1, 8, 32):
        x = activations(block, m)
        first = whole(block, x)
        assert all(torch.equal(whole(block, x), first) for _ in range(20))
    assert slots_are_empty()


def test_block_every_m_in_turn_elects_by_no_others_logits(block: Block) -> None:
    x = activations(block, 32)
    together = whole(block, x)
    # The last m of them, so that a token's slots have had another's logits; none waits for the one before.
    results = [(m, whole(block, x[32 - m :])) for _ in range(3) for m in (*range(1, 33), *range(31, 1, -3))]
    assert [m for m, y in results if not torch.equal(y, together[32 - m :])] == []
    assert slots_are_empty()


def test_block_on_several_streams_at_once_gives_the_same(block: Block) -> None:
    streams = {m: torch.cuda.Stream() for m in (1, 2, 5, 9, 16, 32)}
    given = {m: [activations(block, m, 100 * seed) for seed in range(4)] for m in streams}
    alone = {m: [whole(block, x) for x in xs] for m, xs in given.items()}
    torch.cuda.synchronize()
    results: dict[int, list[torch.Tensor]] = {m: [] for m in streams}
    for turn in range(40):
        for m, stream in streams.items():
            with torch.cuda.stream(stream):
                results[m].append(whole(block, given[m][turn % 4]))
    torch.cuda.synchronize()
    for m, ys in results.items():
        assert all(torch.equal(y, alone[m][turn % 4]) for turn, y in enumerate(ys)), m
    assert slots_are_empty()


@pytest.mark.parametrize("m", [1, 5, 16, 32])
def test_block_in_a_graph_equals_the_block_outside(block: Block, m: int) -> None:
    x, stream = activations(block, m), torch.cuda.Stream()
    others = [activations(block, m, seed) for seed in range(1, 4)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        eager = [whole(block, given) for given in (x, *others)]
        torch.cuda.synchronize()
        graph, given = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph, stream=stream):
            # Twice over: the second block starts while the first one ends.
            y = whole(block, given)
            after = whole(block, y)
        twice = [whole(block, result) for result in eager]
        for turn in range(12):
            given.copy_((x, *others)[turn % 4])
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, eager[turn % 4])
            assert torch.equal(after, twice[turn % 4])
    assert slots_are_empty()


def test_experts_started_early_or_not_give_the_same(block: Block) -> None:
    generator = torch.Generator("cuda").manual_seed(4)
    for m in (1, 8):
        share, ids = check.election("uniform", m, block.dims, generator)
        x = activations(block, m)
        early, _ = check.run_poisoned(block.experts, x, ids, share, dependent=True)
        late, _ = check.run_poisoned(block.experts, x, ids, share, dependent=False)
        assert early is not None
        assert late is not None
        assert torch.equal(early, late)


def test_block_under_compile_gives_the_same(small: Block) -> None:
    compiled = torch.compile(lambda x: whole(small, x) * 2, backend="aot_eager", fullgraph=True)
    x = activations(small, 5)
    assert torch.equal(compiled(x), whole(small, x) * 2)


def test_block_noncontiguous_activations_are_taken(small: Block) -> None:
    wide = activations(small, 4).repeat(1, 2)
    strided = wide[:, 4 : 4 + small.dims.hidden]
    assert torch.equal(whole(small, strided), whole(small, strided.contiguous()))


def test_block_captured_before_its_first_call_is_refused(small: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_slots", {})
    x, stream = activations(small, 1), torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UsageError, match="slots"), torch.cuda.graph(graph, stream=stream):
        whole(small, x)


def test_op_more_tokens_than_the_kernels_take_are_refused(small: Block) -> None:
    with pytest.raises(UsageError, match="33 tokens"):
        whole(small, activations(small, 33))


def coarse_logits(experts: int) -> torch.Tensor:
    """Logits with ties in every token, and a few that are not finite or far apart."""
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randint(-3, 4, (32, experts), generator=generator).bfloat16()
    logits[3] = 1.0
    logits[4] = float("nan")
    logits[5, 1:] = float("-inf")
    logits[6, 0], logits[6, 1:] = 100.0, -100.0
    logits[16:] = torch.randn(16, experts, generator=generator).bfloat16()
    return logits.cuda()


@pytest.mark.parametrize(("experts", "k"), [(16, 4), (64, 8), (256, 8), (512, 10)])
def test_election_is_the_definitions(experts: int, k: int) -> None:
    logits = coarse_logits(experts)
    weights, ids = nvfp4_moe.select_experts(logits, k)
    expected_weights, expected_ids = reference.select_experts(logits, k)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-30)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize(("experts", "k"), [(16, 4), (64, 8), (256, 8), (512, 10)])
def test_election_is_vllms(experts: int, k: int) -> None:
    from qwen_nvfp4_serve.kernels.nvfp4_moe import stock

    stock.load_ops()
    logits = coarse_logits(experts)
    weights, ids = nvfp4_moe.select_experts(logits, k)
    expected_weights, expected_ids = stock.top_k(logits, k)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-30)
