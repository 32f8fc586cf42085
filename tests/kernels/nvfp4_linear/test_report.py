"""The documentation's tables against the measurement they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.kernels.nvfp4_linear import report
from qwen_nvfp4_serve.kernels.nvfp4_linear.shapes import SHAPES

ROOT = Path(__file__).parents[3]
LAYERS = {"27b/gate_up": 64, "27b/down": 64, "27b/attn_qkv": 16, "27b/attn_o": 16}  # of the 27B, in NVFP4
RESULT = json.loads((ROOT / "docs/results/linear-h200.json").read_text())


def test_documentation_holds_the_tables_of_the_result() -> None:
    assert report.tables(RESULT) in (ROOT / "docs/kernels-linear.md").read_text()


def test_result_has_every_layer_and_names_its_origin() -> None:
    assert {row["shape"] for row in RESULT["rows"]} == {shape.name for shape in SHAPES}
    assert {"card", "commit", "torch", "vllm", "read_gbps"} <= RESULT.keys()


def test_result_was_correct_everywhere() -> None:
    assert set(RESULT["checked"]) == {shape.name for shape in SHAPES}
    for errors in RESULT["checked"].values():
        assert len(errors) >= 15
        assert max(errors.values()) <= 1.0


def test_tiled_gemm_has_a_table_where_it_was_timed() -> None:
    plain = [{name: value for name, value in row.items() if name != "tiled_us"} for row in RESULT["rows"]]
    rows = [dict(row, tiled_us=row["ours_us"] / 2) if row["M"] == 64 else row for row in plain]
    result = {**RESULT, "rows": rows, "tiled_checked": {"27b/down": {"17": 0.5, "64": 0.75}}}
    text = report.tables(result)
    assert "at most 0.750 of the error allowed" in text
    first = next(row for row in rows if row["M"] == 64)
    assert f"| {first['shape']} |  |  |  | {first['tiled_us']:.1f} (2.00) |  |  |  |  |" in text
    assert f"{first['tiled_us']:.1f}t ({first['marlin_us'] / first['tiled_us']:.2f})" in text


def test_times_behind_a_small_kernel_have_a_table_where_they_were_measured() -> None:
    assert "Behind a small kernel" not in report.tables({**RESULT, "rows": without_behind(RESULT["rows"])})
    rows = without_behind(RESULT["rows"])
    rows = [
        {**row, "ours_behind_us": row["ours_us"] + 1, "marlin_behind_us": row["marlin_us"] and row["marlin_us"] + 2}
        if row["M"] <= 2
        else row
        for row in rows
    ]
    text = report.tables({**RESULT, "rows": rows})
    cells = [
        f"{row['ours_us'] + 1:.1f} ({(row['marlin_us'] + 2) / (row['ours_us'] + 1):.2f})"
        for row in rows
        if row["shape"] == "27b/down" and row["M"] <= 2
    ]
    assert "| layer | M=1 | M=2 |\n|---|---|---|\n| 27b/gate_up |" in text
    assert f"| 27b/down | {' | '.join(cells)} |" in text
    alone = next(row for row in rows if row["marlin_us"] is None and row["M"] == 1)
    assert f"| {alone['shape']} | {alone['ours_us'] + 1:.1f} | " in text


def without_behind(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.endswith("_behind_us")} for row in rows]


def test_documentation_says_what_the_measured_gain_predicts_for_an_engine() -> None:
    """Amdahl's figure beside what the engine gave, for one and for eight streams."""
    text = (ROOT / "docs/kernels-linear.md").read_text()
    for streams in (1, 8):
        rates = [RESULT["engine"][label]["decode"][str(streams)] for label in ("stock", "ours")]
        step_us = streams / rates[0] * 1e6
        predicted = step_us / (step_us - report.saved_us(RESULT, LAYERS, streams))
        assert f"| {streams} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[1] / rates[0]:.3f} | {predicted:.3f} |" in text


@pytest.mark.parametrize("row", RESULT["rows"][:3], ids=lambda row: f"M{row['M']}")
def test_table_cell_shows_time_and_ratio(row: dict[str, float]) -> None:
    best = report.served_us(row)
    assert f"{best:.1f} ({row['marlin_us'] / best:.2f})" in report.tables(RESULT)
