"""The charts of one result, made from its data alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_nvfp4_serve.bench.drawing import (
    COLOURS,
    FAULT,
    OTHERS,
    depth_axis,
    draw_bars,
    draw_lines,
    new_figure,
    save,
    streams_axis,
)
from qwen_nvfp4_serve.bench.published import Figure as PublishedFigure
from qwen_nvfp4_serve.bench.published import Published
from qwen_nvfp4_serve.bench.result import CaseResult, Result
from qwen_nvfp4_serve.bench.rows import spread_words
from qwen_nvfp4_serve.bench.series import axis_values, lines, requests
from qwen_nvfp4_serve.bench.statistics import Spread, good_samples, tpot_ms, ttft_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_STRIPS = 24  # more cases than this and the strips of single requests are not readable
LIMIT_ROOM = 2.0  # a limit further out than this many times the slowest request would flatten the chart
Bar = tuple[str, float, float, str]


def draw_charts(result: Result, folder: Path, against: Sequence[Published] = ()) -> tuple[Path, ...]:
    """Writes every chart that the result has data for, as PNG and SVG; returns the PNGs.

    Raises QwenNvfp4Error when matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    if len(axis_values(result, "depth")) > 1:
        made.append(_depth(result, folder))
    if len(axis_values(result, "concurrency")) > 1:
        made.append(_streams(result, folder))
    if not made and requests(result):
        made.append(_overview(result, folder))
    if 0 < len(requests(result)) <= MAX_STRIPS:
        made.append(_latency(result, folder))
    if against:
        made.append(_against(result, folder, against))
    return tuple(made)


def title_of(result: Result) -> str:
    """`label: model on card`."""
    return f"{result.label}: {result.server.model} on {result.card}"


def footer_of(result: Result) -> str:
    """Versions, date and what the error bars are."""
    failures = sum(result.failure_counts().values())
    failed = f" · failed and left out: {failures} of {sum(case.requests for case in result.cases)}" if failures else ""
    vllm = f"vLLM {result.server.vllm}" if result.server.vllm else "server version unknown"
    spread = spread_words(result.workload)
    return f"{vllm} · qwen-nvfp4 {result.project} · {result.started[:10]} · {spread}{failed}"


def _depth(result: Result, folder: Path) -> Path:
    figure, (left, right) = new_figure(title_of(result), footer_of(result), columns=2)
    depths = axis_values(result, "depth")
    draw_lines(left, lines(result, "depth", lambda seen: seen.prefill_total, ignore=("generate",)))
    draw_lines(right, lines(result, "depth", lambda seen: seen.decode_total))
    _name(left, "Prefill, all requests together", "tokens/s")
    _name(right, "Decode, all requests together", "tokens/s")
    for axes in (left, right):
        depth_axis(axes, depths)
    return save(figure, folder, "depth")[0]


def _streams(result: Result, folder: Path) -> Path:
    figure, (left, right) = new_figure(title_of(result), footer_of(result), columns=2)
    streams = axis_values(result, "concurrency")
    draw_lines(left, lines(result, "concurrency", lambda seen: seen.decode_total))
    draw_lines(right, lines(result, "concurrency", lambda seen: seen.decode_request))
    _name(left, "Decode, all requests together", "tokens/s")
    _name(right, "Decode, each request", "tokens/s")
    for axes in (left, right):
        streams_axis(axes, streams)
    return save(figure, folder, "streams")[0]


def _overview(result: Result, folder: Path) -> Path:
    height = 2.2 + 0.34 * len(requests(result))
    figure, (left, right) = new_figure(title_of(result), footer_of(result), columns=2, height=max(3.2, height))
    for axes, colour, test in ((left, COLOURS[0], "prefill"), (right, COLOURS[1], "decode")):
        draw_bars(axes, [_bar(case, test, colour) for case in requests(result)], unit="tokens/s")
    left.set_title("Prefill")
    right.set_title("Decode")
    right.tick_params(labelleft=False)
    return save(figure, folder, "overview")[0]


