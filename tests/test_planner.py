"""The planner against published engine logs, vLLM's counting rules, and itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_nvfp4_serve.dims import dims_from_config
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import GPUS, find_gpu
from qwen_nvfp4_serve.models import MODELS, find_model
from qwen_nvfp4_serve.planner import PlanModel, PlanRequest, alternatives, plan
from qwen_nvfp4_serve.planner.cache import cache_layout
from qwen_nvfp4_serve.planner.memory import capture_sizes
from qwen_nvfp4_serve.planner.request import default_gdn_prefill
from qwen_nvfp4_serve.reference import EMBEDDED
from qwen_nvfp4_serve.units import GIB

CASES = json.loads((Path(__file__).parent / "data" / "planner_cases.json").read_text())


def request(name: str = "qwen3.5-35b-a3b", **values: Any) -> PlanRequest:
    """A request for a catalogue model."""
    row = find_model(name)
    assert row is not None
    dims = row.dims or dims_from_config(json.loads((EMBEDDED / "config.json").read_text()))
    gpu = values.pop("gpu", None)
    return PlanRequest(model=PlanModel.from_row(row, dims), gpu=find_gpu(gpu) if gpu else None, **values)


def from_case(given: dict[str, Any]) -> PlanRequest:
    """A request from a case's `given`."""
    pool = given.pop("kv_pool_gib", None)
    names = {"kv_cache_dtype": "kv_dtype", "max_num_batched_tokens": "batched_tokens"}
    values = {names.get(key, key): value for key, value in given.items() if key != "model"}
    return request(given["model"], kv_pool_bytes=None if pool is None else round(pool * GIB), **values)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_plan_published_case_matches_to_the_token(case: dict[str, Any]) -> None:
    planned = plan(from_case(dict(case["given"])))
    for key, expected in case["expect"].items():
        if key == "notice":
            assert any("max_num_batched_tokens" in notice for notice in planned.notices) is expected
        elif key == "exit":
            assert (planned.fits is False) == (expected == 1)
        else:
            assert getattr(planned, key) == expected


# Blocks that vLLM 0.33's rule gives, worked out by hand from the state and KV bytes of each model.
@pytest.mark.parametrize(
    ("name", "values", "block", "per_request"),
    [
        ("qwen3.5-35b-a3b", {}, 2096, 126 + 6),
        ("qwen3.5-35b-a3b", {"prefix_caching": False}, 2096, 126 + 3),
        ("qwen3.5-35b-a3b", {"state_dtype": "bfloat16"}, 1072, 245 + 6),
        ("qwen3.5-35b-a3b", {"kv_dtype": "bfloat16"}, 1056, 249 + 6),
        ("qwen3.5-35b-a3b", {"gdn_prefill": "flashinfer"}, 2112, 125 + 9),
        ("qwen3.5-35b-a3b", {"gdn_prefill": "flashinfer", "prefix_caching": False}, 2096, 126 + 3),
        ("qwen3.5-35b-a3b", {"gdn_prefill": "flashinfer", "state_dtype": "bfloat16"}, 1088, 241 + 9),
        ("qwen3.5-35b-a3b", {"speculative_tokens": 1}, 2112, 125 + 3 * 3),
        ("qwen3.5-35b-a3b", {"speculative_tokens": 3}, 2144, 123 + 3 * 5),
        ("qwen3.5-35b-a3b", {"speculative_tokens": 3, "prefix_caching": False}, 2144, 123 + 3 * 4),
        ("qwen3.5-35b-a3b", {"tensor_parallel": 2}, 2096, 126 + 6),
        ("qwen3.5-35b-a3b", {"tensor_parallel": 4}, 1056, 249 + 6),
        ("qwen3.5-27b", {}, 1568, 168 + 6),
        ("qwen3.5-27b", {"state_dtype": "bfloat16"}, 800, 328 + 6),
        ("qwen3.5-27b", {"gdn_prefill": "flashinfer"}, 1600, 164 + 9),
        ("qwen3.5-27b", {"attention": "cpu"}, 1664, 158 + 6),
        ("qwen3.5-27b", {"kv_dtype": "bfloat16", "tensor_parallel": 2}, 784, 335 + 6),
    ],
)
def test_cache_layout_setting_gives_block_and_request_blocks(
    name: str, values: dict[str, Any], block: int, per_request: int
) -> None:
    layout = cache_layout(request(name, **values))
    assert (layout.block_tokens, layout.request_blocks(262_144)) == (block, per_request)


