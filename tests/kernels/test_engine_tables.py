"""What docs/kernels*.md say of whole engines and steps, against the measurements that it is of."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kernels.test_record_tables import ROOT, TEXT, record

from qwen_nvfp4_serve.bench.engine import read_engine
from qwen_nvfp4_serve.bench.engine_page import by_kind
from qwen_nvfp4_serve.bench.rows import number
from qwen_nvfp4_serve.kernels.nvfp4_linear import sweeps

LEFT = {  # rows of what is left in a step -> kinds of kernels that they count
    "BF16 projections and head": {"16-bit linear"},
    "experts and routers": {"MoE"},
    "norms, activations and gates": {"compiled", "norm and activation"},
    "attention's projections": {"NVFP4 and FP8 linear"},
    "attention with its cache": {"attention"},
    "the delta net": {"GDN"},
    "the rest: sampling, copies": {"sampling", "copy and cast", "other"},
}


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
    one, text = ours["decode"]["1"], " ".join(TEXT.split())
    assert {steps for run in (stock, ours) for key in run["prefill_steps"] for steps in run["prefill_steps"][key]} == {
        1
    }
    graphs = [f"{run['graph_us'][streams]:,.0f}" for run in (ours, stock) for streams in "12"]
    assert "alone takes {} us at one token and {} at two (stock's {} and {})".format(*graphs) in text
    steps = [1e3 / one[name] for name in ("high", "low")]
    said = f"took {steps[0]:.2f} to {steps[1]:.2f} ms at one stream ({one['low']:.0f} to {one['high']:.0f} tokens/s in "
    assert f"{said}three runs, a standard deviation of {100 * one['std'] / one['median']:.0f} %)" in text
    assert f"and {2e3 / ours['decode']['2']['median']:.1f} ms at two, where stock's take" in text
    beside = [1e6 * n / stock["decode"][str(n)]["median"] - stock["graph_us"][str(n)] for n in (1, 2)]
    assert [f"{us / 1e3:.1f}" for us in beside] == ["0.2", "0.2"]
    before = record("moe")["engine_before"]
    rates = [before[label]["decode"]["1"] for label in ("ours", "stock")]
    now = sum(kernel["us"] for kernel in ours["kernels"]) / 1e3
    took = before["step_kernels_us"]["ours"] / 1e3
    said = f"code {before['code']}, whose kernels took {took:.2f} ms of a step where these take {now:.2f}, had "
    assert f"{said}{rates[0]:.1f} tokens/s at one stream, {rates[0] / rates[1]:.2f}x" in text
    first = [run["depths"]["4096"]["prefill"] for run in (ours, stock)]
    assert f"the prompt's own time ({first[0] / first[1]:.2f}x)" in text


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
    assert len(set(codes.values())) == 1
    assert f"in a process of its own, code {codes['35b']}." in " ".join(TEXT.split())
    assert f"engine: another visit, code {codes['35b']}," in record("moe")["about"]
    assert f"the 27B of another visit, code {codes['27b']}," in record("linear")["about"]


def test_starts_are_those_of_the_record() -> None:
    cold, again = [], []
    for model in ("35b", "27b"):
        runs = record(f"engine-{model}")["runs"]
        assert all(run["cold"] and run["side_by_side"] for run in runs)
        cold += [f"{run['load_s']:.0f}" for run in runs]
        again += [f"{run['restart_s'][0]:.0f}" for run in runs]
    text = " ".join(TEXT.split())
    assert "the 35B started in {} and {} s, of stock and ours, those of the 27B in {} and {} s;".format(*cold) in text
    assert "the 35B's in {} and {} s, the 27B's in {} and {} s.".format(*again) in text


def test_why_eight_streams_of_the_27b_are_slow_is_told_by_what_was_measured() -> None:
    found, text = record("linear")["tried"][sweeps.STEP], " ".join(TEXT.split())
    graphs = found["engine_graph_us"]
    one, eight = ([graphs[whose][at] for whose in ("stock", "ours")] for at in (0, -1))
    assert (
        f"took {one[0]:,} us of stock's and {one[1]:,} of ours at one token, {eight[0]:,} and {eight[1]:,} at" in text
    )
    runs = {run["label"]: run["graph_us"] for run in record("engine-27b")["runs"]}
    assert all(graphs[label] == [round(us[str(m)]) for m in graphs["tokens"]] for label, us in runs.items())
    stock, before, now, later = (found["us"][whose] for whose in ("stock", "before", "now", "later"))
    assert f"take {now[3]:,.0f} us at eight tokens instead of {before[3]:,.0f}, stock's {stock[3]:,.0f};" in text
    assert f"at one {now[0]:,.0f} instead of {before[0]:,.0f}, stock's {stock[0]:,.0f}." in text
    assert f"start at once made that {later[3]:,.0f} and {later[0]:,.0f};" in text


def test_what_compiled_kernels_cost_by_when_the_next_one_may_start_is_of_the_record() -> None:
    ways = {(way["what"], way["M"]): way for way in record("linear")["tried"][sweeps.STEP]["ways"]}
    text = " ".join(TEXT.split())
    early = [ways["with that, states read before the kernel ahead has ended", m] for m in (8, 1)]
    gained = [(way["beside_us"] - way["us"]) / 48 for way in early]
    assert f"gains {gained[0]:.1f} us a layer at eight tokens and {gained[1]:.1f} at one" in text
    first = ways["with those, norms and gates let the next kernel start at once, not before they store", 8]
    last = ways["with those, not until they have stored", 8]
    costs = first["beside_us"] - first["us"], last["us"] - first["us"]
    assert f"the former costs {costs[0]:.0f} us at eight tokens, the latter {costs[1]:.0f}." in text


def test_norms_of_a_step_are_those_of_the_record() -> None:
    ours = record("engine-27b")["runs"][1]["kernels_at"]["8"]
    norms = {one["name"]: one for one in ours if "fused_add_rms_norm" in one["name"]}
    behind_down = norms["triton_per_fused__to_copy_add_bf16_linear_of_two_fused_add_rms_norm_5"]
    text = " ".join(TEXT.split())
    assert f"where the row is held at once {behind_down['us'] / behind_down['calls']:.1f} (`gpu-whole-rows`" in text
    assert f"all its norms in a step 576 us and {sum(one['us'] for one in norms.values()):.0f}." in text


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
    assert set(capped) == {"behind 65536", "behind 261632"}
    assert set(capped.values()) == {1965.0}
    assert "was lowered at times for the power that it drew, to 1,965 MHz; stock never was." in text
    stock, ours = (run["clocks"] for run in record("engine-27b")["runs"])
    power = [one["decode 1"]["power_w"] for one in (stock, ours)]
    assert f"The 27B of stock drew {power[0]:.0f} W at one stream, ours {power[1]:.0f};" in text
    low = [one[name]["sm_mhz_low"] for name in ("decode 8", "prefill 8192") for one in (stock, ours)]
    decoding, reading = (" and ".join(f"{mhz:,.0f}" for mhz in two) for two in (low[:2], low[2:]))
    assert f"its clock at times, to {decoding} MHz, and in prefills of 8,192 tokens to {reading}." in text
    assert all(not one[f"decode {n}"]["reasons"] for one in (stock, ours) for n in (1, 2, 4))


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
    found = [(run["backend"], run["options"], run["plain"]) for run in runs if run["code"] == again]
    assert found == [("hybrid", {}, False), ("hybrid", {}, True)]
    assert f"in CUDA graphs (code {again} as well, also with the delta net's projections in BF16)" in " ".join(
        TEXT.split()
    )
