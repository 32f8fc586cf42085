"""Tables of docs/kernels*.md that are written by hand, against the measurements that they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.kernels.nvfp4_moe import large_m

ROOT = Path(__file__).parents[2]
TEXT = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("kernels*.md")))


def record(name: str) -> Any:
    return json.loads((ROOT / "docs" / "results" / f"{name}-h200.json").read_text())


@pytest.mark.parametrize(
    ("title", "field", "form"),
    [
        ("whole block, router to final sum", "ours_us", "{:.1f}"),
        ("vLLM's own block, with Marlin", "stock_us", "{:.1f}"),
        ("routed experts alone", "experts_us", "{:.1f}"),
        ("the same with Marlin", "stock_experts_us", "{:.1f}"),
        ("router and election alone", "router_us", "{:.1f}"),
    ],
)
def test_block_times_are_those_of_the_record(title: str, field: str, form: str) -> None:
    cells = " | ".join(form.format(row[field]) for row in record("moe")["block"])
    assert f"| {title} | {cells} |" in TEXT


def test_dealing_times_are_those_of_the_record() -> None:
    deal = record("moe")["deal"]
    at = [deal["cases"].index(f"uniform {tokens}") for tokens in (16, 64, 512, 2048, 2731, 8192)]
    form = f"b {large_m.PAIRS_IN_CHUNK}/{large_m.LINES_IN_STEP}/{large_m.DEALING_WARPS} blocks{large_m.BLOCKS_IN_STEP}"
    for title, name in (("by one program an expert", "one program an expert"), ("in two phases", form)):
        cells = " | ".join(f"{deal['us'][name][place]:.1f}" for place in at)
        assert f"| dealt {title} | {cells} |" in TEXT


@pytest.mark.parametrize(
    ("title", "sizes", "tiles"),
    [
        ("three of 2,731", (2731, 2731, 2731), None),
        ("two of 3,449, one of 1,294", (3449, 3449, 1294), None),
        ("the same, 128 x 128 in the full ones", (3449, 3449, 1294), ("128x128", "128x128", "64x64")),
    ],
)
def test_rounds_times_are_those_of_the_record_with_the_tiles_in_use(
    title: str, sizes: tuple[int, ...], tiles: tuple[str, ...] | None
) -> None:
    assert max(sizes) <= large_m.tokens_in_round(8, 2048, 512)
    chosen = [large_m.tile_for(size * 8 / 256, large_m.TILES) for size in sizes]
    names = tiles or [f"{one.rows}x{one.columns}" for one in chosen]
    sums = [
        sum(times[str(size)][name] for size, name in zip(sizes, names, strict=True))
        for times in map(record("moe")["rounds"].get, ("uniform", "liked"))
    ]
    assert f"| {title} | {' | '.join(f'{us:,.0f}' for us in sums)} |" in TEXT


@pytest.mark.parametrize("model", ["35b", "27b"])
def test_delta_net_times_are_those_of_the_record(model: str) -> None:
    rows = sorted((row for row in record("gdn")["times_us"] if row["model"] == model), key=lambda row: row["tokens"])
    assert [row["tokens"] for row in rows] == [1, 2, 8, 32]
    cells = " | ".join(f"{row['spaced vllm']:.1f}, {row['spaced ours32']:.1f}" for row in rows)
    assert f"| {model.upper()}: vLLM's two launches, ours | {cells} |" in TEXT


def test_other_ways_of_the_linear_kernel_are_those_of_the_record() -> None:
    one, eight = record("linear")["tried"]["parts by words, weights through shared memory"]["rows"]
    for title, row in (("gate_up, one token", one), ("down, eight tokens", eight)):
        ring = f"{row['ring'][0]:.1f} to {row['ring'][-1]:.1f}"
        cells = (row["before_there"], row["words"], "", row["before"], ring, row["now"])
        assert f"| {title} | {' | '.join(str(cell) for cell in cells).replace('|  |', '| |')} |" in TEXT
