"""The engine bench: its arithmetic and pages on made numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.bench_results import CARD

from qwen_nvfp4_serve.bench.clocks import Clocks
from qwen_nvfp4_serve.bench.engine import (
    DepthRates,
    EngineResult,
    EngineRun,
    EngineSpec,
    Kernel,
    decode_rates,
    dump_engine,
    dump_spec,
    read_engine,
    read_spec,
)
from qwen_nvfp4_serve.bench.engine_page import by_kind, engine_markdown, kind_of, roofline
from qwen_nvfp4_serve.bench.kernel_times import apart, apart_on_card
from qwen_nvfp4_serve.bench.measured import measured_model, text_bytes
from qwen_nvfp4_serve.bench.rows import number
from qwen_nvfp4_serve.bench.statistics import Spread, spread
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.models import find_model
from qwen_nvfp4_serve.planner import PlanModel

SPEC = EngineSpec(
    model_folder="/m/35b",
    configurations={"stock": {}, "ours": {"linear_backend": "marlin"}},
    streams=(1, 2),
    depths=(65_536,),
)


def plan_model() -> PlanModel:
    row = find_model("qwen3.5-35b-a3b")
    assert row is not None
    assert row.dims is not None
    return PlanModel.from_row(row, row.dims)


def steady(value: float) -> Spread:
    found = spread([value, value])
    assert found is not None
    return found


def made(rate: float, label: str) -> EngineRun:
    return EngineRun(
        label=label,
        options={"kv_cache_dtype": "fp8"},
        load_s=60.0,
        decode={1: steady(rate), 2: steady(2 * rate)},
        prefill={8192: steady(7000.0)},
        depths={65_536: DepthRates(prefill=5000.0, decode=rate / 2)},
        used_bytes=None,
        kernels=(Kernel(name="fused_moe_kernel", us=30.0, calls=40), Kernel(name="marlin", us=50.0, calls=80)),
    )


def result() -> EngineResult:
    return EngineResult(
        spec=SPEC, vllm="0.33.0", torch="2.13.0", cards=(CARD,), runs=(made(200, "stock"), made(300, "ours"))
    )


def loaded(*sizes: int | None) -> EngineResult:
    """The same with the bytes of weights that each run holds, one for all or one each."""
    runs = result().runs
    return replace(
        result(), runs=tuple(replace(run, model_bytes=size) for run, size in zip(runs, sizes * 2, strict=False))
    )


def test_decode_rates_cancel_what_both_runs_share() -> None:
    found = decode_rates(SPEC, 2, [1.0, 1.1], [1.0 + 2.56, 1.1 + 2.56])
    assert found.median == pytest.approx(2 * 256 / 2.56)
    assert found.std == pytest.approx(0.0, abs=1e-9)


def test_decode_rates_of_a_clock_that_does_not_move_are_refused() -> None:
    with pytest.raises(UsageError, match="Ask for longer answers"):
        decode_rates(SPEC, 1, [1.0, 1.0], [2.0, 1.0])


def test_roofline_falls_with_context_and_is_none_off_the_table() -> None:
    near, far = (roofline(plan_model(), CARD.name, context) for context in (4096, 262_144))
    assert near is not None
    assert far is not None
    assert near > far
    assert roofline(plan_model(), "Some Other Card", 4096) is None


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void marlin_moe_wna16::Marlin<...>", "MoE"),
        ("void marlin::Marlin<...>", "NVFP4 and FP8 linear"),
        ("nvfp4::(anonymous namespace)::route_kernel(nvfp4::(anonymous namespace)::RouteParams)", "MoE"),
        ("gate_up", "MoE"),
        ("nvfp4::(anonymous namespace)::gate_up_single_kernel<4>(nvfp4::(anonymous namespace)::MoeParams)", "MoE"),
        ("nvfp4::(anonymous namespace)::down_kernel<true>(nvfp4::(anonymous namespace)::MoeParams)", "MoE"),
        (
            "nvfp4::(anonymous namespace)::decode_kernel<float, 32>(nvfp4::(anonymous namespace)::DecodeParams)",
            "GDN",
        ),
        ("nvfp4::(anonymous namespace)::dense_kernel<1>(nvfp4::(anonymous namespace)::DenseParams)", "16-bit linear"),
        (
            "nvfp4::(anonymous namespace)::linear_kernel<2>(nvfp4::(anonymous namespace)::Params)",
            "NVFP4 and FP8 linear",
        ),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("triton_red_fused__to_copy_add_fused_add_rms_norm_qwen_nvfp4_moe_block_3", "compiled"),
        ("void humming<MmaOpClass, Shape<0u, 34816u, 5120u>>", "NVFP4 and FP8 linear"),
        ("void dot_kernel<float, 128, 0, cublasDotParams<...>>", "16-bit linear"),
        ("fused_recurrent_gated_delta_rule_fwd_kernel", "GDN"),
        ("nvjet_tst_64x8_64x16", "16-bit linear"),
        ("unheard_of", "other"),
    ],
)
def test_kind_of_kernel_names(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_by_kind_sums_and_sorts() -> None:
    kernels = [Kernel(name=name, us=us, calls=2.0) for name, us in (("topk", 1.0), ("rms_norm", 9.0), ("moe_sum", 3.0))]
    assert by_kind(kernels) == (("norm and activation", 9.0, 2.0), ("MoE", 4.0, 4.0))


def test_kernels_that_overlap_count_once() -> None:
    """`late` starts beside `early` and ends after it; `inside` lies within; before `alone` nothing runs."""
    spans = [
        ("late", 5.0, 14.0),
        ("early", 0.0, 10.0),
        ("inside", 6.0, 9.0),
        ("alone", 20.0, 21.5),
        ("early", 30.0, 31.0),
    ]
    assert sorted(apart(spans)) == [("alone", 1.5, 1), ("early", 11.0, 2), ("inside", 0.0, 1), ("late", 4.0, 1)]
    assert apart([]) == []


def test_kernels_of_a_profile_are_those_on_the_card() -> None:
    kinds = pytest.importorskip("torch").autograd.DeviceType

    def event(name: str, kind: object, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))

    events = [event("launch", kinds.CPU, 0.0, 9.0), event("kernel", kinds.CUDA, 2.0, 5.0)]
    assert apart_on_card(SimpleNamespace(events=lambda: events)) == [("kernel", 3.0, 1)]


def test_engine_markdown_says_where_kernels_count_their_waiting() -> None:
    stock, ours = result().runs
    long = (Kernel(name="late", us=2e6 / ours.decode[1].median, calls=1.0),)
    overlapping = replace(result(), runs=(stock, replace(ours, kernels=long, kernels_at={2: long})))
    assert "the times of ours add up to more than a step" in engine_markdown(overlapping, None)
    assert "of stock add up" not in engine_markdown(overlapping, None)
    before, after = engine_markdown(overlapping, None).split("the times of ours add up to more than a step")
    assert "of ours\n" in before, "under the first table that is too long"
    assert "of ours, 2 streams\n" in after
    apart_now = replace(overlapping, runs=(stock, replace(ours, kernels=long, kernels_apart=True)))
    assert "add up to more" not in engine_markdown(apart_now, None)


@pytest.mark.parametrize(("core_process", "said"), [(True, True), (False, False)])
def test_engine_markdown_says_that_a_prefill_may_stay_in_a_profile_of_several_streams(
    core_process: bool, said: bool
) -> None:
    stock, ours = result().runs
    at = {2: (Kernel(name="late", us=3e6 / ours.decode[2].median, calls=1.0),)}
    long = replace(ours, kernels_at=at, kernels_apart=True, core_process=core_process)
    page = engine_markdown(replace(result(), runs=(stock, long)), None)
    assert ("a prefill may stay in a profile of several streams: such times of ours add up to more" in page) is said


def test_engine_markdown_sets_a_timed_step_beside_its_kernels_where_no_moment_counts_twice() -> None:
    eight = (Kernel(name="topk", us=10.0, calls=2),)
    stock, ours = result().runs
    apart_now = replace(ours, kernels_apart=True, kernels_at={2: eight, 16: eight})
    page = engine_markdown(replace(result(), runs=(stock, apart_now)), None)
    steps = [1e6 * streams / ours.decode[streams].median for streams in (1, 2)]
    assert [f"| a step, timed without the profile | {us:.0f} | |" in page for us in steps] == [True, True]
    assert page.count("timed without the profile") == 2, "not where kernels overlap, nor of streams that were not timed"


def test_engine_markdown_sets_a_decode_graph_beside_its_kernels() -> None:
    stock, ours = result().runs
    page = engine_markdown(replace(result(), runs=(stock, replace(ours, graph_us={1: 4321.4, 2: 5000.0}))), None)
    assert page.count("| its graph, replayed with nothing between |") == 1, "of one stream alone there is a profile"
    assert "| its graph, replayed with nothing between | 4321 | |" in page.split("## A decode step of ours")[1]


def test_engine_markdown_names_card_ratio_and_share_of_the_roofline() -> None:
    page = engine_markdown(loaded(text_bytes(plan_model())), plan_model())
    bound = roofline(plan_model(), CARD.name, 128 + 144)
    assert bound is not None
    assert "NVIDIA H200, vLLM 0.33.0" in page
    assert "| decode, 1 stream, t/s | 200.0 ± 0.0 | 300.0 ± 0.0 (1.50x) |" in page
    assert f"| {200 / bound:.1%} | {300 / bound:.1%} |" in page
    assert f"| prefill of 65536, t/s | {number(5000)} | {number(5000)} (1.00x) |" in page
    assert f"| decode behind 65536, t/s | {number(100)} | {number(150)} (1.50x) |" in page
    assert "| all | 80 | 120 |" in page


@pytest.mark.parametrize(
    ("shares", "seen"),
    [
        ((1.04, 0.96), None),
        ((1.0, 1.06), "the engines loaded 20.90 GiB, 22.16 GiB"),
        ((0.94,), "the engines loaded 19.65 GiB, 19.65 GiB"),
        ((None,), "the engines do not say what they loaded"),
    ],
)
def test_engine_markdown_leaves_out_the_share_of_a_bound_of_other_weights(
    shares: tuple[float | None, ...], seen: str | None
) -> None:
    counted = text_bytes(plan_model())
    sizes = [None if share is None else round(share * counted) for share in shares]
    page = engine_markdown(loaded(*sizes), plan_model())
    assert ("| share of the byte roofline, " in page) is (seen is None)
    assert (f" comes to 20.90 GiB, and {seen}.\n" in page) is (seen is not None)


def test_measured_model_is_of_the_precision_that_the_runs_loaded() -> None:
    """25.18 GiB: what vLLM 0.33.0 loaded of the 27B with GDN in BF16; the catalogue's checkpoint has it in NVFP4."""
    row = find_model("qwen3.5-27b")
    assert row is not None
    assert row.dims is not None
    kept = measured_model(row, loaded(round(25.18 * 2**30)).runs)
    stored = PlanModel.from_row(row, row.dims)
    assert kept.weights.gdn == pytest.approx(stored.weights.gdn * 2 / 0.5625)
    assert kept.name == "Qwen3.5-27B with GDN in BF16"
    for other in (loaded(text_bytes(stored)), loaded(3 << 30), result()):
        assert measured_model(row, other.runs).weights == stored.weights


