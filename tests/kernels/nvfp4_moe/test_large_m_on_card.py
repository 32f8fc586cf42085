"""The grouped GEMM on a card: every tile and many elections against FP64, repeats, poison and CUDA graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from qwen_nvfp4_serve.kernels.nvfp4_moe import check, large_m, reference
from qwen_nvfp4_serve.kernels.nvfp4_moe.check import Block

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
TOKENS = (1, 2, 3, 16, 17, 64, 257, 600, 2048)
SHAPES = {
    "35b": check.SHAPES["35b"],
    "35b/tp2": check.SHAPES["35b/tp2"],
    "embedded": check.SHAPES["embedded"],
    # Columns that are no multiple of a whole step in either product.
    "odd": dataclasses.replace(check.SHAPES["embedded"], hidden=320, intermediate=192, shared_intermediate=None),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def block(request: pytest.FixtureRequest) -> Block:
    return check.random_block(SHAPES[request.param])


@pytest.fixture(scope="module")
def small() -> Block:
    return check.random_block(check.SHAPES["embedded"])


def activations(block: Block, m: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(m)
    return torch.randn(m, block.dims.hidden, device="cuda", generator=generator).bfloat16()


def poisoned(
    block: Block, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor, **more: large_m.Tile
) -> torch.Tensor:
    """y out of memory full of NaN with a margin behind it, the same in two calls."""
    results = []
    for _ in range(2):
        memory = torch.full((x.numel() + 64,), float("nan"), dtype=torch.bfloat16, device="cuda")
        y = memory[: x.numel()].view(x.shape)
        large_m.experts(x, block.experts, ids, share, y=y, **more)
        assert memory[x.numel() :].isnan().all()
        results.append(y)
    assert torch.equal(*results)
    return results[0]


def assert_within(y: torch.Tensor, expected: reference.Bounded) -> None:
    assert ((y.double() - expected.value).abs() <= expected.bound).all()


@pytest.mark.parametrize("kind", check.ELECTIONS)
def test_experts_every_m_and_election_are_within_the_bounds(block: Block, kind: str) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for m in TOKENS:
        share, ids = check.election(kind, m, block.dims, generator)
        x = activations(block, m)
        expected = reference.moe_experts(x, block.experts, ids, share)
        assert_within(poisoned(block, x, ids, share), expected)


@pytest.mark.parametrize("tile", large_m.TILES, ids=lambda tile: f"rows{tile.rows}")
def test_experts_every_tile_is_within_the_bounds(block: Block, tile: large_m.Tile) -> None:
    share, ids = check.election("uniform", 200, block.dims, torch.Generator("cuda").manual_seed(2))
    ids[7], ids[100, 0], ids[199] = -1, block.dims.experts, -1
    x = activations(block, 200)
    y = poisoned(block, x, ids, share, tile=tile)
    assert_within(y, reference.moe_experts(x, block.experts, ids, share))
    assert not y[[7, 199]].any()


def test_experts_in_several_rounds_are_within_the_bounds(small: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = small.dims
    one = large_m.workspace_bytes(1, dims.top_k, dims.hidden, dims.intermediate)
    monkeypatch.setattr(large_m, "WORKSPACE_BYTES", 100 * one)
    share, ids = check.election("uniform", 250, dims, torch.Generator("cuda").manual_seed(3))
    x = activations(small, 250)
    assert_within(poisoned(small, x, ids, share), reference.moe_experts(x, small.experts, ids, share))


def test_experts_take_no_more_than_their_workspace(small: Block) -> None:
    dims, m = small.dims, 2048
    share, ids = check.election("uniform", m, dims, torch.Generator("cuda").manual_seed(4))
    x, y = activations(small, m), torch.empty(m, dims.hidden, dtype=torch.bfloat16, device="cuda")
    large_m.experts(x, small.experts, ids, share, y=y)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    large_m.experts(x, small.experts, ids, share, y=y)
    taken = torch.cuda.max_memory_allocated() - before
    dealt = 4 * (dims.experts + 2 * m * dims.top_k + 128 * dims.experts)
    assert taken <= large_m.workspace_bytes(m, dims.top_k, dims.hidden, dims.intermediate) + 2 * dealt


def test_experts_in_a_graph_follow_new_inputs_and_elections(small: Block) -> None:
    m = 40
    generator = torch.Generator("cuda").manual_seed(5)
    share, ids = check.election("uniform", m, small.dims, generator)
    x, stream = activations(small, m), torch.cuda.Stream()
    large_m.warm_up(small.experts, small.dims.top_k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        large_m.experts(x, small.experts, ids, share)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = large_m.experts(x, small.experts, ids, share)
    for kind in ("one", "uniform"):
        new_share, new_ids = check.election(kind, m, small.dims, generator)
        x.copy_(activations(small, m) * 0.5)
        share.copy_(new_share)
        ids.copy_(new_ids)
        graph.replay()
        torch.cuda.synchronize()
        assert_within(y, reference.moe_experts(x, small.experts, ids, share))


def test_halves_of_the_experts_add_up_to_the_whole(small: Block) -> None:
    whole = check.random_block(check.SHAPES["35b"], seed=9)
    share, ids = check.election("uniform", 33, whole.dims, torch.Generator("cuda").manual_seed(6))
    x = activations(whole, 33)
    expected = reference.moe_experts(x, whole.experts, ids, share)
    total = torch.zeros_like(expected.value)
    for part in range(2):
        total += large_m.experts(x, half(whole, part), ids, share).double()
    # Each card rounds its part.
    assert ((total - expected.value).abs() <= expected.bound + total.abs() * 2.0**-8 + 2.0**-6).all()


def half(whole: Block, part: int) -> check.ExpertWeights:
    """What one of two cards holds: half of the gate rows, of the up rows and of the down columns."""
    from qwen_nvfp4_serve.kernels import nvfp4
    from qwen_nvfp4_serve.kernels.nvfp4_moe import prepare_experts

    e, dims = whole.experts, whole.dims
    width, own = dims.intermediate, dims.intermediate // 2
    rows = torch.cat([torch.arange(own) + part * own, torch.arange(own) + width + part * own]).cuda()
    first = nvfp4.unswizzle_scales(e.w13_scales, 2 * width, dims.hidden // 16).view(torch.uint8)
    second = nvfp4.unswizzle_scales(e.w2_scales, dims.hidden, width // 16).view(torch.uint8)
    columns, groups = slice(part * own // 2, (part + 1) * own // 2), slice(part * own // 16, (part + 1) * own // 16)
    return prepare_experts(
        w13=e.w13[:, rows].contiguous(),
        w13_block_scale=first[:, rows].contiguous().view(torch.float8_e4m3fn),
        w2=e.w2[:, :, columns].contiguous(),
        w2_block_scale=second[:, :, groups].contiguous().view(torch.float8_e4m3fn),
        gate_scale=e.gate_scale,
        up_scale=e.up_scale,
        down_scale=e.down_scale,
    )
