"""The documentation's tables of sweeps against the record that keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.kernels.nvfp4_linear import sweeps

ROOT = Path(__file__).parents[3]
RESULT = json.loads((ROOT / "docs/results/linear-h200.json").read_text())
TEXT = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("kernels*.md")))


def test_projection_behind_dependent_kernels_is_that_of_the_record() -> None:
    kernels = RESULT["tried"][sweeps.STACK]["kernels"]
    dependent, plain = (kernels[form]["gdn_qkvz (torch)"] for form in ("ours as served", "ours"))
    assert f"`gdn_qkvz` takes {dependent:.1f} instead of {plain:.1f} us at 8 tokens behind dependent kernels" in TEXT


def form(m: int, form: str, us: float) -> dict[str, Any]:
    return {"M": m, "form": form, "group": "main", "last_us": us, "power_w": 500.4, "lowest_mhz": 1980.0 - us}


def test_stack_without_the_delta_net_is_compared_with_stock_without_it() -> None:
    forms = [form(8, "stock", 40.0), form(8, "stock, no delta net", 20.0), form(8, "ours, no delta net", 16.0)]
    forms += [form(1, "stock", 30.0), {**form(8, "stock", 41.0), "group": "again"}]
    text = sweeps.stack({"card": "a card", "tried": {sweeps.STACK: {"forms": forms}}})
    assert "never below 1940 MHz" in text
    assert text.endswith(
        "| linear layers | M=8 | M=1 |\n|---|---|---|\n"
        "| stock | 40 (1.000), 500 W | 30 (1.000), 500 W |\n"
        "| stock, no delta net | 20 (1.000), 500 W |  |\n"
        "| ours, no delta net | 16 (1.250), 500 W |  |\n"
    )


@pytest.mark.parametrize("table", sweeps.TABLES, ids=lambda table: table.__name__)
def test_documentation_holds_the_tables_of_the_sweeps(table: Any) -> None:
    assert table(RESULT) in TEXT
