"""The chart of one result: each kind's share of right answers, and needles by length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_nvfp4_serve.bench.drawing import COLOURS, new_figure, save
from qwen_nvfp4_serve.bench.series import short
from qwen_nvfp4_serve.quality.result import Result
from qwen_nvfp4_serve.quality.summary import Row, needle_grid, rows
from qwen_nvfp4_serve.quality.task import Thinking

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODE_COLOURS: dict[Thinking, str] = {"off": COLOURS[0], "on": COLOURS[1], "default": COLOURS[2]}
BAR = 0.8  # share of a row's height that its bars fill together
CELL_HEIGHT = 0.7  # of a grid, in widths
PALE = 0.12  # cut from both ends of the colours, so that black text stays readable
NAME = "quality"


def draw_quality(result: Result, folder: Path) -> Path | None:
    """Writes quality.png and quality.svg; returns the PNG, None without any answer.

    Raises QwenNvfp4Error when matplotlib is not installed.
    """
    kinds = [row for row in rows(result) if row.family is not None]
    if not kinds:
        return None
    modes = [mode for mode in result.exam.thinking if any(row.thinking == mode for row in kinds)]
    grids = [mode for mode in modes if needle_grid(result.outcomes, mode)[0]]
    names = list(dict.fromkeys(row.name for row in kinds))
    folder.mkdir(parents=True, exist_ok=True)
    height = 2.0 + max(0.19 * len(names) * (len(modes) + 0.6), 2.4 if grids else 1.0)
    figure, panels = new_figure(title_of(result), footer_of(result), columns=2 if grids else 1, height=height)
    _bars(panels[0], names, modes, kinds)
    whole = panels[-1].get_subplotspec()
    if grids and whole is not None:
        panels[-1].remove()
        parts = whole.subgridspec(len(grids), 1)
        for place, mode in enumerate(grids):
            _grid(figure.add_subplot(parts[place, 0]), result, mode)
    return save(figure, folder, NAME)[0]


def title_of(result: Result) -> str:
    """`label: model on card, 80 of 100 right`."""
    state = "" if result.complete else ", not finished"
    return (
        f"{result.label}: {result.server.model} on {result.machine.title}, "
        f"{result.right} of {len(result.outcomes)} right{state}"
    )


def footer_of(result: Result) -> str:
    """Versions, date, seed and what the error bars are."""
    vllm = f"vLLM {result.server.vllm}" if result.server.vllm else "server version unknown"
    run = f"set {result.exam.set}, seed {result.exam.seed}, greedy, {result.exam.concurrency} at once"
    return f"{vllm} · qwen-nvfp4 {result.project} · {result.started[:10]} · {run} · bars: 95 % interval (Wilson)"


def _bars(axes: Axes, names: Sequence[str], modes: Sequence[Thinking], kinds: Sequence[Row]) -> None:
    height = BAR / len(modes)
    for side, mode in enumerate(modes):
        found = {row.name: row.tally for row in kinds if row.thinking == mode}
        for place, name in enumerate(names):
            if name not in found:
                continue
            seen, where = found[name], place + (side - (len(modes) - 1) / 2) * height
            low, high = seen.interval
            axes.barh(where, seen.percent, height=0.9 * height, color=MODE_COLOURS[mode])
            error = [[max(0.0, seen.percent - low)], [max(0.0, high - seen.percent)]]
            axes.errorbar(seen.percent, where, xerr=error, color="#555555", capsize=1.5, linewidth=0.8)
            said = f"{seen.right}/{seen.asked}" + (f"  {seen.missed}" if seen.missed else "")
            axes.text(103, where, said, va="center", fontsize=7)
    for mode in modes:
        axes.barh(-9, 0, color=MODE_COLOURS[mode], label=f"thinking {mode}")
    axes.set_yticks(range(len(names)), labels=list(names), fontsize=8.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("right answers, %")
    axes.set_title("By kind")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(modes), fontsize=8.5, borderaxespad=0.2)


def _grid(axes: Axes, result: Result, mode: Thinking) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    lengths, depths, cells = needle_grid(result.outcomes, mode)
    colours = colormaps["RdYlBu"]
    for (length, depth), seen in cells.items():
        x, y = lengths.index(length), depths.index(depth)
        colour = colours(PALE + (1 - 2 * PALE) * seen.percent / 100)
        axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=colour, linewidth=0))
        axes.text(x, y, f"{seen.right}/{seen.asked}", ha="center", va="center", fontsize=8.5)
    axes.set_xticks(range(len(lengths)), labels=[short(length) for length in lengths])
    axes.set_yticks(range(len(depths)), labels=[f"{depth}" for depth in depths])
    axes.set_box_aspect(min(1.6, CELL_HEIGHT * len(depths) / len(lengths)))
    axes.set_anchor("N")
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(len(depths) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set_xlabel("length of the prompt (tokens)")
    axes.set_ylabel("depth of the needle (%)")
    axes.set_title(f"Needles found, thinking {mode}")
