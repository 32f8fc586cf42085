"""What others published for a card, beside what its bandwidth allows: a page without a measurement of ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qwen_nvfp4_serve.bench.drawing import COLOURS, OTHERS, draw_bars, new_figure, save
from qwen_nvfp4_serve.bench.published import Published, published
from qwen_nvfp4_serve.gpus import GpuRow, match_gpu
from qwen_nvfp4_serve.models import MODELS, ModelRow
from qwen_nvfp4_serve.planner import PlanModel, PlanRequest
from qwen_nvfp4_serve.planner.roofline import bytes_per_token
from qwen_nvfp4_serve.units import KIB

SIZES = ("35B-A3B", "27B")
DEPTHS = (4 * KIB, 256 * KIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Tokens/s of one stream without speculation, if a step only read its bytes at the vendor's bandwidth."""

    model: str
    size: str
    depth: int
    bytes_per_token: int
    tokens_per_s: float


def bounds(card: GpuRow) -> tuple[Bound, ...]:
    """The bound of every catalogue checkpoint of SIZES at DEPTHS, with an FP8 cache."""
    return tuple(
        _bound(card, _stored(row), row.title, size, depth)
        for size in SIZES
        for row in MODELS
        if row.title.endswith(size)
        for depth in DEPTHS
    )


def bounds_beside(card: GpuRow, size: str, model: PlanModel) -> tuple[Bound, ...]:
    """Those of one size, and of a model that was measured where no checkpoint of the catalogue moves its bytes."""
    listed = [one for one in bounds(card) if one.size == size]
    own = [_bound(card, model, model.name, size, depth) for depth in DEPTHS]
    known = {(one.depth, one.bytes_per_token) for one in listed}
    return (*listed, *(one for one in own if (one.depth, one.bytes_per_token) not in known))


def _stored(row: ModelRow) -> PlanModel:
    if row.dims is None:
        raise ValueError(f"{row.name} has no dimensions in the table")
    return PlanModel.from_row(row, row.dims)


def _bound(card: GpuRow, model: PlanModel, title: str, size: str, depth: int) -> Bound:
    moved = bytes_per_token(PlanRequest(model=model, gpu=card), depth)
    return Bound(
        model=title,
        size=size,
        depth=depth,
        bytes_per_token=moved,
        tokens_per_s=card.bandwidth_bytes_per_s / moved,
    )


def entries(card: GpuRow, size: str) -> tuple[Published, ...]:
    """Published entries of this card and model size."""
    return tuple(one for one in published() if one.model.endswith(size) and match_gpu(one.card) == card)


def landscape_markdown(card: GpuRow, chart: Path | None) -> str:
    """The page: for each size the bounds, then the published figures with source and caveats."""
    lines = [f"# {card.title}: what others published, and what its bandwidth allows", ""]
    lines += ["Nothing here was measured by this project. Generated: `qwen-nvfp4 bench published`.", ""]
    if chart is not None:
        lines += [f"![{chart.stem}]({chart.name})", ""]
    for size in SIZES:
        lines += [f"## {size}", "", "| bound, one stream | depth | bytes per token | t/s |", "|:--|--:|--:|--:|"]
        lines += [
            f"| {one.model} | {one.depth // KIB}K | {one.bytes_per_token / 1e9:.3f} GB | {one.tokens_per_s:,.0f} |"
            for one in bounds(card)
            if one.size == size
        ]
        lines += ["", "| published | decode, t/s | prefill, t/s | weights, engine | measured by | source and caveats |"]
        lines += ["|:--|:--|:--|:--|:--|:--|", *(_row(entry) for entry in entries(card, size))]
        lines.append("")
    gigabytes = f"{card.bandwidth_bytes_per_s / 1e9:,.0f} GB/s"
    lines += [
        f"A bound is the vendor's {gigabytes} over the bytes of one decode step: weights as the checkpoint stores"
    ]
    lines += ["them, FP8 cache, recurrent state read and written. No kernel reaches it; speculation may pass it.", ""]
    return "\n".join(lines)


def _row(entry: Published) -> str:
    engine = f"{entry.weights}; {entry.engine}" + (f"; {entry.speculation}" if entry.speculation else "")
    source = f"{entry.source}. {entry.note[0].upper()}{entry.note[1:]}" if entry.note else entry.source
    words = (entry.title, _said(entry, "decode"), _said(entry, "prefill"), engine, entry.measured_by, source)
    return f"| {' | '.join(words)} |"


def _said(entry: Published, test: str) -> str:
    places = [figure.where if figure.depth is not None else f"({figure.where})" for figure in entry.of(test)]
    return "; ".join(f"{one.tokens_per_s:,.10g} {where}" for one, where in zip(entry.of(test), places, strict=True))


def draw_landscape(card: GpuRow, folder: Path) -> Path:
    """Writes `<card>.png` and `.svg`: published decode rates of each size beside the bounds at 4K."""
    bars = {size: [*_bound_bars(card, size), *_published_bars(card, size)] for size in SIZES}
    footer = (
        "Orange: bound from the vendor's bandwidth, computed. Grey: published by others, not measured by this project."
    )
    height = 2.2 + 0.3 * max(len(rows) for rows in bars.values())
    figure, panels = new_figure(f"{card.title}: decode, one request", footer, columns=len(SIZES), height=height)
    figure.set_figwidth(15.5)
    for axes, size in zip(panels, SIZES, strict=True):
        draw_bars(axes, bars[size], unit="tokens/s")
        axes.set_title(size)
    return save(figure, folder, card.name)[0]


def _bound_bars(card: GpuRow, size: str) -> list[tuple[str, float, float, str]]:
    return [
        (f"bound of {one.model}, at {one.depth // KIB}K", one.tokens_per_s, 0.0, COLOURS[4])
        for one in bounds(card)
        if one.size == size
    ]


def _published_bars(card: GpuRow, size: str) -> list[tuple[str, float, float, str]]:
    return [
        (f"{entry.title}, {figure.where}", figure.tokens_per_s, 0.0, OTHERS)
        for entry in entries(card, size)
        for figure in entry.of("decode")
    ]
