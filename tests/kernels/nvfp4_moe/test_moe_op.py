"""The block's limits, its definition and its shape under tracing, without a card."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import nvfp4, nvfp4_linear, nvfp4_moe
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, MoeDims, reference

DIMS = MoeDims(hidden=2048, intermediate=512, experts=256, top_k=8, shared_intermediate=512)


def random_experts(experts: int, hidden: int, intermediate: int, seed: int = 0) -> ExpertWeights:
    """Quantized random experts whose gate, up and down scales all differ."""
    generator = torch.Generator().manual_seed(seed)
    scales = [torch.rand(experts, generator=generator) * 1e-3 + 1e-3 for _ in range(3)]
    first = torch.cat([s.unsqueeze(-1).expand(-1, intermediate) for s in scales[:2]], dim=1)
    w13 = nvfp4.quantize_nvfp4(torch.randn(experts, 2 * intermediate, hidden, generator=generator), first)
    w2 = nvfp4.quantize_nvfp4(torch.randn(experts, hidden, intermediate, generator=generator), scales[2])
    return nvfp4_moe.prepare_experts(
        w13=w13.packed,
        w13_block_scale=w13.block_scale,
        w2=w2.packed,
        w2_block_scale=w2.block_scale,
        gate_scale=scales[0],
        up_scale=scales[1],
        down_scale=scales[2],
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1)])
@pytest.mark.parametrize(
    "dims",
    [
        DIMS,
        dataclasses.replace(DIMS, intermediate=256, shared_intermediate=256),
        MoeDims(hidden=256, intermediate=64, experts=16, top_k=4, shared_intermediate=128),
        MoeDims(hidden=4096, intermediate=1024, experts=512, top_k=10, shared_intermediate=1024),
        dataclasses.replace(DIMS, shared_intermediate=None),
    ],
)
def test_supports_takes_the_models_blocks(capability: tuple[int, int], dims: MoeDims) -> None:
    assert nvfp4_moe.supports(capability, dims, 1) is None
    assert nvfp4_moe.supports(capability, dims, nvfp4_moe.KERNEL_TOKENS) is None


@pytest.mark.parametrize(
    ("change", "tokens", "word"),
    [
        ({"hidden": 2080}, 1, "2080"),
        ({"intermediate": 192}, 1, "192"),
        ({"shared_intermediate": 0}, 1, "shared"),
        ({"experts": 516}, 1, "516"),
        ({"experts": 12, "top_k": 4}, 1, "12"),
        ({"top_k": 17}, 1, "17"),
        ({"top_k": 0}, 1, "0 experts"),
        ({}, 33, "33"),
        ({}, 0, "0 tokens"),
    ],
)
def test_supports_refuses_with_the_reason(change: dict[str, int], tokens: int, word: str) -> None:
    reason = nvfp4_moe.supports((9, 0), dataclasses.replace(DIMS, **change), tokens)
    assert reason is not None
    assert word in reason


def test_supports_unknown_card_is_refused() -> None:
    assert "7.5" in (nvfp4_moe.supports((7, 5), DIMS) or "")


def test_select_experts_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, 3.0]]).bfloat16()
    weights, ids = nvfp4_moe.select_experts(logits, 5)
    assert ids.tolist() == [[1, 3, 7, 2, 4]]
    assert weights.sum().item() == pytest.approx(1.0)
    assert weights[0, 0] == weights[0, 2]


def test_select_experts_not_a_number_elects_the_first_ones_with_no_weight() -> None:
    weights, ids = nvfp4_moe.select_experts(torch.full((2, 16), float("nan")).bfloat16(), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.0] * 4] * 2


def test_select_experts_without_renormalization_keeps_the_probabilities() -> None:
    logits = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, ids = nvfp4_moe.select_experts(logits, 4, renormalize=False)
    expected = torch.softmax(logits.float(), -1).gather(1, ids.long())
    torch.testing.assert_close(weights, expected)


def plain(x: torch.Tensor, w: ExpertWeights, expert: int) -> torch.Tensor:
    """One expert's output for every token, written out."""
    half = w.intermediate
    block = nvfp4.unswizzle_scales(w.w13_scales[expert], 2 * half, w.hidden // 16)
    w13 = nvfp4.dequantize_nvfp4(w.w13[expert], block, 1.0, dtype=torch.float64)
    w2 = nvfp4.dequantize_nvfp4(
        w.w2[expert], nvfp4.unswizzle_scales(w.w2_scales[expert], w.hidden, half // 16), 1.0, dtype=torch.float64
    )
    gate = x.double() @ w13[:half].T * w.gate_scale[expert].double()
    up = x.double() @ w13[half:].T * w.up_scale[expert].double()
    h = torch.nn.functional.silu(gate) * up
    return h.bfloat16().double() @ w2.T * w.down_scale[expert].double()


@pytest.mark.parametrize("renormalize", [True, False])
def test_reference_block_equals_the_block_written_out(renormalize: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    weights, shared = random_experts(8, 128, 64), random_experts(1, 128, 128, seed=1)
    x = torch.randn(5, 128, generator=generator).bfloat16()
    router = torch.randn(8, 128, generator=generator).bfloat16()
    gate = torch.randn(1, 128, generator=generator).bfloat16()
    got = reference.moe_block(
        x, router, weights, top_k=3, renormalize=renormalize, shared=shared, shared_gate=gate
    ).value
    share, ids = nvfp4_moe.select_experts((x.double() @ router.double().T).bfloat16(), 3, renormalize=renormalize)
    expected = torch.sigmoid(x.double() @ gate.double().T) * plain(x, shared, 0)
    for token in range(5):
        for rank in range(3):
            one = plain(x[token : token + 1], weights, int(ids[token, rank]))[0]
            expected[token] += share[token, rank].double() * one
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_reference_ids_out_of_range_add_nothing() -> None:
    weights = random_experts(8, 128, 64)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[3, 5, -1], [8, 3, 5]], dtype=torch.int32)
    share = torch.tensor([[0.5, 0.25, 9.0], [9.0, 0.5, 0.25]])
    got = reference.moe_experts(x, weights, ids, share).value
    kept = torch.tensor([[3, 5], [3, 5]], dtype=torch.int32)
    expected = reference.moe_experts(x, weights, kept, torch.tensor([[0.5, 0.25]] * 2)).value
    torch.testing.assert_close(got, expected)


def test_reference_bounds_hold_in_float32_and_catch_one_doubled_block_scale() -> None:
    weights = random_experts(8, 256, 128)
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids = torch.tensor([[0, 3]] * 6, dtype=torch.int32)
    share = torch.full((6, 2), 0.5)
    h = reference.intermediate(x, weights, ids, dtype=torch.float64)
    y = reference.combine(h.value.bfloat16().double(), weights, ids, share)
    exact = reference.moe_experts(x, weights, ids, share)
    single = reference.intermediate(x, weights, ids, dtype=torch.float32).value.bfloat16()
    assert ((single.double() - h.value).abs() <= h.bound).all()
    assert ((y.value.bfloat16().double() - y.value).abs() <= y.bound).all()
    coarse = reference.moe_experts(x, weights, ids, share, dtype=torch.float32).value.bfloat16()
    assert ((coarse.double() - exact.value).abs() <= exact.bound).all()
    for name in ("w13_scales", "w2_scales"):
        scales = getattr(weights, name).clone()
        scales.view(torch.uint8).view(8, -1)[3, 40] += 8  # doubles one block's scale
        broken = dataclasses.replace(weights, **{name: scales})
        wrong_h = reference.intermediate(x, broken, ids, dtype=torch.float64).value
        wrong_y = reference.combine(h.value.bfloat16().double(), broken, ids, share).value
        assert ((wrong_h - h.value).abs() > h.bound).any() == (name == "w13_scales")
        assert ((wrong_y - y.value).abs() > y.bound).any() == (name == "w2_scales")


def test_ops_on_a_cpu_compute_the_definition() -> None:
    weights, shared = random_experts(16, 256, 64), random_experts(1, 256, 128, seed=1)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 256, generator=generator).bfloat16()
    router = (torch.randn(16, 256, generator=generator) / 16).bfloat16()
    gate = torch.randn(256, generator=generator).bfloat16()
    expected = reference.moe_block(x, router, weights, top_k=4, shared=shared, shared_gate=gate)
    got = nvfp4_moe.moe_block(x, router, weights, top_k=4, shared=shared, shared_gate=gate)
    assert got.dtype is torch.bfloat16
    assert ((got.double() - expected.value).abs() <= expected.bound).all()
    share, ids = nvfp4_moe.select_experts(reference.router_logits(x, router), 4)
    routed = reference.moe_experts(x, weights, ids, share)
    assert ((nvfp4_moe.moe_experts(x, weights, ids, share).double() - routed.value).abs() <= routed.bound).all()
    assert nvfp4_moe.moe_experts(x[:0], weights, ids[:0], share[:0]).shape == (0, 256)


