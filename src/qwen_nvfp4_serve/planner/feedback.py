"""After a start: the engine's log against the plan, and what the next plan learns from running out of memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qwen_nvfp4_serve.planner.result import Plan
from qwen_nvfp4_serve.units import GIB, MIB, gib

# A size that is off by less than this share of the card is as planned.
TOLERANCE_SHARE = 0.01
# What is kept back more after each start that ran out of memory, and at most in all.
STEP_SHARE, STEP_LEAST_BYTES, MOST_SHARE = 0.03, 512 * MIB, 0.25

# Lines of vLLM 0.33: v1/worker/gpu/model_runner.py, platforms/interface.py, v1/core/kv_cache_utils.py.
_SIZES = {
    "weights_bytes": re.compile(r"Model loading took ([\d.]+) GiB"),
    "graph_bytes": re.compile(r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB"),
    "pool_bytes": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
}
_BLOCK = re.compile(r"Setting attention block size to ([\d,]+) tokens")
_POOL = re.compile(r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|No available memory for the cache blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What one start logged, None where a line is missing. Sizes are rounded to 0.01 GiB by the engine itself."""

    weights_bytes: int | None = None
    graph_bytes: int | None = None
    pool_bytes: int | None = None
    block_size_tokens: int | None = None
    pool_tokens: int | None = None
    context: int | None = None
    concurrency: float | None = None
    out_of_memory: bool = False


def read_engine_log(lines: Iterable[str]) -> EngineFacts:
    """The facts in an engine's log; later lines win, since a second card says the same again."""
    found: dict[str, int | float | bool] = {}
    for line in lines:
        for name, pattern in _SIZES.items():
            if match := pattern.search(line):
                found[name] = round(float(match[1]) * GIB)
        if match := _BLOCK.search(line):
            found["block_size_tokens"] = _number(match[1])
        if match := _POOL.search(line):
            found |= {"pool_tokens": _number(match[1]), "context": _number(match[2]), "concurrency": float(match[3])}
        if _OUT_OF_MEMORY.search(line):
            found["out_of_memory"] = True
    return EngineFacts(**found)  # type: ignore[arg-type]


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def differences(planned: Plan, seen: EngineFacts, *, free_bytes: int | None = None) -> tuple[str, ...]:
    """Where a start differs from its plan, one sentence each; empty when all is as planned.

    free_bytes: free memory of the card after warm-up, None while nobody has looked. Weights, graphs and free memory may
    be off by 1 % of the card, block size and pool tokens by nothing.
    """
    gpu = planned.request.gpu
    tolerance = (gpu.usable_bytes if gpu else GIB) * TOLERANCE_SHARE
    parts = planned.bytes
    sizes = (
        ("weights", parts.weights + parts.embeddings + parts.vision + parts.mtp, seen.weights_bytes),
        ("CUDA graphs", parts.graphs, seen.graph_bytes),
        ("free memory after warm-up", parts.headroom, free_bytes),
    )
    counts = (
        ("block size", planned.block_size_tokens, seen.block_size_tokens),
        ("pool tokens", planned.pool_tokens if seen.context == planned.max_model_len else None, seen.pool_tokens),
    )
    off = [
        f"{what}: planned {gib(plan)}, actual {gib(actual)}"
        for what, plan, actual in sizes
        if plan is not None and actual is not None and abs(plan - actual) > tolerance
    ]
    off += [
        f"{what}: planned {plan:,}, actual {actual:,}"
        for what, plan, actual in counts
        if plan is not None and actual is not None and plan != actual
    ]
    return tuple(off)


def extra_after_out_of_memory(planned: Plan) -> int:
    """`extra_bytes` for the next plan after this one ran out of memory: one step more, up to a quarter of the card."""
    gpu = planned.request.gpu
    total = gpu.usable_bytes if gpu else 0
    step = max(STEP_LEAST_BYTES, round(total * STEP_SHARE))
    return min(planned.request.extra_bytes + step, max(planned.request.extra_bytes, round(total * MOST_SHARE)))


def read_extra(path: Path, key: str) -> int:
    """The extra bytes kept for `key` (model, card and settings) in a JSON file; 0 when there is none."""
    value = _stored(path).get(key, 0)
    return value if isinstance(value, int) and value >= 0 else 0


def write_extra(path: Path, key: str, extra_bytes: int) -> None:
    """Keep the extra bytes for `key`; the file is replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = path.with_suffix(".new")
    spare.write_text(json.dumps({**_stored(path), key: extra_bytes}))
    spare.replace(path)


def _stored(path: Path) -> Mapping[str, object]:
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