def test_cache_layout_drafter_joins_the_attention_group() -> None:
    without, with_mtp = cache_layout(request()), cache_layout(request(speculative_tokens=1))
    assert without.block_bytes == 10 * 2096 * 1024
    assert with_mtp.block_bytes == 11 * 2112 * 1024
    assert (with_mtp.attention_groups, with_mtp.gdn_groups) == (1, 3)


@pytest.mark.parametrize(
    ("attention", "gdn", "groups"), [(8, 9, (1, 1)), (10, 30, (1, 3)), (8, 12, (1, 2)), (12, 3, (4, 1))]
)
def test_cache_layout_layer_counts_give_vllms_groups(attention: int, gdn: int, groups: tuple[int, int]) -> None:
    base = request()
    dims = dataclasses.replace(base.model.dims, attention_layers=attention, gdn_layers=gdn)
    model = dataclasses.replace(base.model, dims=dims)
    layout = cache_layout(dataclasses.replace(base, model=model))
    assert (layout.attention_groups, layout.gdn_groups) == groups


@pytest.mark.parametrize(
    ("name", "needed_gib"),
    [("qwen3.5-35b-a3b", 2.64), ("qwen3.5-27b", 8.33)],
)
def test_cache_layout_full_context_takes_the_published_bytes(name: str, needed_gib: float) -> None:
    layout = cache_layout(request(name))
    assert round(layout.request_blocks(262_144) * layout.block_bytes / GIB, 2) == needed_gib


# tok/s at 4K and 256K: bandwidth over bytes, from the sizes that the published checkpoints have.
@pytest.mark.parametrize(
    ("name", "gpu", "at_4k", "at_context"),
    [
        ("qwen3.6-35b-a3b", "rtx-5090", 739, 354),
        ("qwen3.6-35b-a3b", "gb10", 113, 54),
        ("qwen3.6-35b-a3b", "h200", 1979, 947),
        ("qwen3.5-35b-a3b", "rtx-5090", 443, 268),
        ("qwen3.6-27b", "rtx-pro-6000", 99, 68),
        ("qwen3.6-27b", "h200", 266, 181),
        ("qwen3.5-27b", "rtx-pro-6000", 107, 71),
    ],
)
def test_plan_roofline_matches_the_byte_count(name: str, gpu: str, at_4k: int, at_context: int) -> None:
    roofline = plan(request(name, gpu=gpu, context=262_144)).roofline_tokens_per_s
    assert roofline.at_4k == pytest.approx(at_4k, abs=0.5)
    assert roofline.at_context == pytest.approx(at_context, abs=0.5)


# "Model loading took" of vLLM 0.33.0 on an H200, text only, no drafter: GDN and lm_head in BF16, all else NVFP4.
@pytest.mark.parametrize(("name", "loaded_gib"), [("qwen3.5-35b-a3b", 20.96), ("qwen3.5-27b", 25.18)])
def test_weights_of_measured_load_are_within_one_percent(name: str, loaded_gib: float) -> None:
    row = find_model(name)
    assert row is not None
    assert row.dims is not None
    stored = dataclasses.replace(row, precision=dataclasses.replace(row.precision, gdn="BF16"))
    weights = PlanModel.from_row(stored, row.dims).weights
    assert (weights.decoder + weights.embeddings) / GIB == pytest.approx(loaded_gib, rel=0.01)


@pytest.mark.parametrize(("name", "published_gb"), [("qwen3.6-35b-a3b", 23.4), ("qwen3.6-27b", 21.9)])
def test_weights_of_published_checkpoint_sum_to_its_size(name: str, published_gb: float) -> None:
    model = request(name).model
    assert model.weights.total / 1e9 == pytest.approx(published_gb, rel=0.005)


def test_plan_bytes_sum_to_what_is_free() -> None:
    for gpu in GPUS:
        planned = plan(request("qwen3.6-35b-a3b", gpu=gpu.name, free_bytes=gpu.usable_bytes))
        if planned.fits:
            assert sum(dataclasses.asdict(planned.bytes).values()) == gpu.usable_bytes


def test_plan_without_card_and_pool_leaves_the_verdict_open() -> None:
    planned = plan(request())
    assert planned.fits is None
    assert planned.pool_blocks is None
    assert planned.gpu_memory_utilization is None
    assert planned.block_size_tokens == 2096