def test_ops_traced_give_the_output_shape() -> None:
    weights = ExpertWeights.of([t.to("meta") for t in random_experts(16, 256, 64).tensors()])
    x = torch.empty(3, 256, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(3, 4, dtype=torch.int32, device="meta")
    router = torch.empty(16, 256, dtype=torch.bfloat16, device="meta")
    assert nvfp4_moe.moe_experts(x, weights, ids, ids.float()).shape == (3, 256)
    assert nvfp4_moe.moe_block(x, router, weights, top_k=4).shape == (3, 256)


def test_ops_under_compile_are_one_node_each() -> None:
    weights = random_experts(8, 128, 64)
    compiled = torch.compile(
        lambda x, ids, share: nvfp4_moe.moe_experts(x, weights, ids, share) * 2, backend="aot_eager", fullgraph=True
    )
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    ids, share = torch.tensor([[1, 2], [2, 7]], dtype=torch.int32), torch.full((2, 2), 0.5)
    assert torch.equal(compiled(x, ids, share), nvfp4_moe.moe_experts(x, weights, ids, share) * 2)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x": torch.zeros(2, 128)}, "activations"),
        ({"x": torch.zeros(2, 256).bfloat16()}, "activations"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "topk_ids"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int32)}, "topk_ids"),
        ({"share": torch.zeros(2, 2, dtype=torch.float64)}, "topk_weights"),
        ({"share": torch.zeros(2, 3)}, "topk_weights"),
    ],
)
def test_experts_with_unfitting_arguments_are_refused(change: dict[str, torch.Tensor], word: str) -> None:
    arguments = {
        "x": torch.zeros(2, 128).bfloat16(),
        "ids": torch.zeros(2, 2, dtype=torch.int32),
        "share": torch.zeros(2, 2),
        **change,
    }
    with pytest.raises(UsageError, match=word):
        nvfp4_moe.moe_experts(arguments["x"], random_experts(8, 128, 64), arguments["ids"], arguments["share"])


