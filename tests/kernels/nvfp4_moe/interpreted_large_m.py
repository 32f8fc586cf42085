"""The grouped GEMM of the experts in Triton's interpreter, which a process has from its start or not at all:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/nvfp4_moe/interpreted_large_m.py

`test_large_m.py` starts that. The interpreter cannot multiply BF16, so activations are float32 here, and nothing
between the products is rounded.
"""

from __future__ import annotations

import os

import pytest
import torch
from tests.kernels.nvfp4_moe.made_experts import dense, made_experts

from qwen_nvfp4_serve.kernels import nvfp4
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, large_m

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
triton_step = pytest.importorskip("qwen_nvfp4_serve.kernels.triton_step")

EXPERTS, HIDDEN, WIDTH, TOP_K = 6, 192, 64, 3


def random_experts(experts: int = EXPERTS, hidden: int = HIDDEN, width: int = WIDTH) -> ExpertWeights:
    """Many block scales, up to the largest."""
    return made_experts(experts, hidden, width, block_scales=(32, 127), global_scales=(1e-5, 7e-5, 3e-4))


def expected(x: torch.Tensor, weights: ExpertWeights, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The sum in float64, nothing rounded."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for rank, expert in enumerate(chosen):
            if not 0 <= expert < weights.experts:
                continue
            first, second = dense(weights, expert, torch.float64)
            gate, up = (first @ x[token].double()).chunk(2)
            y[token] += shares[token, rank].double() * (second @ (torch.nn.functional.silu(gate) * up))
    return y


def choice(tokens: int, how: str, experts: int = EXPERTS, top_k: int = TOP_K) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and weights: `uniform`, `one` expert first for all, or some `outside` the experts and a row of padding."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).int()
    if how == "one":
        ids[:, 0] = experts - 1
        ids[:, 1:] = torch.where(ids[:, 1:] == experts - 1, 0, ids[:, 1:])
    if how == "outside":
        ids[0, 1], ids[-1], ids[tokens // 2, 0] = experts, -1, -7
    return ids, torch.rand(tokens, top_k, generator=generator)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("tokens", "how"), [(1, "uniform"), (40, "uniform"), (40, "one"), (9, "outside")])
def test_deal_every_pair_lies_once_in_a_block_of_its_expert(tokens: int, how: str, rows: int) -> None:
    ids, _ = choice(tokens, how)
    blocks = large_m.deal(ids, EXPERTS, rows)
    order = blocks.order.tolist()
    dealt = [pair for pair, expert in enumerate(ids.flatten().tolist()) if 0 <= expert < EXPERTS]
    assert [order[blocks.places[pair]] for pair in dealt] == dealt
    sizes = [-(-int((ids == expert).sum()) // rows) * rows for expert in range(EXPERTS)]
    assert blocks.starts.tolist() == [sum(sizes[:expert]) for expert in range(EXPERTS + 1)]
    found: dict[int, list[int]] = {expert: [] for expert in range(EXPERTS)}
    for expert, pairs in zip(blocks.expert.tolist(), blocks.order.view(-1, rows).tolist(), strict=True):
        if expert >= 0:
            found[expert] += [pair for pair in pairs if pair >= 0]
    flat = ids.flatten().tolist()
    assert found == {expert: [p for p, chosen in enumerate(flat) if chosen == expert] for expert in range(EXPERTS)}


def dealt(ids: torch.Tensor, experts: int, rows: int) -> tuple[list[int], list[int], list[int], dict[int, int]]:
    """As `deal` says: order up to the last block, the blocks' experts, starts, and the places of the pairs dealt."""
    order: list[int] = []
    owners: list[int] = []
    starts = [0]
    for expert in range(experts):
        pairs = [pair for pair, chosen in enumerate(ids.flatten().tolist()) if chosen == expert]
        blocks = -(-len(pairs) // rows)
        order += pairs + [-1] * (blocks * rows - len(pairs))
        owners += [expert] * blocks
        starts.append(len(order))
    return order, owners, starts, {pair: place for place, pair in enumerate(order) if pair >= 0}


def drawn(tokens: int, top_k: int, least: int, most: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(least, most + 1, (tokens, top_k), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("chunk", [16, 256])
@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize(
    ("ids", "experts"),
    [
        pytest.param(drawn(1, 1, 2, 2), 3, id="one pair"),
        pytest.param(drawn(37, 3, 0, 5), 6, id="pairs left over"),
        pytest.param(drawn(32, 8, 0, 7), 8, id="whole chunks"),
        pytest.param(drawn(101, 3, 4, 4), 5, id="all of the last expert"),
        pytest.param(drawn(40, 2, 0, 0), 1, id="one expert"),
        pytest.param(drawn(150, 2, -2, 7), 5, id="some outside"),
        pytest.param(drawn(21, 2, 6, 9), 6, id="all outside"),
        pytest.param(drawn(0, 2, 0, 0), 6, id="none"),
    ],
)
def test_deal_equals_its_definition_and_leaves_other_memory(
    ids: torch.Tensor, experts: int, rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched = -77

    def new_full(self: torch.Tensor, size: int | tuple[int, ...], **how: torch.dtype) -> torch.Tensor:
        return self.new_full((size,) if isinstance(size, int) else size, untouched, **how)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_full)
    monkeypatch.setattr(large_m, "PAIRS_IN_CHUNK", chunk)
    monkeypatch.setattr(large_m, "LINES_IN_STEP", 4)
    monkeypatch.setattr(large_m, "BLOCKS_IN_STEP", 8)
    blocks = large_m.deal(ids, experts, rows)
    order, owners, starts, places = dealt(ids, experts, rows)
    assert blocks.starts.tolist() == starts
    assert blocks.expert.tolist() == owners + [-1] * (blocks.expert.numel() - len(owners))
    assert blocks.order.tolist() == order + [untouched] * (blocks.order.numel() - len(order))
    assert blocks.places.tolist() == [places.get(pair, untouched) for pair in range(ids.numel())]


@pytest.mark.parametrize("tile", large_m.TILES, ids=lambda tile: f"rows{tile.rows}")
@pytest.mark.parametrize(("tokens", "how"), [(1, "uniform"), (19, "one"), (6, "outside")])
def test_experts_every_tile_equals_the_definition(tile: large_m.Tile, tokens: int, how: str) -> None:
    weights, (ids, shares) = random_experts(), choice(tokens, how)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3))
    y = large_m.experts(x, weights, ids, shares, y=torch.full_like(x, float("nan")), tile=tile)
    wanted = expected(x, weights, ids, shares)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))
    if how == "outside":
        assert not y[-1].any()


def test_experts_sizes_of_whole_steps_equal_the_definition() -> None:
    weights, (ids, shares) = random_experts(3, 128, 128), choice(5, "uniform", experts=3, top_k=2)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(4))
    wanted = expected(x, weights, ids, shares)
    y = large_m.experts(x, weights, ids, shares)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))


