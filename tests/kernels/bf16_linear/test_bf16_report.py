"""The documentation's table of BF16 layers against the measurement that it comes from."""

from __future__ import annotations

import json
from pathlib import Path

from qwen_nvfp4_serve.kernels.bf16_linear import report

ROOT = Path(__file__).parents[3]
RESULT = json.loads((ROOT / "docs/results/bf16-h200.json").read_text())


def test_documentation_holds_the_table_of_the_result() -> None:
    assert report.table(RESULT) in (ROOT / "docs/kernels.md").read_text()


def test_saved_time_is_that_of_every_layer_where_ours_is_faster() -> None:
    rows = [
        {"shape": "35b/a", "M": 1, "ours_us": 5.0, "vendor_us": 9.0, "layers": 30},
        {"shape": "35b/b", "M": 1, "ours_us": 5.0, "vendor_us": 4.0, "layers": 30},
        {"shape": "27b/a", "M": 1, "ours_us": 1.0, "vendor_us": 9.0, "layers": 48},
    ]
    assert report.saved_us({"rows": rows}, "35b", 1) == 120.0