def test_engine_markdown_shows_a_step_of_every_profiled_stream_count_and_where_the_core_was() -> None:
    eight = (Kernel(name="fused_moe_kernel", us=70.4, calls=40), Kernel(name="topk", us=10.0, calls=2))
    stock, ours = result().runs
    both = replace(result(), runs=(replace(stock, core_process=True), replace(ours, kernels_at={8: eight})))
    page = engine_markdown(both, None)
    assert "## A decode step of ours, 8 streams\n\n| kernels | us per step | calls |" in page
    assert "| MoE | 80 | 42 |\n| all | 80 | 42 |" in page
    assert "stock, 8 streams" not in page
    assert "had a process of its own: stock. The engine's core shared the bench's process: ours.\n" in page
    alike = replace(both, runs=(replace(stock, core_process=True),))
    assert "\nThe engine's core had a process of its own.\n" in engine_markdown(alike, None)


@pytest.mark.parametrize(
    "kernels_at", [{0: (Kernel(name="one", us=1.0, calls=1),)}, {8: (Kernel(name="one", us=1e300, calls=1),)}]
)
def test_engine_result_with_a_profile_that_no_page_can_show_is_refused(
    tmp_path: Path, kernels_at: dict[int, tuple[Kernel, ...]]
) -> None:
    wrong = replace(result(), runs=(replace(made(200, "stock"), kernels_at=kernels_at),))
    (tmp_path / "engine.json").write_bytes(dump_engine(wrong))
    with pytest.raises(UsageError, match=r"runs\.0\.kernels_at"):
        read_engine(tmp_path / "engine.json")


