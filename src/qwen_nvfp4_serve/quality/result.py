"""The file a quality run leaves behind, its schema, and how it is read and written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ConfigDict, TypeAdapter

from qwen_nvfp4_serve.bench.files import read_record, write_whole
from qwen_nvfp4_serve.bench.machine import Machine
from qwen_nvfp4_serve.bench.result import ServerFacts
from qwen_nvfp4_serve.quality.answer import RawCall
from qwen_nvfp4_serve.quality.scoring import Miss
from qwen_nvfp4_serve.quality.task import Exam, Family, Thinking

FORMAT: Final = "qwen-nvfp4-quality/1"
FILE: Final = "quality.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One question, what came back, and why it counts or not. miss: None for a right answer.

    task: the same question has the same name in every run. prompt: fingerprint, equal for equal requests.
    length, depth: of needles; tokens aimed at and percent. max_tokens: what the answer was allowed.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    task: str
    family: Family
    kind: str
    thinking: Thinking
    length: int | None
    depth: int | None
    prompt: str
    question: str
    expected: str
    miss: Miss | None
    content: str
    reasoning: str
    calls: tuple[RawCall, ...]
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    max_tokens: int
    seconds: float

    @property
    def right(self) -> bool:
        """Whether it counts."""
        return self.miss is None

    @property
    def said(self) -> tuple[str, str, tuple[RawCall, ...]]:
        """All that the model wrote."""
        return (self.content, self.reasoning, self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run. complete: false when it was interrupted or the server went away (`stopped` says so).

    asked: how many questions the run had. notes: what was left out or seems odd, in sentences.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: Literal["qwen-nvfp4-quality/1"]
    complete: bool
    stopped: str | None
    label: str
    started: str
    seconds: float
    project: str
    exam: Exam
    asked: int
    notes: tuple[str, ...]
    server: ServerFacts
    machine: Machine
    outcomes: tuple[Outcome, ...]

    @property
    def right(self) -> int:
        """Right answers."""
        return sum(outcome.right for outcome in self.outcomes)

    @property
    def percent(self) -> float | None:
        """Right answers of all questions that were asked; None without any."""
        return 100.0 * self.right / len(self.outcomes) if self.outcomes else None


_ADAPTER: TypeAdapter[Result] = TypeAdapter(Result)


def result_schema() -> dict[str, Any]:
    """JSON Schema of the file."""
    return _ADAPTER.json_schema()


def write_result(path: Path, result: Result) -> None:
    """Writes the whole file or nothing."""
    write_whole(path, _ADAPTER.dump_json(result, indent=1) + b"\n")


def read_result(path: Path) -> Result:
    """The result in a file, or in the `quality.json` of a folder. Raises UsageError saying what is wrong with it."""
    return read_record(_ADAPTER, path / FILE if path.is_dir() else path, "qwen-nvfp4 quality")
