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


@pytest.mark.parametrize("table", sweeps.TABLES, ids=lambda table: table.__name__)
def test_documentation_holds_the_tables_of_the_sweeps(table: Any) -> None:
    assert table(RESULT) in TEXT


def test_fence_text_is_of_the_sweep() -> None:
    cell = RESULT["tried"][sweeps.FENCE]["layers"]["27b/gate_up"]["48"]
    told = f"gate_up {cell['after the turn']['us']:.1f} us at 48 tokens, without the fence, which would be wrong, "
    assert told + f"{cell['without the fence']['us']:.1f}." in " ".join(TEXT.split())


def test_aims_text_is_of_the_record() -> None:
    rows = {
        (row["shape"].removeprefix("27b/"), row["M"]): row for row in RESULT["rows"] if row["shape"].startswith("27b")
    }
    gate_up, attn_qkv = rows["gate_up", 1], rows["attn_qkv", 1]
    text = " ".join(TEXT.split())
    assert (
        f"M=1: 60 % of a plain read, 1.25x Marlin | {gate_up['marlin_us'] / gate_up['ours_us']:.2f}x on gate_up" in text
    )
    behind = attn_qkv["marlin_behind_us"] / attn_qkv["ours_behind_us"]
    assert f"{attn_qkv['marlin_us'] / attn_qkv['ours_us']:.2f}x on attn_qkv (52 %), where it is {behind:.2f}x" in text
    attn_qkv = rows["attn_qkv", 8]
    behind = attn_qkv["marlin_behind_us"] / attn_qkv["ours_behind_us"]
    assert f"**{attn_qkv['marlin_us'] / attn_qkv['ours_us']:.2f}x** on attn_qkv, where it is {behind:.2f}x" in text
    four = ("gate_up", "down", "attn_qkv", "attn_o")
    slowest = min(
        four,
        key=lambda layer: min(rows[layer, m]["marlin_us"] / rows[layer, m]["ours_us"] for m in (16, 24, 32, 48, 64)),
    )
    assert slowest == "attn_o"
    last = rows["attn_o", 48]
    assert f"(attn_o at 48 tokens: {last['ours_us']:.1f} against {last['marlin_us']:.1f} us)" in text
    beyond = [rows[layer, 4096]["ours_us"] / rows[layer, 4096]["bf16_us"] for layer in four]
    assert max(beyond) < 1.09, "7 to 9 % on the four"
    assert min(beyond) > 1.065


def test_what_keeps_weights_longer_is_of_the_record() -> None:
    found, text = RESULT["tried"][sweeps.STEP], " ".join(TEXT.split())
    alone = found["kept_in_l2_alone_us"]
    assert f"slower alone (gate_up {alone['kept']:.1f} instead of {alone['served']:.1f} us at 8 tokens)" in text


def test_spread_of_a_launch_is_that_of_the_record() -> None:
    at = [RESULT["tried"][sweeps.LAUNCH]["quantiles"].index(share) for share in (0, 1)]
    spreads = []
    for launch in RESULT["tried"][sweeps.LAUNCH]["launches"]:
        first, last = (launch["sums_us"][place] for place in at)
        spreads.append(last / first - 1)
    assert min(spreads) > 0.14
    assert max(spreads) < 0.31
    assert "has its sums 15 to 30 % later than the first" in " ".join(TEXT.split())