CLOCKS = Clocks(
    sm_mhz=1980.0,
    sm_mhz_low=1830.0,
    memory_mhz_low=3201.0,
    power_w=560.4,
    power_w_high=698.0,
    reasons=("sw_power_cap",),
)


def test_engine_markdown_says_what_the_card_did_meanwhile() -> None:
    stock, ours = result().runs
    page = engine_markdown(replace(result(), runs=(stock, replace(ours, clocks={"decode 8": CLOCKS}))), None)
    assert "| decode 8 |  | 1,980 MHz (low 1,830), 560 W (high 698), sw_power_cap |\n" in page
    assert "## The card meanwhile" not in engine_markdown(result(), None)


@pytest.mark.parametrize("name", [one.name for one in fields(Clocks) if one.name != "reasons"])
@pytest.mark.parametrize("value", [b"-1.0", b"NaN", b"1e300"])
def test_engine_result_with_clocks_that_no_page_can_show_is_refused(tmp_path: Path, name: str, value: bytes) -> None:
    right = replace(made(200, "stock"), clocks={"decode 8": replace(CLOCKS, **{name: 77.25})})
    (tmp_path / "engine.json").write_bytes(dump_engine(replace(result(), runs=(right,))).replace(b"77.25", value))
    with pytest.raises(UsageError, match=rf"runs\.0\.clocks\.decode 8\.{name}"):
        read_engine(tmp_path / "engine.json")


