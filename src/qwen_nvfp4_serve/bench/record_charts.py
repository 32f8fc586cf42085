"""The charts of a card's record: each size's engines beside each other, and one stream beside published figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_nvfp4_serve.bench.drawing import (
    COLOURS,
    OTHERS,
    draw_bars,
    draw_lines,
    new_figure,
    save,
    streams_axis,
)
from qwen_nvfp4_serve.bench.engine import EngineRun
from qwen_nvfp4_serve.bench.engine_page import short_context
from qwen_nvfp4_serve.bench.landscape import bounds_beside, entries
from qwen_nvfp4_serve.bench.record import BESIDE, LABELS, Recorded, costs_known, measured_on, one_stream
from qwen_nvfp4_serve.bench.series import Line, Point
from qwen_nvfp4_serve.bench.statistics import Spread, spread
from qwen_nvfp4_serve.gpus import GpuRow, find_gpu
from qwen_nvfp4_serve.units import GIB, KIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bar = tuple[str, float, float, str]
BESIDE_OTHERS = ", beside others"  # of a start that shared the machine with another


def draw_record(record: Sequence[Recorded], card: GpuRow, folder: Path) -> tuple[Path, ...]:
    """Writes the charts that the page of the record shows, as PNG and SVG; returns the PNGs."""
    rates = [_draw_rates(one, card, folder) for one in record]
    costs = [_draw_costs(one, card, folder) for one in record if costs_known(one.result)]
    return (*rates, *costs, _draw_beside(record, card, folder))


def _draw_rates(one: Recorded, card: GpuRow, folder: Path) -> Path:
    runs, spec = one.result.runs, one.result.spec
    figure, (streams, depths, prefill) = new_figure(_title(one, card), _footer(one), columns=3)
    figure.set_figwidth(14.0)
    first = COLOURS.index(_colour(runs[0].label))
    draw_lines(streams, _lines(runs, lambda run: dict(run.decode)), first_colour=first)
    streams_axis(streams, spec.streams)
    streams.set_title("Decode, all requests together")
    draw_lines(depths, _lines(runs, lambda run: _decode_by_depth(run, short_context(spec))), first_colour=first)
    _tokens_axis(depths, (short_context(spec), *spec.depths), "context (tokens)")
    depths.set_title("Decode, one request")
    draw_lines(prefill, _lines(runs, _prefill_by_length), first_colour=first)
    _tokens_axis(prefill, sorted({*spec.prefills, *spec.depths}), "prompt (tokens)")
    prefill.set_title("Prefill, one request")
    for axes in (streams, depths, prefill):
        axes.set_ylabel("tokens/s")
    return save(figure, folder, f"{card.name}-{one.size}")[0]


def _draw_costs(one: Recorded, card: GpuRow, folder: Path) -> Path:
    figure, (memory, start) = new_figure(_title(one, card), _footer(one), columns=2, height=3.4)
    draw_bars(memory, _memory_bars(one.result.runs), unit="GiB")
    memory.set_title("Resident on the card")
    draw_bars(start, start_bars(one.result.runs), unit="s")
    start.set_title("Start of the engine")
    return save(figure, folder, f"{card.name}-{one.size}-costs")[0]


def _title(one: Recorded, card: GpuRow) -> str:
    return f"{one.title} on {card.title}: {' and '.join(run.label for run in one.result.runs)}"


def _footer(one: Recorded) -> str:
    return f"{measured_on(one.result).replace('**', '')} · dummy weights of the real shape, no drafts"


def _colour(label: str) -> str:
    """The same for a label in every panel, whatever was measured beside it."""
    return COLOURS[LABELS.index(label) if label in LABELS else len(LABELS)]


def _tokens_axis(axes: Axes, values: Sequence[int], name: str) -> None:
    """A logarithmic axis with ticks at the lengths measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), labels=[_tokens(value) for value in values])
    axes.minorticks_off()
    axes.set_xlabel(name)


def _lines(runs: Sequence[EngineRun], pick: Callable[[EngineRun], dict[int, Spread]]) -> list[Line]:
    return [Line(run.label, tuple(Point(x, value) for x, value in sorted(pick(run).items()))) for run in runs]


def _decode_by_depth(run: EngineRun, context: int) -> dict[int, Spread]:
    found = {context: run.decode[1]} if 1 in run.decode else {}
    return found | {depth: _single(rates.decode) for depth, rates in run.depths.items()}


def _prefill_by_length(run: EngineRun) -> dict[int, Spread]:
    return {depth: _single(rates.prefill) for depth, rates in run.depths.items()} | dict(run.prefill)


def _single(value: float) -> Spread:
    return Spread(median=value, mean=value, std=0.0, low=value, high=value, values=(value,))


def _memory_bars(runs: Sequence[EngineRun]) -> list[Bar]:
    return [
        (f"{run.label}: {name}", size / GIB, 0.0, _colour(run.label))
        for name in ("weights", "whole process")
        for run in runs
        if (size := run.model_bytes if name == "weights" else run.reserved_bytes) is not None
    ]


def start_bars(runs: Sequence[EngineRun]) -> list[Bar]:
    """Starts of which it is known what they found; one beside others' is called so."""
    cold = [
        (f"{run.label}: empty caches{BESIDE_OTHERS if run.side_by_side else ''}", run.load_s, 0.0, _colour(run.label))
        for run in runs
        if run.cold
    ]
    warm = [
        (f"{run.label}: caches filled", again.median, again.std, _colour(run.label))
        for run in runs
        if (again := spread(run.restart_s)) is not None
    ]
    return cold + warm


def _draw_beside(record: Sequence[Recorded], card: GpuRow, folder: Path) -> Path:
    other = find_gpu(BESIDE)
    bars = [[*_own_bars(one, card), *_other_bars(one, other)] for one in record]
    title = f"Decode, one request: {card.title} as measured, {other.title} as others published it"
    footer = (
        f"Blue and red: measured by this project on the {card.title}, dummy weights. Grey: published by others for the "
        f"{other.title}, not measured by this project. Orange: bound from that card's bandwidth, computed."
    )
    height = 2.2 + 0.3 * max(map(len, bars))
    figure, panels = new_figure(title, footer, columns=len(record), height=height)
    figure.set_figwidth(8.0 * len(record))
    for axes, one, rows in zip(panels, record, bars, strict=True):
        draw_bars(axes, rows, unit="tokens/s")
        axes.set_title(one.title)
    return save(figure, folder, f"{card.name}-beside")[0]


def _own_bars(one: Recorded, card: GpuRow) -> list[Bar]:
    return [
        (f"{seen.label}, {card.title}, at {_tokens(seen.depth)}", seen.decode, 0.0, _colour(seen.label))
        for seen in one_stream(one.result)
        if seen.decode is not None
    ]


def _other_bars(record: Recorded, card: GpuRow) -> list[Bar]:
    name = card.title.removeprefix("GeForce ")
    published = [
        (f"{entry.title}, {name}, {figure.where}", figure.tokens_per_s, 0.0, OTHERS)
        for entry in entries(card, record.title)
        for figure in entry.of("decode")
    ]
    computed = [
        (f"bound of {one.model}, {name}, at {_tokens(one.depth)}", one.tokens_per_s, 0.0, COLOURS[4])
        for one in bounds_beside(card, record.title, record.model)
    ]
    return published + computed


def _tokens(count: int) -> str:
    """`255.5K` for 261,632, `272` for 272."""
    return f"{count / KIB:.4g}K" if count >= KIB else str(count)
