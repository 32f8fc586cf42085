"""Tables of docs/kernels*.md that are written by hand, against the measurements that they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.bench.engine import read_engine
from qwen_nvfp4_serve.bench.engine_page import by_kind
from qwen_nvfp4_serve.bench.rows import number
from qwen_nvfp4_serve.kernels.nvfp4_linear import sweeps
from qwen_nvfp4_serve.kernels.nvfp4_moe import large_m

ROOT = Path(__file__).parents[2]
TEXT = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("kernels*.md")))
LEFT = {  # rows of what is left in a step -> kinds of kernels that they count
    "BF16 projections and head": {"16-bit linear"},
    "experts and routers": {"MoE"},
    "norms, activations and gates": {"compiled", "norm and activation"},
    "attention with its cache": {"attention"},
    "attention's projections": {"NVFP4 and FP8 linear"},
    "the delta net": {"GDN"},
    "the rest: sampling, copies": {"sampling", "copy and cast", "other"},
}


def record(name: str) -> Any:
    return json.loads((ROOT / "docs" / "results" / f"{name}-h200.json").read_text())


@pytest.mark.parametrize(
    ("title", "field", "form"),
    [
        ("whole block, router to final sum", "ours_us", "{:.1f}"),
        ("vLLM's own block, with Marlin", "stock_us", "{:.1f}"),
        ("routed experts alone", "experts_us", "{:.1f}"),
        ("the same with Marlin", "stock_experts_us", "{:.1f}"),
        ("router and election alone", "router_us", "{:.1f}"),
    ],
)
def test_block_times_are_those_of_the_record(title: str, field: str, form: str) -> None:
    cells = " | ".join(form.format(row[field]) for row in record("moe")["block"])
    assert f"| {title} | {cells} |" in TEXT


def test_dealing_times_are_those_of_the_record() -> None:
    deal = record("moe")["deal"]
    at = [deal["cases"].index(f"uniform {tokens}") for tokens in (16, 64, 512, 2048, 2731, 8192)]
    form = f"b {large_m.PAIRS_IN_CHUNK}/{large_m.LINES_IN_STEP}/{large_m.DEALING_WARPS} blocks{large_m.BLOCKS_IN_STEP}"
    for title, name in (("by one program an expert", "one program an expert"), ("in two phases", form)):
        cells = " | ".join(f"{deal['us'][name][place]:.1f}" for place in at)
        assert f"| dealt {title} | {cells} |" in TEXT


@pytest.mark.parametrize(
    ("title", "sizes", "tiles"),
    [
        ("three of 2,731", (2731, 2731, 2731), None),
        ("two of 3,449, one of 1,294", (3449, 3449, 1294), None),
        ("the same, 128 x 128 in the full ones", (3449, 3449, 1294), ("128x128", "128x128", "64x64")),
    ],
)
def test_rounds_times_are_those_of_the_record_with_the_tiles_in_use(
    title: str, sizes: tuple[int, ...], tiles: tuple[str, ...] | None
) -> None:
    assert max(sizes) <= large_m.tokens_in_round(8, 2048, 512)
    chosen = [large_m.tile_for(size * 8 / 256, large_m.TILES) for size in sizes]
    names = tiles or [f"{one.rows}x{one.columns}" for one in chosen]
    sums = [
        sum(times[str(size)][name] for size, name in zip(sizes, names, strict=True))
        for times in map(record("moe")["rounds"].get, ("uniform", "liked"))
    ]
    assert f"| {title} | {' | '.join(f'{us:,.0f}' for us in sums)} |" in TEXT


@pytest.mark.parametrize("model", ["35b", "27b"])
def test_delta_net_times_are_those_of_the_record(model: str) -> None:
    rows = sorted((row for row in record("gdn")["times_us"] if row["model"] == model), key=lambda row: row["tokens"])
    assert [row["tokens"] for row in rows] == [1, 2, 8, 32]
    cells = " | ".join(f"{row['spaced vllm']:.1f}, {row['spaced ours32']:.1f}" for row in rows)
    assert f"| {model.upper()}: vLLM's two launches, ours | {cells} |" in TEXT


def rates(run: Any) -> dict[str, float]:
    """Every rate of an engine's run by its name in the table."""
    named = {f"decode {streams}": rate["median"] for streams, rate in run["decode"].items()}
    named |= {f"prefill {tokens}": rate["median"] for tokens, rate in run["prefill"].items()}
    return named | {f"behind {depth}": rate["decode"] for depth, rate in run["depths"].items()}


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("1 stream", ("decode 1",)),
        ("2, 4 streams", ("decode 2", "decode 4")),
        ("8 streams", ("decode 8",)),
        ("one stream behind 4,096 tokens", ("behind 4096",)),
        ("behind 65,536, 261,632", ("behind 65536", "behind 261632")),
        ("prefill of 2,048, 8,192 tokens", ("prefill 2048", "prefill 8192")),
    ],
)
def test_engine_rates_are_those_of_the_record(title: str, names: tuple[str, ...]) -> None:
    cells = []
    for model in ("35b", "27b"):
        stock, ours = map(rates, record(f"engine-{model}")["runs"])
        cells += [", ".join(number(run[name]) for name in names) for run in (stock, ours)]
        cells.append(", ".join(f"{ours[name] / stock[name]:.2f}" for name in names) + "x")
    assert f"| {title} | {' | '.join(cells)} |" in TEXT