def test_plan_context_above_the_pool_names_the_largest() -> None:
    planned = plan(request("qwen3.6-35b-a3b", gpu="rtx-4090", context=262_144))
    assert planned.fits is False
    assert planned.largest_context is not None
    shorter = plan(request("qwen3.6-35b-a3b", gpu="rtx-4090", context=planned.largest_context))
    longer = plan(request("qwen3.6-35b-a3b", gpu="rtx-4090", context=planned.largest_context + 1))
    assert (shorter.fits, longer.fits) == (True, False)
    assert f"it fits with --context {planned.largest_context}" in alternatives(planned)


def test_plan_sequences_beyond_the_state_blocks_are_clamped() -> None:
    planned = plan(request(gpu="rtx-5090", seqs=4096))
    assert planned.max_num_seqs * planned.layout.least_blocks <= (planned.pool_blocks or 0) - 1
    assert any("max_num_seqs lowered from 4,096" in notice for notice in planned.notices)


@pytest.mark.parametrize("speculative_tokens", [0, 3])
def test_more_sequences_wished_for_never_give_fewer(speculative_tokens: int) -> None:
    wishes = (1, 8, 20, 30, 39, 50, 100, 1000, 4096)
    found = [
        plan(request(gpu="rtx-5090", seqs=seqs, speculative_tokens=speculative_tokens)).max_num_seqs for seqs in wishes
    ]
    assert found == sorted(found)
    assert found[-1] > 1
    most = found[-1]
    above = plan(request(gpu="rtx-5090", seqs=most + 1, speculative_tokens=speculative_tokens))
    assert above.max_num_seqs == most


def test_plan_free_memory_below_the_table_gives_a_smaller_utilization() -> None:
    idle = plan(request(gpu="rtx-5090"))
    busy = plan(request(gpu="rtx-5090", free_bytes=round(28.5 * GIB)))
    assert idle.gpu_memory_utilization is not None
    assert busy.gpu_memory_utilization is not None
    assert busy.gpu_memory_utilization < idle.gpu_memory_utilization
    assert busy.gpu_memory_utilization * find_gpu("rtx-5090").usable_bytes <= 28.5 * GIB


@pytest.mark.parametrize("asked", [0.5, 0.89, 0.9, 0.95])
def test_plan_utilization_asked_for_is_given_where_it_is_free(asked: float) -> None:
    assert plan(request(gpu="rtx-5090", utilization=asked)).gpu_memory_utilization == asked


def test_plan_earlier_shortfall_lowers_the_pool() -> None:
    first, second = plan(request(gpu="rtx-5090")), plan(request(gpu="rtx-5090", extra_bytes=GIB))
    assert first.pool_bytes is not None
    assert second.pool_bytes is not None
    assert 0.9 * GIB < first.pool_bytes - second.pool_bytes < 1.1 * GIB


def test_alternatives_are_plans_that_fit() -> None:
    refused = plan(request(gpu="rtx-5090", kv_pool_bytes=20 * GIB))
    assert refused.fits is False
    lines = alternatives(refused)
    assert not any("--context" in line for line in lines)
    assert "it fits with the pool left to the planner" in lines


