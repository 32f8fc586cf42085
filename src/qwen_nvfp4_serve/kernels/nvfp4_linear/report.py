"""Tables for docs/kernels-linear.md out of a measurement.

python -m qwen_nvfp4_serve.kernels.nvfp4_linear.report RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TILED_TOKENS = (16, 32, 48, 64, 96, 128, 256, 512)
GROUPS = (
    ("27b", (1, 2, 4, 8, 16, 32, 48, 64)),
    ("35b", (1, 2, 4, 8, 16, 32, 48, 64)),
    ("27b", (96, 128, 256, 512, 1024, 4096)),
    ("35b", (96, 128, 256, 512, 1024, 4096)),
)


def tables(result: dict[str, Any]) -> str:
    """Markdown: microseconds of the fastest of ours, and in brackets Marlin's time over it, by layer and M."""
    fastest = "the fastest of ours (t: the tiled GEMM)" if _has_tiled(result) else "ours"
    parts = [
        f"{result['card']}, torch {result['torch']}, Marlin of vLLM {result['vllm']}, code {result['commit']}; "
        f"a plain read reaches {result['read_gbps']:.0f} GB/s. "
        f"Microseconds of {fastest}, in brackets Marlin's time over it."
    ]
    for model, tokens in GROUPS:
        rows = [row for row in result["rows"] if row["shape"].startswith(model + "/")]
        layers = list(dict.fromkeys(row["shape"] for row in rows))
        lines = ["| layer [N, K] | " + " | ".join(f"M={m}" for m in tokens) + " |", "|---" * (len(tokens) + 1) + "|"]
        for layer in layers:
            by_m = {row["M"]: row for row in rows if row["shape"] == layer}
            first = next(iter(by_m.values()))
            cells = [_cell(by_m[m]) if m in by_m else "" for m in tokens]
            lines.append(f"| {layer} [{first['n']}, {first['k']}]{_earlier(first)} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    earlier = sorted({row["commit"] for row in result["rows"] if "commit" in row})
    if earlier:
        parts.append(f"\\* of an earlier run on another machine, code {', '.join(earlier)}.")
    if any(row.get("ours_behind_us") for row in result["rows"]):
        parts.append(_behind(result))
    if _has_tiled(result):
        parts.append(_tiled(result))
    parts.append(_bandwidth(result))
    return "\n\n".join(parts) + "\n"


def _earlier(row: dict[str, Any]) -> str:
    return " \\*" if "commit" in row else ""


def saved_us(result: dict[str, Any], layers: dict[str, int], tokens: int) -> float:
    """Microseconds of a decode step that these layers, so many of each, take less than with Marlin."""
    rows = (row for row in result["rows"] if row["shape"] in layers and row["M"] == tokens)
    return float(sum((row["marlin_us"] - served_us(row)) * layers[row["shape"]] for row in rows))


def _has_tiled(result: dict[str, Any]) -> bool:
    return any(row.get("tiled_us") for row in result["rows"])


def served_us(row: dict[str, Any]) -> float:
    """Microseconds of the fastest of ours, which an admission would take."""
    return float(min(us for us in (row["ours_us"], row.get("tiled_us")) if us))


def _cell(row: dict[str, Any]) -> str:
    ours, marlin = served_us(row), row["marlin_us"]
    mark = "t" if ours != row["ours_us"] else ""
    ratio = f" ({marlin / ours:.2f})" if marlin else ""
    return f"{ours:.1f}{mark}{ratio}" if ours < 1000 else f"{ours:.0f}{mark}{ratio}"


def _behind(result: dict[str, Any]) -> str:
    """Microseconds that our kernel adds behind a small kernel, and in brackets what Marlin adds over it."""
    rows = [row for row in result["rows"] if row.get("ours_behind_us")]
    tokens = sorted({row["M"] for row in rows})
    lines = [
        "Behind a small kernel, as in a step: microseconds that a call of ours adds, in brackets Marlin's over it.",
        "",
        "| layer | " + " | ".join(f"M={m}" for m in tokens) + " |",
        "|---" * (len(tokens) + 1) + "|",
    ]
    for layer in dict.fromkeys(row["shape"] for row in rows):
        by_m = {row["M"]: row for row in rows if row["shape"] == layer}
        cells = [_beside(by_m[m]["ours_behind_us"], by_m[m]["marlin_behind_us"]) if m in by_m else "" for m in tokens]
        lines.append(f"| {layer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _beside(ours: float, other: float | None) -> str:
    return f"{ours:.1f} ({other / ours:.2f})" if other else f"{ours:.1f}"


def _tiled(result: dict[str, Any]) -> str:
    """Microseconds of the tiled GEMM, and in brackets the time of the small-M kernel or dequantized GEMM over it."""
    errors = [error for by_m in result["tiled_checked"].values() for error in by_m.values()]
    lines = [
        f"The tiled GEMM: at most {max(errors):.3f} of the error allowed. Microseconds, in brackets the above over it.",
        "",
        "| layer | " + " | ".join(f"M={m}" for m in TILED_TOKENS) + " |",
        "|---" * (len(TILED_TOKENS) + 1) + "|",
    ]
    by_layer: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["rows"]:
        by_layer.setdefault(row["shape"], {})[row["M"]] = row
    for layer, rows in by_layer.items():
        if not any(row.get("tiled_us") for row in rows.values()):
            continue
        cells = [
            f"{rows[m]['tiled_us']:.1f} ({rows[m]['ours_us'] / rows[m]['tiled_us']:.2f})"
            if m in rows and rows[m].get("tiled_us")
            else ""
            for m in TILED_TOKENS
        ]
        lines.append(f"| {layer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _bandwidth(result: dict[str, Any]) -> str:
    rows = [row for row in result["rows"] if row["M"] == 1]
    lines = ["| M=1 | weight bytes / time | of the plain read | BF16 GEMM over ours |", "|---|---|---|---|"]
    for row in rows:
        gbps = row["n"] * row["k"] * 9 / 16 / row["ours_us"] / 1e3
        share = gbps / result["read_gbps"]
        lines.append(f"| {row['shape']} | {gbps:.0f} GB/s | {share:.0%} | {row['bf16_us'] / row['ours_us']:.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables of the named result."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    print(tables(json.loads(Path(path).read_text())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
