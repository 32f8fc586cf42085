"""What a visit to a card leaves for the record, made up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.test_bench_engine import made, result

from qwen_nvfp4_serve.bench.engine import EngineResult, dump_engine
from qwen_nvfp4_serve.bench.record import (
    file_of,
    read_visit,
)
from qwen_nvfp4_serve.cli import main
from qwen_nvfp4_serve.gpus import GpuRow, find_gpu
from qwen_nvfp4_serve.units import GIB

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
H200 = find_gpu("h200")
DEPTH = 65_536


def part(label: str, rate: float) -> EngineResult:
    """What one engine of a visit leaves: its own configuration in a folder of the visit."""
    whole = result()
    run = replace(made(rate, label), options={"model": "/visit/35b", "kv_cache_dtype": "fp8"})
    return replace(whole, spec=replace(whole.spec, configurations={label: {"a": 1}}), runs=(run,))


def visit(folder: Path, size: str = "35b", **changed: Callable[[EngineResult], EngineResult]) -> Path:
    folder.mkdir(exist_ok=True)
    for label, rate in (("stock", 200.0), ("ours", 300.0)):
        found = changed.get(label, lambda same: same)(part(label, rate))
        (folder / f"engine-{size}-{label}.json").write_bytes(dump_engine(found))
    return folder


def take(seen: Path, folder: Path, card: GpuRow) -> tuple[Path, ...]:
    """Keeps what a visit found, without pages and charts."""
    kept = []
    for size, found in read_visit(seen, card).items():
        kept.append(file_of(folder, size, card))
        kept[-1].write_bytes(dump_engine(found))
    return tuple(kept)


def words(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def labelled(*labels: str) -> Callable[[EngineResult], EngineResult]:
    """The run of a file under other names than the file's."""

    def change(found: EngineResult) -> EngineResult:
        runs = tuple(replace(found.runs[0], label=label) for label in labels)
        return replace(found, runs=runs, spec=replace(found.spec, configurations={label: {} for label in labels}))

    return change


def started(found: EngineResult, *, side_by_side: bool) -> EngineResult:
    """The same with what it holds in memory and how long it took to start."""
    costs = {"model_bytes": 21 * GIB, "reserved_bytes": 30 * GIB, "cold": True, "restart_s": (71.0, 73.0)}
    return replace(found, runs=(replace(found.runs[0], side_by_side=side_by_side, **costs),))


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code of `qwen-nvfp4 bench record`."""
    monkeypatch.setattr("sys.argv", ["qwen-nvfp4", "bench", "record", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