def test_alternatives_of_a_small_pool_do_not_call_it_hopeless() -> None:
    instead = alternatives(plan(request(gpu="rtx-5090", context=131_072, kv_pool_bytes=GIB // 10)))
    assert "it fits with the pool left to the planner" in instead
    assert not any("choose a smaller model" in sentence for sentence in instead)


def test_plan_largest_model_names_machines_that_hold_it() -> None:
    on_b200 = plan(request("qwen3.5-397b-a17b", gpu="b200"))
    assert on_b200.fits is False
    assert any("--tensor-parallel 2" in line for line in alternatives(on_b200))
    on_4090 = plan(request("qwen3.5-397b-a17b", gpu="rtx-4090"))
    assert any("no quantization" in line for line in alternatives(on_4090))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"context": 0}, "--context"),
        ({"context": 262_145}, "--context"),
        ({"seqs": 0}, "--seqs"),
        ({"batched_tokens": -1}, "--max-num-batched-tokens"),
        ({"batched_tokens": 10**12}, "--max-num-batched-tokens"),
        ({"speculative_tokens": 17}, "--speculative-tokens"),
        ({"speculative_tokens": -1}, "--speculative-tokens"),
        ({"tensor_parallel": 3}, "--tensor-parallel"),
        ({"tensor_parallel": 0}, "--tensor-parallel"),
        ({"kv_pool_bytes": 0}, "--kv-pool-gib"),
        ({"utilization": 1.5}, "--gpu-memory-utilization"),
    ],
)
def test_plan_impossible_value_is_refused_by_name(values: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        plan(request(**values))


def test_plan_speculation_without_drafter_is_refused() -> None:
    wanted = request(speculative_tokens=2)
    bare = dataclasses.replace(wanted, model=dataclasses.replace(wanted.model, has_mtp=False))
    with pytest.raises(UsageError, match="mtp"):
        plan(bare)


@pytest.mark.parametrize(
    ("gpu", "prefill"),
    [
        ("rtx-5090", "flashinfer"),
        ("gb10", "flashinfer"),
        ("h200", "flashinfer"),
        ("b200", "flashinfer"),
        ("rtx-4090", "triton"),
        ("rtx-3090", "triton"),
        (None, "triton"),
    ],
)
def test_default_gdn_prefill_card_gives_vllms_choice(gpu: str | None, prefill: str) -> None:
    assert default_gdn_prefill(find_gpu(gpu) if gpu else None, request().model.dims) == prefill


def test_plan_flashinfer_prefill_on_a_card_without_it_counts_triton_blocks() -> None:
    planned = plan(request(gpu="rtx-4090", gdn_prefill="flashinfer"))
    assert planned.block_size_tokens == 2096
    assert any("Triton" in notice for notice in planned.notices)


@pytest.mark.parametrize(("seqs", "sizes"), [(1, 2), (4, 4), (32, 3 + 8), (256, 3 + 31 + 17), (1024, 3 + 31 + 17)])
def test_capture_sizes_sequences_give_vllms_list(seqs: int, sizes: int) -> None:
    assert capture_sizes(seqs, 0) == sizes


def test_catalogue_names_plan_on_every_card() -> None:
    for row in MODELS:
        if row.dims is not None:
            for gpu in GPUS:
                assert plan(request(row.name, gpu=gpu.name)).fits in (True, False)


SETTINGS = st.fixed_dictionaries(
    {
        "kv_dtype": st.sampled_from(["fp8", "bfloat16"]),
        "prefix_caching": st.booleans(),
        "speculative_tokens": st.integers(0, 8),
        "gdn_prefill": st.sampled_from(["triton", "flashinfer", None]),
        "state_dtype": st.sampled_from(["float32", "bfloat16", None]),
        "seqs": st.integers(1, 2048),
        "batched_tokens": st.integers(1, 65_536),
        "vision": st.booleans(),
        "eager": st.booleans(),
    }
)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    """Requests over random dims, cards, free memory and settings."""
    base = request(draw(st.sampled_from(["qwen3.5-35b-a3b", "qwen3.5-27b", "qwen3.6-35b-a3b"])))
    dims = dataclasses.replace(
        base.model.dims,
        hidden=256 * draw(st.integers(1, 24)),
        attention_layers=draw(st.integers(1, 24)),
        gdn_layers=draw(st.integers(1, 96)),
        kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        head_dim=draw(st.sampled_from([64, 128, 256])),
        gdn_value_heads=draw(st.sampled_from([4, 16, 32, 48, 64])),
        max_context=draw(st.integers(64, 1_000_000)),
    )
    row = find_model(base.model.name)
    assert row is not None
    gpu = draw(st.sampled_from(GPUS))
    free = draw(st.integers(0, gpu.usable_bytes))
    return PlanRequest(model=PlanModel.from_row(row, dims), gpu=gpu, free_bytes=free, **draw(SETTINGS))


@settings(deadline=None)
@given(requests())
def test_plan_pool_never_exceeds_the_memory_given(wanted: PlanRequest) -> None:
    planned = plan(wanted)
    assert planned.pool_bytes is not None
    assert 0 <= planned.pool_bytes <= (wanted.free_bytes or 0)
    if planned.fits:
        assert planned.bytes.fixed + planned.pool_bytes <= (wanted.free_bytes or 0)
        assert planned.blocks_per_request + 1 <= (planned.pool_blocks or 0)
    if planned.pool_bytes:
        assert planned.bytes.fixed + planned.pool_bytes <= (wanted.free_bytes or 0)


@settings(deadline=None)
@given(requests(), st.data())
def test_plan_that_fits_stays_fitting_with_less_context(wanted: PlanRequest, data: st.DataObject) -> None:
    planned = plan(wanted)
    if planned.fits:
        context = data.draw(st.integers(1, planned.max_model_len))
        assert plan(dataclasses.replace(wanted, context=context)).fits is True