def test_engine_markdown_says_which_streams_did_not_begin_together() -> None:
    stock, ours = result().runs
    steps: dict[str, tuple[int, ...]] = {"decode 2": (1, 1, 1, 1), "decode 4": (1, 3, 2, 1), "profile 8": (2, 5)}
    page = engine_markdown(replace(result(), runs=(stock, replace(ours, prefill_steps=steps))), None)
    assert "\nPrefills are in rates and profiles where streams did not begin alike: " in page
    assert ": decode 4 of ours in 1 to 3 steps; profile 8 of ours in 2 to 5 steps.\n" in page
    alike = replace(ours, prefill_steps={"decode 2": (1, 1), "decode 4": (2, 2)})  # prompts of more than a step
    assert "Prefills are in" not in engine_markdown(replace(result(), runs=(stock, alike)), None)


@pytest.mark.parametrize("steps", [{"decode 2": (0, 1)}, {"decode|2": (1, 1)}])
def test_engine_result_with_prefill_steps_that_cannot_be_is_refused(
    tmp_path: Path, steps: dict[str, tuple[int, ...]]
) -> None:
    wrong = replace(result(), runs=(replace(made(200, "stock"), prefill_steps=steps),))
    (tmp_path / "engine.json").write_bytes(dump_engine(wrong))
    with pytest.raises(UsageError, match=r"runs\.0\.prefill_steps"):
        read_engine(tmp_path / "engine.json")


