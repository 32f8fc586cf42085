"""Times the grouped GEMM's tiles on this machine's card, and its steps one by one, for a short visit to a card.

python -m qwen_nvfp4_serve.kernels.nvfp4_moe.large_m_measure OUT.json [--shape 35b] [--tokens 256 …] [--seconds 120]

Each (M, tile) is the median of CUDA graph replays over elections of their own. What no time was left for is missing.
The file: {card, torch, triton, shape, tiles: [{rows, columns, warps, stages, tokens: {M: us}}], best: {M: index}}.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from qwen_nvfp4_serve.kernels.graph_timing import graph_us
from qwen_nvfp4_serve.kernels.nvfp4_moe import check, large_m
from qwen_nvfp4_serve.kernels.nvfp4_moe.large_m import Tile

TOKENS = (16, 64, 256, 1024, 4096, 8192)
ELECTIONS = 4
ROWS, COLUMNS, WARPS, STAGES = (16, 32, 64, 128), (64, 128), (4, 8), (3, 2, 4)


def tiles() -> Iterator[Tile]:
    """The ones in use first, then the others, the usual number of stages before the rest."""
    yield from large_m.TILES
    for stages, rows, columns, warps in itertools.product(STAGES, ROWS, COLUMNS, WARPS):
        tile = Tile(rows=rows, columns=columns, warps=warps, stages=stages)
        if tile not in large_m.TILES:
            yield tile


def time_tile(block: check.Block, tile: Tile, tokens: int) -> float | None:
    """Microseconds of one call; None where the tile does not fit the card."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, block.dims.hidden, device="cuda", generator=generator).bfloat16()
    calls = []
    for _ in range(ELECTIONS):
        share, ids = check.election("uniform", tokens, block.dims, generator)
        calls.append(partial(large_m.experts, x, block.experts, ids, share, tile=tile))
    try:
        return graph_us(calls)
    except Exception as error:  # Triton's own classes differ between its versions
        if "resource" not in str(error).lower():
            raise
        return None


def measure(block: check.Block, tokens: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """A row for each tile that time sufficed for."""
    deadline = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    for tile in tiles():
        # A tile far from the pairs of an expert is not worth its time.
        near = [
            m for m in tokens if tile.rows / 8 <= max(16, m * block.dims.top_k / block.dims.experts) <= tile.rows * 8
        ]
        times: dict[str, float] = {}
        for m in near:
            if time.monotonic() > deadline:
                return rows
            if (us := time_tile(block, tile, m)) is not None:
                times[str(m)] = round(us, 1)
        rows.append({**dataclasses.asdict(tile), "tokens": times})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def best(rows: Sequence[dict[str, Any]], tokens: Sequence[int]) -> dict[str, int]:
    """The index of the fastest tile for each M that was timed."""
    found = {}
    for m in map(str, tokens):
        able = [index for index, row in enumerate(rows) if m in row["tokens"]]
        if able:
            found[m] = min(able, key=lambda index: rows[index]["tokens"][m])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(prog="large-m-measure", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=list(check.SHAPES), default="35b")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=120.0)
    chosen = parser.parse_args(arguments)
    rows = measure(check.random_block(check.SHAPES[chosen.shape]), chosen.tokens, chosen.seconds)
    result = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "shape": chosen.shape,
        "tiles": rows,
        "best": best(rows, chosen.tokens),
    }
    chosen.out.write_text(json.dumps(result, indent=1))
    for m, index in result["best"].items():
        print(f"M={m}: {rows[index]['tokens'][m]} us with {rows[index]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
