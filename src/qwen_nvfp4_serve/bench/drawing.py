"""The look that all charts share, and saving. matplotlib is loaded when the first chart is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_nvfp4_serve.bench.files import write_whole
from qwen_nvfp4_serve.bench.series import Line, short
from qwen_nvfp4_serve.bench.statistics import Spread
from qwen_nvfp4_serve.errors import QwenNvfp4Error, printable
from qwen_nvfp4_serve.units import KIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers and in grey print by the markers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
OTHERS = "#9A9A9A"
FAULT = "#B00020"
PNG_DPI = 144
STYLE: dict[str, object] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.hashsalt": "qwen-nvfp4",  # equal data, equal file
    "svg.fonttype": "none",
}


def plain(text: str) -> str:
    """`text` in one line, with dollar signs that matplotlib does not take for mathematics."""
    return printable(text).replace("$", r"\$")


def new_figure(title: str, footer: str, *, columns: int, height: float = 4.6) -> tuple[Figure, list[Axes]]:
    """A figure with `columns` panels side by side. Raises QwenNvfp4Error when matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise QwenNvfp4Error("no charts", seen="matplotlib is not installed", do="pip install matplotlib") from None
    matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
    figure = Figure(figsize=(5.6 * columns if columns > 1 else 8.4, height), layout="constrained")
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel("\n".join(map(plain, footer.split("\n"))), x=0.01, ha="left", fontsize=8, color="#666666")
    panels = figure.subplots(1, columns, squeeze=False)
    return figure, list(panels[0])


def save(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Writes `name`.png and `name`.svg, each whole or not at all."""
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    pixels, shapes = BytesIO(), BytesIO()
    figure.savefig(pixels, format="png", dpi=PNG_DPI)
    figure.savefig(shapes, format="svg", metadata={"Date": None})
    write_whole(png, pixels.getvalue())
    write_whole(svg, shapes.getvalue())
    return png, svg


def draw_lines(axes: Axes, lines: Sequence[Line], *, first_colour: int = 0) -> None:
    """Medians with a bar of one standard deviation each; a legend when there is more than one line."""
    for index, line in enumerate(lines, first_colour):
        axes.errorbar(
            [point.x for point in line.points],
            [point.value.median for point in line.points],
            yerr=[point.value.std for point in line.points],
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=line.label or None,
            linewidth=1.8,
            markersize=5.5,
            capsize=3,
        )
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    if any(line.label for line in lines):
        axes.legend()


def depth_axis(axes: Axes, depths: Sequence[int]) -> None:
    """A logarithmic axis of context depth that has room for 0; ticks at the depths measured."""
    axes.set_xscale("symlog", base=2, linthresh=max(KIB, min((depth for depth in depths if depth), default=KIB)))
    axes.set_xticks(list(depths), labels=[short(depth) for depth in depths])
    axes.minorticks_off()
    axes.set_xlim(right=1.2 * max(depths))
    axes.set_xlabel("context depth (tokens)")


def streams_axis(axes: Axes, streams: Sequence[int]) -> None:
    """A logarithmic axis of concurrency with ticks at the values measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(streams), labels=[str(count) for count in streams])
    axes.minorticks_off()
    axes.set_xlim(min(streams) / 1.15, max(streams) * 1.15)
    axes.set_xlabel("requests at once")


def draw_pairs(axes: Axes, pairs: Sequence[tuple[str, Spread, Spread]], names: tuple[str, str], *, unit: str) -> None:
    """Two horizontal bars for each label, the first above the second, with medians at their ends and a legend."""
    widest = max((one.median + one.std for _, *both in pairs for one in both), default=1.0) or 1.0
    for side, name in enumerate(names):
        for place, (_, *both) in enumerate(pairs):
            value, where = both[side], place + 0.4 * side - 0.2
            axes.barh(where, value.median, height=0.36, color=COLOURS[side], label=None if place else name)
            axes.errorbar(value.median, where, xerr=value.std, color="#333333", capsize=2.5, linewidth=1)
            text = f"{value.median:,.0f}" if value.median >= 100 else f"{value.median:.1f}"
            axes.text(value.median + value.std + 0.012 * widest, where, text, va="center", fontsize=8.5)
    axes.set_yticks(range(len(pairs)), labels=[label for label, *_ in pairs], fontsize=8.5)
    axes.set_ylim(len(pairs) - 0.5, -0.9)
    axes.set_xlim(0, 1.16 * widest)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)
    if pairs:
        axes.legend(loc="upper right", ncols=2, fontsize=8.5, borderpad=0)


def draw_bars(axes: Axes, bars: Sequence[tuple[str, float, float, str]], *, unit: str) -> None:
    """Horizontal bars from the top: label, length, half the error bar (0 for none), colour; the value at the end."""
    places = range(len(bars))
    widest = max((value + error for _, value, error, _ in bars), default=1.0) or 1.0
    axes.barh(places, [value for _, value, _, _ in bars], color=[colour for *_, colour in bars], height=0.68)
    for place, (_, value, error, _) in zip(places, bars, strict=True):
        if error:
            axes.errorbar(value, place, xerr=error, color="#333333", capsize=2.5, linewidth=1)
        text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        axes.text(value + error + 0.012 * widest, place, text, va="center", fontsize=8.5)
    axes.set_yticks(list(places), labels=[label for label, *_ in bars], fontsize=8.5)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(0, 1.14 * widest)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)
