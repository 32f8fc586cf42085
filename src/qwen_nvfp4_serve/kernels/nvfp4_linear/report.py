"""Tables for docs/kernels.md out of a measurement.

python -m qwen_nvfp4_serve.kernels.nvfp4_linear.report RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GROUPS = (
    ("27b", (1, 2, 4, 8, 16, 32, 48, 64)),
    ("35b", (1, 2, 4, 8, 16, 32, 48, 64)),
    ("27b", (96, 128, 256, 512, 1024, 4096)),
    ("35b", (96, 128, 256, 512, 1024, 4096)),
)


def tables(result: dict[str, Any]) -> str:
    """Markdown: microseconds of ours, and in brackets Marlin's time over ours, by layer and M."""
    parts = [
        f"{result['card']}, torch {result['torch']}, Marlin of vLLM {result['vllm']}, code {result['commit']}; "
        f"a plain read reaches {result['read_gbps']:.0f} GB/s. Microseconds, in brackets Marlin's time over ours."
    ]
    for model, tokens in GROUPS:
        rows = [row for row in result["rows"] if row["shape"].startswith(model + "/")]
        layers = list(dict.fromkeys(row["shape"] for row in rows))
        lines = ["| layer [N, K] | " + " | ".join(f"M={m}" for m in tokens) + " |", "|---" * (len(tokens) + 1) + "|"]
        for layer in layers:
            by_m = {row["M"]: row for row in rows if row["shape"] == layer}
            first = next(iter(by_m.values()))
            cells = [_cell(by_m[m]) if m in by_m else "" for m in tokens]
            lines.append(f"| {layer} [{first['n']}, {first['k']}] | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    parts.append(_bandwidth(result))
    return "\n\n".join(parts) + "\n"


def _cell(row: dict[str, Any]) -> str:
    ours, marlin = row["ours_us"], row["marlin_us"]
    ratio = f" ({marlin / ours:.2f})" if marlin else ""
    return f"{ours:.1f}{ratio}" if ours < 1000 else f"{ours:.0f}{ratio}"


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
