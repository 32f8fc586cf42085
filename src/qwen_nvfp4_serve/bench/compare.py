"""Two results side by side: ratios with spread, only where both asked the same of the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qwen_nvfp4_serve.bench.drawing import COLOURS, FAULT, OTHERS, draw_pairs, new_figure, save
from qwen_nvfp4_serve.bench.result import Result
from qwen_nvfp4_serve.bench.rows import cell, number, spread_words
from qwen_nvfp4_serve.bench.statistics import Metrics, Spread
from qwen_nvfp4_serve.bench.workload import Case
from qwen_nvfp4_serve.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Verdict = Literal["better", "worse", "noise", "one run"]
VERDICT_COLOURS: dict[Verdict, str] = {"better": COLOURS[2], "worse": FAULT, "noise": OTHERS, "one run": OTHERS}
NOISE = 2.0  # a ratio nearer to 1 than this many standard deviations is called noise

LIMIT = 2.0**63  # no rate or time comes near, and a chart can draw what is below


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure that is compared: what it is, how it is named for a case, and where it stands."""

    kind: str
    name: Callable[[Case], str]
    pick: Callable[[Metrics], Spread | None]
    higher_is_better: bool = True


FIGURES: tuple[Figure, ...] = (
    Figure("prefill", lambda case: f"{case.prefill} t/s", lambda seen: seen.prefill_total),
    Figure("decode", lambda case: f"{case.decode} t/s", lambda seen: seen.decode_total),
    Figure("ttft", lambda case: f"{case.prefill} e2e_ttft ms", lambda seen: seen.ttft_ms, higher_is_better=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of both. ratio: second median over first. ratio_std: from both standard deviations, as if independent;
    None where either is of one run, which no verdict can be based on.

    verdict: for the second.
    """

    figure: str
    name: str
    first: Spread
    second: Spread
    ratio: float
    ratio_std: float | None
    verdict: Verdict

    @property
    def ratio_words(self) -> str:
        """`1.300 ± 0.015`, or the ratio alone."""
        return f"{self.ratio:.3f}" + ("" if self.ratio_std is None else f" ± {self.ratio_std:.3f}")


def check_comparable(first: Result, second: Result) -> None:
    """Raises UsageError naming every setting that differs, or the run that was interrupted."""
    for result in (first, second):
        if not result.complete:
            raise UsageError(f"run {result.label!r}", seen="an interrupted run", expected="a complete one")
    different = [
        f"{entry.name} {getattr(first.workload, entry.name)!r} and {getattr(second.workload, entry.name)!r}"
        for entry in fields(first.workload)
        if getattr(first.workload, entry.name) != getattr(second.workload, entry.name)
    ]
    if different:
        raise UsageError(
            "these runs cannot be compared",
            seen="; ".join(different),
            expected="equal settings",
            do="Run one of them again with the other's settings.",
        )


def compare(first: Result, second: Result) -> tuple[Comparison, ...]:
    """Every figure that both have. Raises UsageError when the settings differ, a figure is no rate or time, or there is
    none that both have."""
    check_comparable(first, second)
    for result in (first, second):
        _check_figures(result)
    found = tuple(
        _compare(figure, _name(figure, case, first), ours, theirs, runs=first.workload.runs)
        for figure, case, ours, theirs in _pairs(first, second)
        if ours is not None and theirs is not None and ours.median > 0
    )
    if not found:
        raise UsageError("these runs cannot be compared", seen="no figure that both have", expected="one or more")
    return found


def left_out(first: Result, second: Result) -> tuple[tuple[str, str], ...]:
    """The figures that are not compared: name, and the label of the run that lacks it, or both labels."""
    rows = []
    for figure, case, ours, theirs in _pairs(first, second):
        lacking = [
            result.label
            for result, value in ((first, ours), (second, theirs))
            if value is None or (result is first and value.median == 0)
        ]
        if lacking and (len(lacking) == 1 or case.phase == "request"):  # a context that is only cached has no decode
            rows.append((_name(figure, case, first), " and ".join(lacking)))
    return tuple(rows)


def _pairs(first: Result, second: Result) -> Iterator[tuple[Figure, Case, Spread | None, Spread | None]]:
    """Every figure of every case that either run has."""
    here, there = ({case.case: case.metrics for case in result.cases} for result in (first, second))
    for figure in FIGURES:
        for case in here | there:
            ours, theirs = (figure.pick(seen[case]) if case in seen else None for seen in (here, there))
            yield figure, case, ours, theirs


def _check_figures(result: Result) -> None:
    for figure in FIGURES:
        for case in result.cases:
            value = figure.pick(case.metrics)
            for kind in () if value is None else ("median", "std"):
                seen = getattr(value, kind)
                if not 0 <= seen < LIMIT:  # NaN is neither
                    what = f"run {result.label!r}, {kind} of {_name(figure, case.case, result)}"
                    raise UsageError(what, seen=str(seen), expected="a number below 2^63, 0 or more")


def differences(first: Result, second: Result) -> tuple[tuple[str, str, str], ...]:
    """What else differs, in words: name, first, second. These are what a comparison is usually about."""
    rows = (
        ("model", first.server.model, second.server.model),
        ("card", first.card, second.card),
        ("vLLM", str(first.server.vllm), str(second.server.vllm)),
        ("driver", _driver(first), _driver(second)),
        ("power limit (W)", _power(first), _power(second)),
        ("packages", _packages(first), _packages(second)),
        ("kernels", _kernels(first), _kernels(second)),
        ("start to READY (s)", str(first.server.ready_s), str(second.server.ready_s)),
        ("memory used (MiB)", _memory(first), _memory(second)),
        ("failed requests", _failed(first), _failed(second)),
        ("host", str(first.machine.cpu), str(second.machine.cpu)),
    )
    return tuple(row for row in rows if row[1] != row[2])


def comparison_markdown(first: Result, second: Result, found: tuple[Comparison, ...]) -> str:
    """The page of a comparison."""
    lines = [f"# {second.label} against {first.label}", ""]
    one, other = f"**{first.card}**", f"**{second.card}**"
    lines += [f"Both on: {one}." if one == other else f"{first.label} on: {one}; {second.label} on: {other}.", ""]
    said = [f"- {name} differs: {here} and {there}" for name, here, there in differences(first, second)]
    said += [f"- {name} is left out: nothing measured by {lacking}" for name, lacking in left_out(first, second)]
    lines += [*said, ""] if said else []
    lines += [f"| test | {first.label} | {second.label} | ratio | |", "|:--|--:|--:|--:|:--|"]
    for row in found:
        lines.append(f"| {row.name} | {cell(row.first)} | {cell(row.second)} | {row.ratio_words} | {row.verdict} |")
    note = f"Median ± standard deviation; a ratio within {NOISE:g} standard deviations of 1 is noise."
    if any(row.ratio_std is None for row in found):
        note = "Where a figure is of one run nothing tells a difference from noise: measure with more --runs."
    lines += ["", f"{note} ratio: {second.label} over {first.label}; of times a smaller one is better.", ""]
    return "\n".join(lines) + "\n![comparison](compare.png)\n"


def draw_comparison(first: Result, second: Result, found: tuple[Comparison, ...], folder: Path) -> Path:
    """Writes compare.png and compare.svg: prefill and decode of both runs, and the ratio of every figure."""
    prefill = [one for one in found if one.figure == "prefill"]
    decode = [one for one in found if one.figure == "decode"]
    models = f"{first.label}: {first.server.model}, {first.card} · {second.label}: {second.server.model}, {second.card}"
    footer = f"{models} · {spread_words(first.workload)}"
    height = 2.0 + max(0.62 * max(len(prefill), len(decode)), 0.36 * len(found), 1.4)
    title = f"{second.label} against {first.label}"
    figure, (left, middle, right) = new_figure(title, footer, columns=3, height=height)
    for axes, rates, name in ((left, prefill, "Prefill"), (middle, decode, "Decode")):
        pairs = [(one.name.removesuffix(" t/s"), one.first, one.second) for one in rates]
        draw_pairs(axes, pairs, (first.label, second.label), unit="tokens/s")
        axes.set_title(f"{name}, all requests together")
    _draw_ratios(right, found)
    right.set_title(f"Ratio {second.label} / {first.label}")
    return save(figure, folder, "compare")[0]


def _draw_ratios(axes: Axes, found: tuple[Comparison, ...]) -> None:
    for place, one in enumerate(found):
        colour = VERDICT_COLOURS[one.verdict]
        axes.errorbar(one.ratio, place, xerr=one.ratio_std, marker="o", color=colour, capsize=3)
        axes.annotate(
            number(one.ratio), (one.ratio, place), (0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    axes.axvline(1.0, color="#333333", linewidth=1)
    axes.set_yticks(range(len(found)), labels=[one.name for one in found], fontsize=8.5)
    axes.set_ylim(len(found) - 0.5, -0.8)
    axes.grid(visible=True, axis="x")
    axes.set_xlabel("green: better, red: worse, grey: noise, or one run")


def _name(figure: Figure, case: Case, result: Result) -> str:
    """A figure's name, with all lengths of its case where a run has several."""
    if len(result.workload.prompts) * len(result.workload.generates) == 1:
        return figure.name(case)
    return f"{case.whole} {figure.kind} {'ms' if figure.kind == 'ttft' else 't/s'}"


def _compare(figure: Figure, name: str, first: Spread, second: Spread, *, runs: int) -> Comparison:
    ratio = second.median / first.median
    least = min(runs, len(first.values), len(second.values))
    std = None if least == 1 else ratio * math.hypot(_relative(first), _relative(second))
    verdict: Verdict = "one run" if std is None else "noise"
    if std is not None and ratio != 1.0 and abs(ratio - 1.0) > NOISE * std:
        verdict = "better" if (ratio > 1.0) is figure.higher_is_better else "worse"
    return Comparison(
        figure=figure.kind,
        name=name,
        first=first,
        second=second,
        ratio=ratio,
        ratio_std=std,
        verdict=verdict,
    )


def _relative(value: Spread) -> float:
    return value.std / value.median if value.median else 0.0


def _driver(result: Result) -> str:
    return ", ".join(sorted({str(card.driver) for card in result.machine.cards_before or ()})) or "unknown"


def _power(result: Result) -> str:
    return ", ".join(f"{card.power_limit_w}" for card in result.machine.cards_before or ()) or "unknown"


def _memory(result: Result) -> str:
    return ", ".join(f"{card.memory_used_mib}" for card in result.machine.cards_after or ()) or "unknown"


def _packages(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.machine.packages.items()) or "unknown"


def _kernels(result: Result) -> str:
    return "unknown" if result.server.kernels is None else "; ".join(result.server.kernels) or "none named"


def _failed(result: Result) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in result.failure_counts().items()) or "none"
