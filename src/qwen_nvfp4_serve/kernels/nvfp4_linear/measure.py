"""Measures the linear op on this machine's card, for docs/results: correctness against FP64, then time per call.

python -m qwen_nvfp4_serve.kernels.nvfp4_linear.measure OUT.json [--marlin LIBRARY] [--all-variants]
Times are medians of CUDA graph replays over enough copies of the weights that none is in the L2 cache: of calls one
after the other, and for few tokens also what a call adds behind a small kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qwen_nvfp4_serve.kernels import build, nvfp4, nvfp4_linear
from qwen_nvfp4_serve.kernels.graph_timing import Call, behind_us, graph_us, small_kernel
from qwen_nvfp4_serve.kernels.nvfp4_linear import binding, launch, reference, tiled
from qwen_nvfp4_serve.kernels.nvfp4_linear.marlin import SCALE_TILE, MarlinWeight
from qwen_nvfp4_serve.kernels.nvfp4_linear.shapes import SHAPES, LinearShape

CHECKED_TOKENS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 48, 64, 65, 128, 1000, 4096)
TIMED_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096)
BEHIND_TOKENS = 64  # up to so many, calls are timed behind a small kernel too
ROTATED_BYTES = 320 * 2**20  # several times the 50 to 126 MB of L2 on the cards in question
MAX_COPIES = 160
MANY_CALLS_TOKENS = 256
MANY_LAUNCHES_TOKENS = 512
CHECKED_ROWS = 32768  # of a large weight at a time, for the FP64 copies' sake


def random_weight(shape: LinearShape, seed: int = 0) -> nvfp4_linear.LinearWeight:
    """Random codes, random block scales from 2^-3 to 448, two shards of unequal global scale."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(seed)
    packed = torch.randint(0, 256, (shape.n, shape.k // 2), dtype=torch.uint8, device=device, generator=generator)
    bytes_ = torch.randint(32, 127, (shape.n, shape.k // 16), dtype=torch.uint8, device=device, generator=generator)
    cut = shape.n // 3 // 16 * 16
    scales = bytes_.view(torch.float8_e4m3fn)
    weight = nvfp4_linear.prepare_weight(packed, scales, (cut, shape.n - cut), (3.1e-5, 1.7e-4))
    torch.cuda.synchronize()  # the kernel reads weights before it waits for the work ahead of it
    return weight


def read_gbps(size_bytes: int = 1 << 30) -> float:
    """Gigabytes per second of a plain read kernel, the best over grid sizes."""
    library = build.load(build.READ_STREAM, build.find(build.READ_STREAM) or build.build(build.READ_STREAM))
    data = [torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda") for _ in range(2)]
    sink = torch.zeros(4, dtype=torch.int32, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def read(buffer: torch.Tensor, grid: int) -> Callable[[], object]:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (buffer, sink)]
        return lambda: library.read_stream(
            pointers[0],
            ctypes.c_int64(size_bytes),
            pointers[1],
            grid,
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    return max(
        size_bytes / graph_us([read(buffer, grid) for buffer in data]) / 1e3
        for grid in (processors * many for many in (4, 8, 16, 32))
    )


def check_shape(shape: LinearShape, variants: Sequence[int]) -> dict[int, float]:
    """For each M of CHECKED_TOKENS, the largest error as a fraction of what is allowed.

    Infinity for an element left unwritten or a call that does not repeat bit for bit. With `variants`, each that takes
    M tokens is checked too.
    """
    weight, x = random_weight(shape), _checked_activations(shape)
    outputs: list[tuple[int, torch.Tensor]] = []
    for m in CHECKED_TOKENS:
        outputs.append((m, nvfp4_linear.linear(x[:m], weight)))
        if not torch.equal(outputs[-1][1], nvfp4_linear.linear(x[:m], weight)):
            return {m: float("inf")}
        outputs += [(m, y) for v in variants if (y := run_variant(weight, x[:m], v)) is not None]
    return _worst(weight, x, outputs)


def check_tiled(shape: LinearShape) -> dict[int, float]:
    """The same of the tiled GEMM, for each M that it takes."""
    weight, x = random_weight(shape), _checked_activations(shape)
    outputs: list[tuple[int, torch.Tensor]] = []
    for m in (m for m in CHECKED_TOKENS if m <= tiled.MAX_TOKENS):
        outputs += [(m, run_tiled(weight, x[:m])) for _ in range(2)]
        if not torch.equal(outputs[-2][1], outputs[-1][1]):
            return {m: float("inf")}
    return _worst(weight, x, outputs)


def run_tiled(weight: nvfp4_linear.LinearWeight, x: torch.Tensor) -> torch.Tensor:
    """The output of the tiled GEMM, on poisoned memory."""
    y = torch.full((x.shape[0], weight.packed.shape[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
    tiled.linear(x, weight, y)
    return y


def _checked_activations(shape: LinearShape) -> torch.Tensor:
    return torch.randn(max(CHECKED_TOKENS), shape.k, device="cuda").bfloat16()


def _worst(
    weight: nvfp4_linear.LinearWeight, x: torch.Tensor, outputs: Sequence[tuple[int, torch.Tensor]]
) -> dict[int, float]:
    """The largest error of the outputs with each M, as a fraction of what is allowed."""
    n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
    worst = dict.fromkeys((m for m, _ in outputs), 0.0)
    block_scale = nvfp4.unswizzle_scales(weight.scales, n, k // 16)
    for first in range(0, n, CHECKED_ROWS):
        rows = slice(first, min(first + CHECKED_ROWS, n))
        scale = weight.row_scale[rows]
        dense = nvfp4.dequantize_nvfp4(weight.packed[rows], block_scale[rows], scale, dtype=torch.float64)
        expected = x.double() @ dense.T
        bound = reference.error_bound(x, dense, expected)
        for m, y in outputs:
            ratio = ((y[:, rows].double() - expected[:m]).abs() / bound[:m]).nan_to_num(nan=float("inf")).max().item()
            worst[m] = max(worst[m], ratio)
    return worst


def run_variant(weight: nvfp4_linear.LinearWeight, x: torch.Tensor, variant: int) -> torch.Tensor | None:
    """The output of one variant on poisoned memory, or None if it does not take this call."""
    row = binding.variants(binding.library())[variant]
    if not row.takes(x.shape[0], x.shape[1], torch.cuda.get_device_capability()):
        return None
    y = torch.full((x.shape[0], weight.packed.shape[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
    launch.small_m(x, weight.packed, weight.scales, weight.row_scale, None, y, variant=variant)
    return y


def time_shape(shape: LinearShape, marlin: bool, variants: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of times for every M of TIMED_TOKENS."""
    copies = min(max(2, -(-ROTATED_BYTES // shape.weight_bytes)), MAX_COPIES)
    first = random_weight(shape)
    weights = [first]
    for _ in range(copies - 1):
        weights.append(dataclasses.replace(first, packed=first.packed.clone(), scales=first.scales.clone()))
    repacked: list[MarlinWeight] = []
    if marlin and shape.n % SCALE_TILE == 0:
        repacked = [MarlinWeight.pack(w.packed, w.scales, w.shard_scales[0]) for w in weights]
    dense = [torch.randn(shape.n, shape.k, dtype=torch.bfloat16, device="cuda") for _ in range(min(copies, 4))]
    x = torch.randn(max(TIMED_TOKENS), shape.k, dtype=torch.bfloat16, device="cuda")
    rows = []
    for m in TIMED_TOKENS:
        tokens, calls = x[:m], copies * max(1, 16 // copies) if m <= MANY_CALLS_TOKENS else 2
        row: dict[str, Any] = {"shape": shape.name, "n": shape.n, "k": shape.k, "M": m}
        row |= times("ours", in_turn(weights, calls, partial(nvfp4_linear.linear, tokens)), m)
        row |= times("marlin", in_turn(repacked, calls if repacked else 0, partial(_marlin, tokens)), m)
        if m <= tiled.MAX_TOKENS and tiled.unavailable() is None:
            row["tiled_us"] = over(weights, calls, partial(_tiled, tokens, _output(weights, tokens)))
        row |= times("bf16", in_turn(dense, min(calls, 16), partial(_dense, tokens)), m)
        if m <= nvfp4_linear.KERNEL_TOKENS:
            row["ours_gbps"] = shape.weight_bytes / row["ours_us"] / 1e3
            row["variants_us"] = {v: _variant_us(v, weights, tokens, calls) for v in variants}
        elif variants:
            row["paths_us"] = _paths_us(weights, tokens, calls)
        rows.append(row)
    return rows


def in_turn(weights: Sequence[Any], calls: int, apply: Callable[[Any], object]) -> list[Call]:
    """Calls of `apply(weight)`, so many, going round `weights`."""
    return [partial(apply, weights[i % len(weights)]) for i in range(calls)]


def over(weights: Sequence[Any], calls: int, apply: Callable[[Any], object]) -> float:
    """Microseconds of one of them, one after the other."""
    return graph_us(in_turn(weights, calls, apply))


def times(name: str, calls: Sequence[Call], m: int) -> dict[str, float | None]:
    """`name`_us, one after the other; up to BEHIND_TOKENS tokens also `name`_behind_us. None without calls."""
    found = {f"{name}_us": graph_us(calls) if calls else None}
    if m <= BEHIND_TOKENS:
        found[f"{name}_behind_us"] = behind_us(calls) if calls else None
    return found


def _marlin(x: torch.Tensor, weight: MarlinWeight) -> torch.Tensor:
    return weight(x)


def _tiled(x: torch.Tensor, y: torch.Tensor, weight: nvfp4_linear.LinearWeight) -> None:
    tiled.linear(x, weight, y)


def _output(weights: Sequence[nvfp4_linear.LinearWeight], x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0], weights[0].packed.shape[0], dtype=torch.bfloat16, device="cuda")


def _dense(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return x @ weight.T


def _variant_us(
    variant: int, weights: Sequence[nvfp4_linear.LinearWeight], x: torch.Tensor, calls: int
) -> float | None:
    if run_variant(weights[0], x, variant) is None:
        return None
    y = _output(weights, x)

    def apply(w: nvfp4_linear.LinearWeight) -> None:
        launch.small_m(x, w.packed, w.scales, w.row_scale, None, y, variant=variant)

    return over(weights, calls, apply)


def _paths_us(weights: Sequence[nvfp4_linear.LinearWeight], x: torch.Tensor, calls: int) -> dict[str, float]:
    """Ways to serve many tokens: launches of the small-M kernel, the dequantized GEMM by workspace size in MiB."""
    y = _output(weights, x)

    def launches(w: nvfp4_linear.LinearWeight) -> None:
        for first in range(0, x.shape[0], nvfp4_linear.KERNEL_TOKENS):
            part = slice(first, first + nvfp4_linear.KERNEL_TOKENS)
            launch.small_m(x[part], w.packed, w.scales, w.row_scale, None, y[part])

    def dequantized(w: nvfp4_linear.LinearWeight) -> None:
        shards = list(zip(w.shard_rows, w.shard_scales, strict=True))
        launch.large_m(x, w.packed, w.scales, None, shards, y)

    result = {"launches": over(weights, calls, launches)} if x.shape[0] <= MANY_LAUNCHES_TOKENS else {}
    bound = launch.DEQUANTIZED_BYTES
    for mib in (64, 128, 256):
        launch.DEQUANTIZED_BYTES = mib * 2**20
        launch._dequantized.clear()
        result[f"dequantized {mib}"] = over(weights, calls, dequantized)
    launch.DEQUANTIZED_BYTES = bound
    launch._dequantized.clear()
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes OUT.json after every shape, so that a cut run leaves what it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--marlin", type=Path, help="vLLM's _C_stable_libtorch, to compare with its Marlin kernel")
    parser.add_argument("--vllm", help="its version, for the record")
    parser.add_argument("--commit", help="of this project, for the record")
    parser.add_argument("--all-variants", action="store_true", help="also time each compiled variant")
    parser.add_argument("--shapes", nargs="+", help="only these")
    chosen = parser.parse_args(arguments)
    if chosen.marlin:
        torch.ops.load_library(str(chosen.marlin))
    table = binding.variants(binding.library())
    variants = range(len(table)) if chosen.all_variants else ()
    shapes = [s for s in SHAPES if not chosen.shapes or s.name in chosen.shapes]
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "commit": chosen.commit,
        "torch": torch.__version__,
        "vllm": chosen.vllm,
        "read_gbps": read_gbps(),
        "variants": [{field[0]: getattr(row, field[0]) for field in row._fields_} for row in table],
        "rows": [],
    }
    if small_kernel() is None:
        print("no times behind a small kernel: it was not built for this card (scripts/build-kernels)")
    began = time.monotonic()
    for shape in shapes:
        worst = check_shape(shape, variants)
        if tiled.unavailable() is None:
            result.setdefault("tiled_checked", {})[shape.name] = check_tiled(shape)
        for row in time_shape(shape, chosen.marlin is not None, variants):
            result["rows"].append({**row, "max_err": worst.get(row["M"])})
        result.setdefault("checked", {})[shape.name] = worst
        chosen.out.write_text(json.dumps(result, indent=1))
        print(
            f"{time.monotonic() - began:6.1f} s  {shape.name}  worst {max(worst.values()):.3f} of the bound", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
