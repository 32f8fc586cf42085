"""The table of docs/kernels-linear.md out of a measurement.

python -m qwen_nvfp4_serve.kernels.bf16_linear.report RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(result: dict[str, Any]) -> str:
    """Markdown: microseconds of ours and of the vendor's GEMM by layer and M, and what ours reads at M=1."""
    rows: list[dict[str, Any]] = result["rows"]
    tokens = list(dict.fromkeys(row["M"] for row in rows))
    elsewhere = " on another machine" if "about" in result else ""
    lines = [
        f"{result['card']}, torch {result['torch']}, code {result['commit']}; a plain read reaches "
        f"{result['read_gbps']:.0f} GB/s{elsewhere}. Microseconds, in brackets the vendor's GEMM over ours.",
        "",
        "| layer [N, K] | " + " | ".join(f"M={m}" for m in tokens) + " | M=1 reads |",
        "|---" * (len(tokens) + 2) + "|",
    ]
    for layer in dict.fromkeys(row["shape"] for row in rows):
        by_m = {row["M"]: row for row in rows if row["shape"] == layer}
        first = by_m[tokens[0]]
        cells = [f"{by_m[m]['ours_us']:.1f} ({by_m[m]['vendor_us'] / by_m[m]['ours_us']:.2f})" for m in tokens]
        share = first["ours_gbps"] / result["read_gbps"]
        lines.append(f"| {layer} [{first['n']}, {first['k']}] | {' | '.join(cells)} | {share:.0%} |")
    return "\n".join([*lines, *_behind(rows)]) + "\n"


def _behind(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of what a call adds behind a small kernel, where that was measured."""
    rows = [row for row in rows if row.get("ours_behind_us")]
    if not rows:
        return []
    tokens = sorted({row["M"] for row in rows})
    lines = ["", "The same behind a small kernel, as in a step: what a call adds.", ""]
    lines += ["| layer | " + " | ".join(f"M={m}" for m in tokens) + " |", "|---" * (len(tokens) + 1) + "|"]
    for layer in dict.fromkeys(row["shape"] for row in rows):
        of_layer = [row for row in rows if row["shape"] == layer]
        ours, vendor = ({row["M"]: row[name] for row in of_layer} for name in ("ours_behind_us", "vendor_behind_us"))
        cells = [f"{ours[m]:.1f} ({vendor[m] / ours[m]:.2f})" if m in ours else "" for m in tokens]
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    return lines


def saved_us(result: dict[str, Any], model: str, tokens: int) -> float:
    """Microseconds of a decode step that the model's layers take less than with the vendor's GEMM."""
    rows = (row for row in result["rows"] if row["shape"].startswith(f"{model}/") and row["M"] == tokens)
    return float(sum(max(0.0, row["vendor_us"] - row["ours_us"]) * row["layers"] for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of the named result."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    print(table(json.loads(Path(path).read_text())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