def test_scatter_is_that_of_the_record() -> None:
    stock, ours = record("engine-35b")["runs"]
    shares = [f"{ours['decode'][streams]['std'] / ours['decode'][streams]['median']:.0%}" for streams in "248"]
    text = " ".join(TEXT.split())
    assert f"of ours are {shares[0][:-1]}, {shares[1][:-1]} and {shares[2][:-1]} % at two, four and eight" in text
    prefill = ours["prefill"]["2048"]
    assert f"ours of 2,048 tokens of prefill by {100 * prefill['std'] / prefill['median']:.0f} %" in text
    low, high = ours["decode"]["8"]["low"], stock["decode"]["8"]["high"]
    assert f"The lowest of ours at eight streams is {low:,.0f}, the highest of stock's {high:,.0f}." in text


@pytest.mark.parametrize(("model", "kernels"), [("35b", "moe"), ("27b", "linear")])
def test_engines_beside_kernels_are_those_of_the_record(model: str, kernels: str) -> None:
    for run in record(f"engine-{model}")["runs"]:
        kept = record(kernels)["engine"][run["label"]]
        assert kept["resident_bytes"] == run["model_bytes"]
        for kind in ("decode", "prefill"):
            assert kept[kind] == {count: rate["median"] for count, rate in run[kind].items()}
        assert kept["behind"] == run["depths"]


def test_code_of_each_engine_is_named() -> None:
    codes = {model: record(f"engine-{model}")["code"] for model in ("35b", "27b")}
    assert f"the 35B with code {codes['35b']}, the 27B in a later visit with code {codes['27b']}." in TEXT
    assert f"engine: another visit, code {codes['35b']}," in record("moe")["about"]
    assert f"the 27B of another visit, code {codes['27b']}," in record("linear")["about"]


def test_starts_of_the_27b_are_those_of_the_record() -> None:
    stock, ours = record("engine-27b")["runs"]
    assert stock["cold"]
    assert ours["cold"]
    text = " ".join(TEXT.split())
    assert f"started in {stock['load_s']:.0f} and {ours['load_s']:.0f} s;" in text
    assert f"in {stock['restart_s'][0]:.0f} and {ours['restart_s'][0]:.0f} s." in text


