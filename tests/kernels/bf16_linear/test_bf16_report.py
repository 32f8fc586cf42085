"""The documentation's table of BF16 layers against the measurement that it comes from."""

from __future__ import annotations

import json
from pathlib import Path

from qwen_nvfp4_serve.kernels.bf16_linear import report

ROOT = Path(__file__).parents[3]
RESULT = json.loads((ROOT / "docs/results/bf16-h200.json").read_text())


def test_documentation_holds_the_table_of_the_result() -> None:
    assert report.table(RESULT) in (ROOT / "docs/kernels-linear.md").read_text()


def test_times_behind_a_small_kernel_have_a_table_where_they_were_measured() -> None:
    rows = [{name: value for name, value in row.items() if "_behind_" not in name} for row in RESULT["rows"]]
    plain = report.table({**RESULT, "rows": rows})
    first = next(row for row in rows if row["M"] == 2)
    first |= {"ours_behind_us": 4.0, "vendor_behind_us": 5.0}
    added = "The same behind a small kernel, as in a step: what a call adds.\n\n| layer | M=2 |\n|---|---|\n"
    text = report.table({**RESULT, "rows": rows})
    assert text == f"{plain}\n{added}| {first['shape']} | 4.0 (1.25) |\n"


def test_saved_time_is_that_of_every_layer_where_ours_is_faster() -> None:
    rows = [
        {"shape": "35b/a", "M": 1, "ours_us": 5.0, "vendor_us": 9.0, "layers": 30},
        {"shape": "35b/b", "M": 1, "ours_us": 5.0, "vendor_us": 4.0, "layers": 30},
        {"shape": "27b/a", "M": 1, "ours_us": 1.0, "vendor_us": 9.0, "layers": 48},
    ]
    assert report.saved_us({"rows": rows}, "35b", 1) == 120.0
