"""The file a benchmark leaves behind, its schema, and how it is read and written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ConfigDict, TypeAdapter

from qwen_nvfp4_serve.bench.files import read_record, write_whole
from qwen_nvfp4_serve.bench.machine import Machine
from qwen_nvfp4_serve.bench.samples import Failure
from qwen_nvfp4_serve.bench.statistics import Batch, Goodput, Metrics
from qwen_nvfp4_serve.bench.workload import Case, Workload

FORMAT: Final = "qwen-nvfp4-bench/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the server says of itself; None where it does not.

    cache: labels of vLLM's cache_config_info metric. kernels: lines of its log that name a kernel or a backend.
    ready_s: from the start to READY, by that log.
    plan: as `qwen-nvfp4 plan --json` prints it, as given to the benchmark.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    base_url: str
    model: str
    max_model_len: int | None
    vllm: str | None
    cache: dict[str, str] | None
    kernels: tuple[str, ...] | None
    ready_s: float | None
    plan: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case. cached_tokens: prompt tokens left in the prefix cache on purpose, not counted as prefilled."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    case: Case
    cached_tokens: int
    warmup_failures: tuple[Failure, ...]
    batches: tuple[Batch, ...]
    metrics: Metrics
    goodput: Goodput | None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Of the measured requests."""
        return tuple(sample.failure for batch in self.batches for sample in batch.samples if sample.failure is not None)

    @property
    def requests(self) -> int:
        """Measured requests, failed ones included."""
        return sum(len(batch.samples) for batch in self.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of the benchmark. complete: false when it was interrupted, and then `cases` lacks what was to come.

    nonce: what made the prompts unlike earlier ones. counted_by: how prompt lengths were found.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: Literal["qwen-nvfp4-bench/1"]
    complete: bool
    label: str
    started: str
    seconds: float
    project: str
    workload: Workload
    nonce: str
    counted_by: Literal["tokenize", "usage"]
    latency_ms: float
    server: ServerFacts
    machine: Machine
    cases: tuple[CaseResult, ...]

    @property
    def card(self) -> str:
        """The card's name as a heading needs it; the processor's where there is no card."""
        return self.machine.title

    def failure_counts(self) -> dict[str, int]:
        """Failed measured requests by kind."""
        return dict(Counter(failure.kind for case in self.cases for failure in case.failures))


_ADAPTER: TypeAdapter[Result] = TypeAdapter(Result)


def result_schema() -> dict[str, Any]:
    """JSON Schema of the file."""
    return _ADAPTER.json_schema()


def dump_result(result: Result) -> bytes:
    """The file's bytes; NaN and infinity never appear."""
    return _ADAPTER.dump_json(result, indent=1) + b"\n"


def write_result(path: Path, result: Result) -> None:
    """Writes the whole file or nothing."""
    write_whole(path, dump_result(result))


def read_result(path: Path) -> Result:
    """The result in a file, or in the `result.json` of a folder. Raises UsageError saying what is wrong with it."""
    return read_record(_ADAPTER, path / "result.json" if path.is_dir() else path, "qwen-nvfp4 bench")