def test_why_eight_streams_of_the_27b_are_slow_is_told_by_what_was_measured() -> None:
    found, text = record("linear")["tried"][sweeps.STEP], " ".join(TEXT.split())
    graphs = found["engine_graph_us"]
    one, eight = ([graphs[whose][at] for whose in ("stock", "ours")] for at in (0, -1))
    assert (
        f"took {one[0]:,} us of stock's and {one[1]:,} of ours at one token, {eight[0]:,} and {eight[1]:,} at" in text
    )
    stock, before, now = (found["us"][whose] for whose in ("stock", "before", "now"))
    assert f"takes {now[3]:,.0f} us at eight tokens instead of {before[3]:,.0f}, stock's {stock[3]:,.0f};" in text
    assert f"at one {now[0]:,.0f} instead of {before[0]:,.0f}, stock's {stock[0]:,.0f}." in text
    rates = [record("linear")["engine"][label]["decode"]["8"] for label in ("stock", "ours")]
    step_ms, saved_ms = 8e3 / rates[1], (before[3] - now[3]) / 1e3
    ratio = 8e3 / (step_ms - saved_ms) / rates[0]
    assert f"would be {saved_ms:.2f} ms shorter of {step_ms:.2f} by that, which is {ratio:.2f}x." in text


def test_nvfp4_layers_of_a_step_are_compared_with_what_they_take_alone() -> None:
    found, text = record("linear")["tried"][sweeps.STEP], " ".join(TEXT.split())
    sums = {
        m: sum(found["kernels"][m]["before"][role]["us"] for role in ("gate_up", "down", "attn_qkv", "attn_o"))
        for m in ("8", "1")
    }
    alone = found["parts"]["alone_us"]
    assert f"took {sums['8']:,.0f} us with code {found['codes']['before']}" in text
    assert f"they add up to {alone['8']:,}; those of one token took {sums['1']:,.0f}, and alone {alone['1']:,}." in text


def test_what_is_left_in_a_step_is_the_records_profile_the_dearest_first() -> None:
    runs = read_engine(ROOT / "docs" / "results" / "engine-35b-h200.json").runs
    assert all(run.kernels_apart for run in runs)
    found = {run.label: {kind: us for kind, us, _ in by_kind(run.kernels)} for run in runs}
    assert set().union(*LEFT.values()) == set().union(*found.values())
    sums = {
        title: [sum(found[label].get(kind, 0.0) for kind in kinds) for label in ("ours", "stock")]
        for title, kinds in LEFT.items()
    }
    assert [us for us, _ in sums.values()] == sorted((us for us, _ in sums.values()), reverse=True)
    rows = [f"| {title} | {ours:,.0f} | {stock:,.0f} |" for title, (ours, stock) in sums.items()]
    assert "\n".join(rows) in TEXT
    whole = {run.label: sum(kernel.us for kernel in run.kernels) / 1e3 for run in runs}
    steps = {run.label: 1e3 / run.decode[1].median for run in runs}
    said = (
        f"take {whole['ours']:.2f} of its {steps['ours']:.2f} ms, stock's {whole['stock']:.2f} of {steps['stock']:.2f}."
    )
    assert said in TEXT


@pytest.mark.parametrize(("name", "label"), [("profile_before", "stock"), ("profile_after", "ours")])
def test_profiles_beside_kernels_are_those_of_the_record(name: str, label: str) -> None:
    run = next(run for run in record("engine-35b")["runs"] if run["label"] == label)
    kernels = sorted(run["kernels"], key=lambda one: -one["us"])
    assert [(one["name"], one["us"], one["calls"]) for one in record("moe")[name]] == [
        (one["name"][:160], round(one["us"], 2), one["calls"]) for one in kernels
    ]