def _latency(result: Result, folder: Path) -> Path:
    cases = requests(result)
    height = 2.2 + 0.3 * len(cases)
    figure, (left, right) = new_figure(title_of(result), footer_of(result), columns=2, height=max(3.4, height))
    workload = result.workload
    _strips(left, cases, "ttft", workload.ttft_limit_ms)
    _strips(right, cases, "tpot", workload.tpot_limit_ms)
    left.set_title("Time to first token, each request")
    right.set_title("Time per token after it, each request")
    right.tick_params(labelleft=False)
    return save(figure, folder, "latency")[0]


def _strips(axes: Axes, cases: Sequence[CaseResult], what: str, limit_ms: float | None) -> None:
    pick = ttft_ms if what == "ttft" else tpot_ms
    names = []
    for place, case in enumerate(cases):
        good = [sample for batch in case.batches for sample in good_samples(batch)]
        values = [value for sample in good if (value := pick(sample)) is not None]
        median: Spread | None = getattr(case.metrics, f"{what}_ms")
        axes.plot(values, [place] * len(values), "o", color=COLOURS[0], alpha=0.35, markersize=6, markeredgewidth=0)
        if median is not None:
            axes.plot([median.median], [place], "|", color=COLOURS[1], markersize=15, markeredgewidth=2.2)
        failed = len(case.failures)
        names.append(f"{case.case.whole}{f'  ({failed} failed)' if failed else ''}")
    axes.set_yticks(range(len(cases)), labels=names, fontsize=8.5)
    for label, case in zip(axes.get_yticklabels(), cases, strict=True):
        label.set_color(FAULT if case.failures else "#000000")
    axes.set_ylim(len(cases) - 0.5, -0.5)
    seen_ms = axes.get_xlim()[1]
    beyond = limit_ms is not None and limit_ms > LIMIT_ROOM * seen_ms
    if limit_ms is not None and not beyond:
        axes.axvline(limit_ms, color=FAULT, linestyle="--", linewidth=1.2, label=f"limit {limit_ms:g} ms")
        axes.legend()
    axes.set_xlim(0, 1.06 * axes.get_xlim()[1])
    axes.grid(visible=True, axis="x")
    axes.set_xlabel("ms (orange: median)" + (f"; the limit is {limit_ms:g}" if beyond else ""))


def _against(result: Result, folder: Path, against: Sequence[Published]) -> Path:
    ours = [case for case in requests(result) if case.case.concurrency == 1]
    prefill, decode = ([_bar(case, test, COLOURS[0], "this run: ") for case in ours] for test in ("prefill", "decode"))
    prefill += [_published_bar(entry, figure) for entry in against for figure in entry.of("prefill")]
    decode += [_published_bar(entry, figure) for entry in against for figure in entry.of("decode")]
    height = 2.2 + 0.32 * max(len(prefill), len(decode))
    footer = f"{footer_of(result)}\nGrey: published by others on the card named there, not measured by this project."
    figure, (left, right) = new_figure(title_of(result), footer, columns=2, height=max(3.6, height))
    figure.set_figwidth(15.5)
    draw_bars(left, prefill, unit="tokens/s")
    draw_bars(right, decode, unit="tokens/s")
    left.set_title("Prefill, one request (blue: this run)")
    right.set_title("Decode, one request (blue: this run)")
    return save(figure, folder, "published")[0]


def _bar(case: CaseResult, test: str, colour: str, before: str = "") -> Bar:
    """`test` of a case; where there is no rate its name says whether requests failed."""
    name, value = before + case.case.whole, getattr(case.metrics, f"{test}_total")
    if value is None:
        return f"{name}: {'failed' if case.failures else 'not measured'}", 0.0, 0.0, colour
    return name, value.median, value.std, colour


def _published_bar(entry: Published, figure: PublishedFigure) -> Bar:
    card = entry.card.removeprefix("GeForce ")
    return f"{entry.title}, {card}, {figure.where}", figure.tokens_per_s, 0.0, OTHERS


def _name(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