def test_engine_result_written_and_read_is_the_same(tmp_path: Path) -> None:
    stock, ours = result().runs
    more = replace(ours, core_process=True, kernels_at={8: stock.kernels}, clocks={"decode 8": CLOCKS, "x": Clocks()})
    more = replace(more, prefill_steps={"decode 2": (1, 2)})
    both = replace(result(), runs=(stock, more))
    (tmp_path / "engine.json").write_bytes(dump_engine(both))
    assert read_engine(tmp_path / "engine.json") == both
    assert read_spec(dump_spec(SPEC).decode()) == SPEC


@pytest.mark.parametrize("text", ["{}", '{"model_folder": "m", "configurations": {}, "streems": [1]}', "["])
def test_read_spec_wrong_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="engine bench"):
        read_spec(text)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"rounds": 0}, "rounds"),
        ({"streams": (0,)}, "streams"),
        ({"prefills": (-1,)}, "prefills"),
        ({"profile_tokens": -1}, "profile_tokens"),
        ({"profile_streams": (8, 0)}, "profile_streams"),
        ({"restarts": -1}, "restarts"),
        ({"short": 9, "long": 9}, "long"),
        ({"configurations": {}}, "configurations"),
    ],
)
def test_engine_spec_that_measures_nothing_is_refused_before_an_engine_starts(
    changes: dict[str, Any], names: str
) -> None:
    with pytest.raises(UsageError, match=f"engine bench, {names}"):
        read_spec(dump_spec(replace(SPEC, **changes)).decode())


def test_engine_result_without_a_run_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_bytes(dump_engine(replace(result(), runs=())))
    with pytest.raises(UsageError, match=r"engine\.json, runs: seen none"):
        read_engine(tmp_path / "engine.json")


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (b'"load_s": 60.0', b'"load_s": "long"', r"runs\.0\.load_s: seen Input should be a valid number"),
        (b'"std": 0.0', b'"dev": 0.0', r"runs\.0\.decode\.1\.std: seen Field required"),
        (b'"spec"', b"spec", "the file: seen Invalid JSON"),
    ],
)
def test_engine_result_that_is_damaged_is_refused_by_the_field(
    tmp_path: Path, right: bytes, wrong: bytes, says: str
) -> None:
    (tmp_path / "engine.json").write_bytes(dump_engine(result()).replace(right, wrong))
    with pytest.raises(UsageError, match=rf"engine\.json, {says}"):
        read_engine(tmp_path / "engine.json")


@pytest.mark.parametrize("label", ["", "a|b", "a\nb", "a\u2028b", "a\x1b[2J"])
def test_label_that_no_table_can_show_is_refused_before_an_engine_starts_and_in_a_result(
    tmp_path: Path, label: str
) -> None:
    with pytest.raises(UsageError, match=r"engine bench, configurations\..*printable"):
        read_spec(dump_spec(replace(SPEC, configurations={label: {}})).decode())
    (tmp_path / "engine.json").write_bytes(dump_engine(replace(result(), runs=(made(200, label),))))
    with pytest.raises(UsageError, match=r"engine\.json, runs\.0\.label: seen .*printable"):
        read_engine(tmp_path / "engine.json")


def test_engine_result_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"engine\.json: seen No such file"):
        read_engine(tmp_path / "engine.json")


@pytest.mark.parametrize(("name", "model"), [("35b", "qwen3.5-35b-a3b"), ("27b", "qwen3.5-27b")])
def test_engine_page_of_the_record_is_what_its_json_says(name: str, model: str) -> None:
    results = Path(__file__).resolve().parent.parent / "docs" / "results"
    row = find_model(model)
    assert row is not None
    found = read_engine(results / f"engine-{name}-h200.json")
    page = engine_markdown(found, measured_model(row, found.runs))
    assert (results / f"engine-{name}-h200.md").read_text() == page