def test_experts_in_several_rounds_equal_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, (ids, shares) = random_experts(), choice(7, "uniform")
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(5))
    whole = large_m.experts(x, weights, ids, shares)
    monkeypatch.setattr(large_m, "WORKSPACE_BYTES", 3 * large_m.workspace_bytes(1, TOP_K, HIDDEN, WIDTH))
    assert large_m.tokens_in_round(TOP_K, HIDDEN, WIDTH) == 3
    torch.testing.assert_close(large_m.experts(x, weights, ids, shares), whole)


@triton.jit
def decode(codes, bytes_, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, SIZE)
    scale = triton_step.block_scales(bytes_, row, row < SIZE, 0, 1, 4)
    code = tl.load(codes + tl.arange(0, 16)).to(tl.uint16)
    for group in tl.static_range(4):
        one = tl.sum(tl.where(tl.arange(0, 4)[None, :] == group, scale, 0.0), 1)
        at = row[:, None] * 64 + group * 16 + tl.arange(0, 16)[None, :]
        tl.store(out + at, triton_step.values(code[None, :], one[:, None]))


def test_weights_every_code_times_every_scale_is_exact() -> None:
    every = torch.arange(512, dtype=torch.int64) % 127
    plain = every.to(torch.uint8).view(torch.float8_e4m3fn).view(128, 4)
    codes = torch.arange(16, dtype=torch.uint8)
    out = torch.full((128, 4, 16), float("nan"))
    decode[(1,)](codes, nvfp4.swizzle_scales(plain).view(torch.uint8), out, SIZE=128)
    wanted = plain.float().unsqueeze(-1) * nvfp4.decode_e2m1(codes) * 2.0**-22
    assert torch.equal(out, wanted)
    assert torch.equal(out.bfloat16().float(), wanted)
