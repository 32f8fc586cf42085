"""Tables for docs/kernels-linear.md out of the sweeps that a record keeps under `tried`.

python -m qwen_nvfp4_serve.kernels.nvfp4_linear.sweeps RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FEW, LAUNCH, STACK = "few tokens, before and now", "one launch, traced", "a stack of eight layers"
ROLES = ("gate_up", "down", "attn_qkv", "attn_o", "gdn_qkvz", "gdn_out", "gdn_ba", "delta net")
WITHOUT = ", no delta net"
NAMES = {"marlin": "Marlin", "torch": "torch", "ours": "ours", "bf16": "ours"}
POINTS = {"activations": "activations there", "sums": "its sums there", "ended": "ended", "handing_over": "sums to end"}


def before_and_now(result: dict[str, Any]) -> str:
    """Markdown: microseconds of the kernels before and now, behind a small kernel and one after the other."""
    sweep = result["tried"][FEW]
    codes = f"before (code {sweep['before']}) and now ({sweep['now']})"
    lines = [
        f"Microseconds {codes}, {result['card']}, in one sweep: what a call adds behind a small kernel of torch's,",
        "",
    ]
    lines += _before_and_now(sweep, "behind_us")
    lines += ["", "and calls one after the other in a graph:", "", *_before_and_now(sweep, "us")]
    return "\n".join(lines) + "\n"


def _before_and_now(sweep: dict[str, Any], field: str) -> list[str]:
    rows = [
        [layer, *(f"{a:.1f}, {b:.1f}" for a, b in zip(times[f"before_{field}"], times[f"now_{field}"], strict=True))]
        for layer, times in sweep["layers"].items()
    ]
    return _table(["layer", *(f"M={m}" for m in sweep["tokens"])], rows)


def one_launch(result: dict[str, Any]) -> str:
    """Markdown: when the first, the median and the last CTA of a traced launch came to each point."""
    found = result["tried"][LAUNCH]
    at = [found["quantiles"].index(share) for share in (0, 0.5, 1)]
    rows = [
        [
            f"{one['shape']}, M={one['M']}: "
            f"{one['ctas']} CTAs of {one['warps']} warps, {one['window_steps']}-step windows",
            *(", ".join(f"{one[f'{point}_us'][i]:.1f}" for i in at) for point in POINTS),
        ]
        for one in found["launches"]
    ]
    lines = [
        f"When CTAs of one launch came to a point, microseconds after the first one began, {result['card']}: "
        "the first, the median, the last.",
        "",
        *_table(["launch", *POINTS.values()], rows),
    ]
    return "\n".join(lines) + "\n"


def stack(result: dict[str, Any]) -> str:
    """Markdown: a stack of layers by who has its linear layers, for eight tokens and for one."""
    forms = [row for row in result["tried"][STACK]["forms"] if row["group"] != "again"]
    times = {(row["M"], row["form"]): row["last_us"] for row in forms}
    tokens = list(dict.fromkeys(row["M"] for row in forms))
    cells: dict[str, dict[int, str]] = {}
    for row in forms:
        m, form, us = row["M"], row["form"], row["last_us"]
        stock = times[m, f"stock{WITHOUT}" if form.endswith(WITHOUT) else "stock"]
        cells.setdefault(form, {})[m] = f"{us:.0f} ({stock / us:.3f}), {row['power_w']:.0f} W"
    rows = [[form, *(by_m.get(m, "") for m in tokens)] for form, by_m in cells.items()]
    lines = [
        f"Eight of the 27B's decode layers in one graph, {result['card']}, replayed without a pause: microseconds of a "
        "replay, in brackets stock's over it, and the card's power. "
        f"Its SM clock was never below {min(row['lowest_mhz'] for row in forms):.0f} MHz. "
        "Ours: NVFP4 layers and gdn_ba; as served: gdn_out too, and the small kernels between launched dependently.",
        "",
        *_table(["linear layers", *(f"M={m}" for m in tokens)], rows),
    ]
    return "\n".join(lines) + "\n"


def alone(result: dict[str, Any]) -> str:
    """Markdown: calls of one of the stack's layers one after the other, at once and when the card is warm."""
    calls = result["tried"][STACK]["alone"]
    rows = [
        [
            f"{row['role']}, {NAMES[row['how']]}",
            *(f"{row[field]:.1f}" for field in ("short_us", "last_us")),
            f"{row['sm_mhz']:.0f}, {row['lowest_mhz']:.0f}",
            f"{row['power_w']:.0f}",
        ]
        for row in calls
    ]
    heads = ["calls", "us at once", "us in the second half of a second", "its SM clock, lowest, MHz", "W"]
    lines = [f"Calls of one layer alone at {calls[0]['M']} tokens, {result['card']}:", "", *_table(heads, rows)]
    return "\n".join(lines) + "\n"


def kernels(result: dict[str, Any]) -> str:
    """Markdown: what each of the stack's kernels takes itself, by who has the linear layers."""
    found = result["tried"][STACK]["kernels"]
    lines = [f"Kernels of the stack at 8 tokens in a profile, {result['card']}: own microseconds a call.", ""]
    return "\n".join([*lines, *_table(["kernel", *found], _kernels(found))]) + "\n"


def _kernels(kernels: dict[str, dict[str, float]]) -> Iterable[list[str]]:
    for role in ROLES:
        cells = [
            ", ".join(f"{us:.1f}{_whose(name)}" for name, us in by_name.items() if name.split(" (")[0] == role)
            for by_name in kernels.values()
        ]
        yield [role, *cells]


def _whose(name: str) -> str:
    return f", {NAMES[name.split(' (')[1].rstrip(')')]}" if " (" in name else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


TABLES = (before_and_now, one_launch, stack, alone, kernels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables of the named result."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    result = json.loads(Path(path).read_text())
    print("\n".join(make(result) for make in TABLES), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
