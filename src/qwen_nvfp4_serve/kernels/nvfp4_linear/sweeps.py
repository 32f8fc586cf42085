"""Tables for docs/kernels-linear.md out of the sweeps that a record keeps under `tried`.

python -m qwen_nvfp4_serve.kernels.nvfp4_linear.sweeps RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

STEP, LAUNCH, FENCE = "a step's graph", "one launch, traced", "copies before and after the fence"
STACK = "a stack of eight layers"
POINTS = {"activations": "activations there", "sums": "its sums there", "ended": "ended", "handing_over": "sums to end"}
# Kernels of a step by the rows of the table. Marlin's are of all four NVFP4 layers.
KERNELS = {
    "NVFP4 layers": ("gate_up", "down", "attn_qkv", "attn_o", "Marlin"),
    "of them gate_up": ("gate_up",),
    "gdn_qkvz, with gdn_ba where they are one": ("gdn_qkvz", "gdn_qkvz+ba"),
    "gdn_out": ("gdn_out",),
    "gdn_ba": ("gdn_ba", "reduction of gdn_ba"),
    "delta net": ("delta net", "convolution"),
    "norms and gates": ("norms", "gates", "gated norms"),
}


def step(result: dict[str, Any]) -> str:
    """Markdown: a graph of all layers by whose kernels it has, in brackets stock's time over it."""
    found = result["tried"][STEP]
    stock = found["us"]["stock"]
    rows = [
        [_whose(found, whose), *(f"{us:,.0f} ({base / us:.3f})" for us, base in zip(times, stock, strict=True))]
        for whose, times in found["us"].items()
    ]
    return _said(
        f"All 64 layers of the 27B in one graph, {result['card']}: microseconds of a replay, in brackets stock's "
        "over it.",
        _table(["kernels", *(f"M={m}" for m in found["tokens"])], rows),
    )


def _whose(found: dict[str, Any], whose: str) -> str:
    return f"ours, code {found['codes'][whose]}" if whose in found["codes"] else whose


def step_kernels(result: dict[str, Any]) -> str:
    """Markdown: where that graph's time goes, for eight tokens and for one."""
    found = result["tried"][STEP]
    columns = [(m, whose) for m in found["kernels"] for whose in found["kernels"][m]]
    rows = []
    for title, names in KERNELS.items():
        sums = [
            sum(one["us"] for name, one in found["kernels"][m][whose].items() if name in names) for m, whose in columns
        ]
        rows.append([title, *(f"{us:,.0f}" if us else "" for us in sums)])
    heads = [f"M={m}, {_whose(found, whose).removeprefix('ours, code ')}" for m, whose in columns]
    return _said("Own microseconds of its kernels in a profile:", _table(["kernels", *heads], rows))


def step_parts(result: dict[str, Any]) -> str:
    """Markdown: that graph without parts of it."""
    found = result["tried"][STEP]
    by_title = found["parts"]["us"]
    tokens = next(iter(by_title.values()))
    rows = [[title, *(f"{by_m[m]:,.0f}" if m in by_m else "" for m in tokens)] for title, by_m in by_title.items()]
    return _said(
        f"The same graph by code {found['codes']['before']} in another visit, microseconds of a replay:",
        _table(["graph", *(f"M={m}" for m in tokens)], rows),
    )


def ways(result: dict[str, Any]) -> str:
    """Markdown: what was tried in that graph, beside the same without it."""
    rows = [
        [way["what"], str(way["M"]), f"{way['beside_us']:,.0f}", f"{way['us']:,.0f}"]
        for way in result["tried"][STEP]["ways"]
    ]
    return _said(
        "Ways that were tried in it, each beside the same graph in the same visit:",
        _table(["what", "M", "without", "with"], rows),
    )


def smaller(result: dict[str, Any]) -> str:
    """Markdown: the same changes in a graph of the 35B's layers."""
    found = result["tried"][STEP]["35b"]
    rows = [[title, *(f"{us:,.0f}" for us in times)] for title, times in found["us"].items()]
    return _said(
        f"40 layers of the 35B in one graph, {result['card']}, microseconds of a replay:",
        _table(["kernels", *(f"M={m}" for m in found["tokens"])], rows),
    )


def fence(result: dict[str, Any]) -> str:
    """Markdown: the wgmma form before and after its copies are requested behind the fence."""
    found = result["tried"][FENCE]
    rows = [
        [layer, *(f"{by_m[str(m)]['served before']['us']:.1f}, {_best(by_m[str(m)])}" for m in found["tokens"])]
        for layer, by_m in found["layers"].items()
    ]
    return _said(
        f"Microseconds one after the other, {result['card']}: what served before (code {found['code']}), and the best "
        "form that requests copies after the turn, its tokens (t) and warps (w).",
        _table(["layer", *(f"M={m}" for m in found["tokens"])], rows),
    )


def _best(cell: dict[str, Any]) -> str:
    return f"{cell['after the turn']['us']:.1f} {cell['after the turn']['form']}"


def one_launch(result: dict[str, Any]) -> str:
    """Markdown: when the first, the median and the last CTA of a traced launch came to each point."""
    found = result["tried"][LAUNCH]
    at = [found["quantiles"].index(share) for share in (0, 0.5, 1)]
    rows = [
        [
            f"{one['shape']}, M={one['M']}, {one['where']}",
            *(", ".join(f"{one[f'{point}_us'][i]:.1f}" for i in at) for point in POINTS),
        ]
        for one in found["launches"]
    ]
    ctas, warps = found["launches"][0]["ctas"], found["launches"][0]["warps"]
    return _said(
        f"When CTAs of one launch in that graph, {ctas} of {warps} warps, came to a point, microseconds after the "
        "first one began: the first, the median, the last.",
        _table(["launch", *POINTS.values()], rows),
    )


def _said(sentence: str, table: Sequence[str]) -> str:
    return "\n".join([sentence, "", *table]) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


TABLES = (step, step_kernels, step_parts, ways, smaller, one_launch, fence)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables of the named result."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    result = json.loads(Path(path).read_text())
    print("\n".join(make(result) for make in TABLES), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
