"""Two results side by side: ratios with spread, only where both asked the same of the server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from qwen_nvfp4_serve.bench.drawing import COLOURS, draw_bars, new_figure, save
from qwen_nvfp4_serve.bench.result import Result
from qwen_nvfp4_serve.bench.rows import cell, number
from qwen_nvfp4_serve.bench.statistics import Metrics, Spread
from qwen_nvfp4_serve.bench.workload import Case
from qwen_nvfp4_serve.errors import UsageError

NOISE = 2.0  # a ratio nearer to 1 than this many standard deviations is called noise


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure that is compared: how it is named for a case, and where it stands."""

    name: Callable[[Case], str]
    pick: Callable[[Metrics], Spread | None]
    higher_is_better: bool = True


FIGURES: tuple[Figure, ...] = (
    Figure(lambda case: f"{case.prefill} t/s", lambda seen: seen.prefill_total),
    Figure(lambda case: f"{case.decode} t/s", lambda seen: seen.decode_total),
    Figure(lambda case: f"{case.prefill} e2e_ttft ms", lambda seen: seen.ttft_ms, higher_is_better=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of both. ratio: second median over first. ratio_std: from both standard deviations, as if independent.

    verdict: `better`, `worse` or `noise` for the second.
    """

    name: str
    first: Spread
    second: Spread
    ratio: float
    ratio_std: float
    verdict: str


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
    """Every figure that both have. Raises UsageError when the settings differ."""
    check_comparable(first, second)
    others = {case.case: case.metrics for case in second.cases}
    found: list[Comparison] = []
    for figure in FIGURES:
        for case in first.cases:
            ours, theirs = figure.pick(case.metrics), figure.pick(others[case.case]) if case.case in others else None
            if ours is not None and theirs is not None and ours.median > 0:
                found.append(_compare(figure, case.case, ours, theirs))
    return tuple(found)


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
        ("failed requests", _failed(first), _failed(second)),
        ("host", str(first.machine.cpu), str(second.machine.cpu)),
    )
    return tuple(row for row in rows if row[1] != row[2])


def comparison_markdown(first: Result, second: Result, found: tuple[Comparison, ...]) -> str:
    """The page of a comparison."""
    lines = [f"# {second.label} against {first.label}", ""]
    for name, here, there in differences(first, second):
        lines.append(f"- {name} differs: {here} and {there}")
    lines += ["", f"| test | {first.label} | {second.label} | ratio | |", "|:--|--:|--:|--:|:--|"]
    for one in found:
        ratio = f"{one.ratio:.3f} ± {one.ratio_std:.3f}"
        lines.append(f"| {one.name} | {cell(one.first)} | {cell(one.second)} | {ratio} | {one.verdict} |")
    lines += ["", f"Median ± standard deviation; a ratio within {NOISE:g} standard deviations of 1 is noise.", ""]
    return "\n".join(lines) + "\n![comparison](compare.png)\n"


def draw_comparison(first: Result, second: Result, found: tuple[Comparison, ...], folder: Path) -> Path:
    """Writes compare.png and compare.svg: both runs' rates, and the ratio of each."""
    rates = [one for one in found if one.name.endswith(" t/s")]
    bars = []
    for one in rates:
        test = one.name.removesuffix(" t/s")
        bars.append((f"{test}   {first.label}", one.first.median, one.first.std, COLOURS[0]))
        bars.append((second.label, one.second.median, one.second.std, COLOURS[1]))
    models = f"{first.server.model} on {first.card}; {second.server.model} on {second.card}"
    footer = f"{models} · median of {first.workload.runs} runs, bars are ±1 standard deviation"
    title = f"{second.label} against {first.label}"
    figure, (left, right) = new_figure(title, footer, columns=2, height=2.2 + 0.6 * max(2, len(rates)))
    figure.set_figwidth(13)
    draw_bars(left, bars, unit="tokens/s")
    left.set_title("Rates")
    for place, one in enumerate(found):
        right.errorbar(one.ratio, place, xerr=one.ratio_std, marker="o", color=COLOURS[2], capsize=3)
        right.annotate(
            number(one.ratio), (one.ratio, place), (0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    right.axvline(1.0, color="#333333", linewidth=1)
    right.set_yticks(range(len(found)), labels=[one.name for one in found], fontsize=8.5)
    right.set_ylim(len(found) - 0.5, -0.7)
    right.grid(visible=True, axis="x")
    right.set_title(f"{second.label} / {first.label}")
    right.set_xlabel("ratio of medians")
    return save(figure, folder, "compare")[0]


def _compare(figure: Figure, case: Case, first: Spread, second: Spread) -> Comparison:
    ratio = second.median / first.median
    relative = math.hypot(first.std / first.median, second.std / second.median if second.median else 0.0)
    std = ratio * relative
    verdict = "noise"
    if abs(ratio - 1.0) > NOISE * std:
        verdict = "better" if (ratio > 1.0) is figure.higher_is_better else "worse"
    if ratio == 1.0:
        verdict = "noise"
    return Comparison(name=figure.name(case), first=first, second=second, ratio=ratio, ratio_std=std, verdict=verdict)


def _driver(result: Result) -> str:
    return ", ".join(sorted({str(card.driver) for card in result.machine.cards_before or ()})) or "unknown"


def _power(result: Result) -> str:
    return ", ".join(f"{card.power_limit_w}" for card in result.machine.cards_before or ()) or "unknown"


def _packages(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.machine.packages.items()) or "unknown"


def _kernels(result: Result) -> str:
    return "unknown" if result.server.kernels is None else "; ".join(result.server.kernels) or "none named"


def _failed(result: Result) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in result.failure_counts().items()) or "none"