def test_prepare_experts_keeps_codes_and_each_scale() -> None:
    weights = random_experts(8, 128, 64)
    assert weights.w13_scales.shape == (8, 128, 8)
    assert weights.w2_scales.shape == (8, 128, 4)
    assert not torch.equal(weights.gate_scale, weights.up_scale)
    assert (weights.experts, weights.hidden, weights.intermediate) == (8, 128, 64)


def test_prepare_experts_of_unfitting_tensors_is_refused() -> None:
    w = random_experts(8, 128, 64)
    with pytest.raises(UsageError, match="w2"):
        nvfp4_moe.prepare_experts(
            w13=w.w13,
            w13_block_scale=torch.zeros(8, 128, 8).to(torch.float8_e4m3fn),
            w2=w.w2[:4],
            w2_block_scale=torch.zeros(4, 128, 4).to(torch.float8_e4m3fn),
            gate_scale=w.gate_scale,
            up_scale=w.up_scale,
            down_scale=w.down_scale,
        )


def test_shared_from_linears_shares_their_memory() -> None:
    gate_up = nvfp4.quantize_nvfp4(torch.randn(256, 128, generator=torch.Generator().manual_seed(6)), 1e-3)
    down = nvfp4.quantize_nvfp4(torch.randn(128, 128, generator=torch.Generator().manual_seed(7)), 1e-3)
    first = nvfp4_linear.prepare_weight(gate_up.packed, gate_up.block_scale, (128, 128), (1e-3, 2e-3))
    second = nvfp4_linear.prepare_weight(down.packed, down.block_scale, (128,), (3e-3,))
    shared = nvfp4_moe.shared_from_linears(first, second)
    assert shared.w13.data_ptr() == gate_up.packed.data_ptr()
    assert [s.item() for s in (shared.gate_scale, shared.up_scale, shared.down_scale)] == pytest.approx(
        [1e-3, 2e-3, 3e-3]
    )
    with pytest.raises(UsageError, match="shared"):
        nvfp4_moe.shared_from_linears(second, second)
