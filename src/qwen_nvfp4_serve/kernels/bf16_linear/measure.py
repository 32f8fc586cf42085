"""Errors and times of the BF16 kernel over the models' unquantized layers, beside the vendor's GEMM.

python -m qwen_nvfp4_serve.kernels.bf16_linear.measure OUT.json      (a minute on a card)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qwen_nvfp4_serve.kernels import bf16_linear
from qwen_nvfp4_serve.kernels.graph_timing import behind_us, graph_us
from qwen_nvfp4_serve.kernels.nvfp4_linear import reference
from qwen_nvfp4_serve.kernels.nvfp4_linear.measure import read_gbps

# Rows, columns and how many a step has of each layer that checkpoints of llm-compressor's kind leave in BF16. The delta
# net's two projections of its input are served as one, alone where the other is quantized.
LAYERS = {
    "35b/gdn_qkvz+ba": (12352, 2048, 30),
    "35b/gdn_qkvz": (12288, 2048, 0),
    "35b/gdn_ba": (64, 2048, 0),
    "35b/gdn_out": (2048, 4096, 30),
    "35b/lm_head": (248320, 2048, 1),
    "27b/gdn_qkvz+ba": (16480, 5120, 48),
    "27b/gdn_qkvz": (16384, 5120, 0),
    "27b/gdn_ba": (96, 5120, 0),
    "27b/gdn_out": (5120, 6144, 48),
    "27b/lm_head": (248320, 5120, 1),
}
TIMED_TOKENS = (1, 2, 4, 8, 16)
CHECKED_TOKENS = (1, 2, 3, 4, 7, 8, 9, 15, 16)
CHECKED_ROWS = 8192
ROTATED_BYTES, MAX_COPIES, MIN_CALLS = 512 * 2**20, 32, 16


def worst_error(weight: torch.Tensor, x: torch.Tensor) -> float:
    """The largest error over CHECKED_TOKENS as a share of what is allowed; infinite where two calls differ."""
    outputs = []
    for m in CHECKED_TOKENS:
        memory = torch.full((2, m, weight.shape[0]), float("nan"), dtype=torch.bfloat16, device=x.device)
        for y in memory:
            bf16_linear.small_m(x[:m], weight, None, y)
        if not torch.equal(*memory):
            return float("inf")
        outputs.append(memory[0])
    worst = 0.0
    for first in range(0, weight.shape[0], CHECKED_ROWS):
        rows = slice(first, first + CHECKED_ROWS)
        dense = weight[rows].double()
        expected = x.double() @ dense.T
        bound = reference.error_bound(x, dense, expected)
        for y in outputs:
            m = y.shape[0]
            error = (y[:, rows].double() - expected[:m]).abs() / bound[:m]
            worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))
    return worst


def measure_layer(name: str) -> list[dict[str, Any]]:
    """A row for each M."""
    n, k, layers = LAYERS[name]
    copies = min(max(2, -(-ROTATED_BYTES // (n * k * 2))), MAX_COPIES)
    weights = [torch.empty(n, k, dtype=torch.bfloat16, device="cuda").normal_(std=0.02) for _ in range(copies)]
    calls = [weights[i % copies] for i in range(max(copies, MIN_CALLS))]
    x = torch.randn(max(CHECKED_TOKENS), k, device="cuda").bfloat16()
    torch.cuda.synchronize()  # the kernel may read weights before the work ahead of it ends
    error, rows = worst_error(weights[0], x), []
    for m in TIMED_TOKENS:
        y = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        vendor = [partial(torch.mm, x[:m], w.T, out=y) for w in calls]
        ours = [partial(bf16_linear.small_m, x[:m], w, None, y) for w in calls]
        # The vendor's first: what a card does differently when it has just begun is not counted for us.
        vendor_us, ours_us = graph_us(vendor), graph_us(ours)
        row = {"shape": name, "n": n, "k": k, "layers": layers, "M": m, "ours_us": ours_us, "vendor_us": vendor_us}
        row |= {"ours_behind_us": behind_us(ours), "vendor_behind_us": behind_us(vendor)}
        rows.append({**row, "ours_gbps": n * k * 2 / ours_us / 1e3, "max_err": error})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and writes OUT after every layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="of this project, for the record")
    chosen = parser.parse_args(arguments)
    found: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "commit": chosen.commit,
        "torch": torch.__version__,
        "read_gbps": read_gbps(),
        "rows": [],
    }
    for name in LAYERS:
        found["rows"] += measure_layer(name)
        chosen.out.write_text(json.dumps(found, indent=1))
        last = found["rows"][-len(TIMED_TOKENS) :]
        times = " ".join(f"{row['ours_us']:.1f}/{row['vendor_us']:.1f}" for row in last)
        print(f"{name}: ours/vendor us at M = 1, 2, 4, 8, 16: {times}, error {last[0]['max_err']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    main()