def test_clocks_are_those_of_the_record() -> None:
    runs = {run["label"]: run["clocks"] for run in record("engine-35b")["runs"]}
    decode = {label: [clocks[f"decode {n}"] for n in (1, 2, 4, 8)] for label, clocks in runs.items()}
    assert {one["sm_mhz_low"] for found in decode.values() for one in found} == {1980.0}
    said = {label: [f"{one['power_w']:.0f}" for one in found] for label, found in decode.items()}
    text = " ".join(TEXT.split())
    assert (
        f"stock drew {said['stock'][0]} to {said['stock'][-1]} W, ours {said['ours'][0]} to {said['ours'][-1]} W"
        in text
    )
    assert not any(one["reasons"] for one in runs["stock"].values())
    capped = {name: one["sm_mhz_low"] for name, one in runs["ours"].items() if one["reasons"]}
    assert set(capped) == {"prefill 8192", "behind 4096", "behind 65536", "behind 261632"}
    low = [f"{capped[name]:,.0f}" for name in ("behind 4096", "behind 261632")]
    assert "to {} MHz behind 4,096 tokens and {} behind 261,632; stock never was".format(*low) in text
    stock, ours = (run["clocks"] for run in record("engine-27b")["runs"])
    power = [one["decode 1"]["power_w"] for one in (stock, ours)]
    assert f"The 27B of stock drew {power[0]:.0f} W at one stream, ours {power[1]:.0f};" in text
    low = [one["decode 8"]["sm_mhz_low"] for one in (stock, ours)]
    assert f"lowered its clock at times, to {low[0]:,.0f} and {low[1]:,.0f} MHz." in text


def test_elections_are_those_counted_and_what_chance_would_elect() -> None:
    elected = record("moe")["elected"]
    mean, low, high = (elected["distinct"][name] for name in ("mean", "low", "high"))
    text = " ".join(TEXT.split())
    assert elected["streams"] == 8
    assert (
        f"Eight streams elect {mean:.1f} different experts of a layer on average, {low} to {high}, "
        f"over {elected['layers']} layers and {elected['steps']} steps"
    ) in text
    assert f"at random would elect {256 * (1 - (1 - 8 / 256) ** 8):.1f} on average" in text


@pytest.mark.parametrize(
    ("title", "streams", "field"),
    [
        ("one stream: from the graph's first kernel to its last", "1", "graph_us"),
        ("all kernels of the step, head and sampling too", "1", "busy_us"),
        ("eight streams: the graph", "8", "graph_us"),
        ("all kernels of the step", "8", "busy_us"),
    ],
)
def test_traced_steps_are_those_of_the_record(title: str, streams: str, field: str) -> None:
    steps = record("moe")["steps"]
    cells = [f"{steps[label][streams][field] / 1e3:.2f}" for label in ("stock", "ours", "ours, dependent launch")]
    assert f"| {title} | {' | '.join(cells)} |" in TEXT


def test_known_answers_on_a_card_are_all_right_in_every_way_that_the_page_names() -> None:
    runs = record("known")["runs"]
    assert {run["asked"] for run in runs} == {79}
    assert not any(run["wrong"] or run["wrong_alone"] for run in runs)
    ways = {
        (run["backend"], bool(run["options"].get("enforce_eager")), "speculative_config" in run["options"])
        for run in runs
    }
    stock = {("stock", True, False), ("stock", False, False)}
    assert ways == stock | {("hybrid", True, False), ("hybrid", False, False), ("hybrid", False, True)}
    assert "all 79 right" in TEXT
    again = record("engine-35b")["code"]
    assert [(run["backend"], run["options"]) for run in runs if run["code"] == again] == [("hybrid", {})]
    assert f"in CUDA graphs (code {again} as well)" in TEXT


def test_other_ways_of_the_linear_kernel_are_those_of_the_record() -> None:
    one, eight = record("linear")["tried"]["parts by words, weights through shared memory"]["rows"]
    for title, row in (("gate_up, one token", one), ("down, eight tokens", eight)):
        ring = f"{row['ring'][0]:.1f} to {row['ring'][-1]:.1f}"
        cells = (row["before_there"], row["words"], "", row["before"], ring, row["now"])
        assert f"| {title} | {' | '.join(str(cell) for cell in cells).replace('|  |', '| |')} |" in TEXT
