"""Exams for tests, and ways to spoil what the scripted endpoint answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.quality_stand_in import Json, Script, message_of, scripted

from qwen_nvfp4_serve.bench.subject import subject_of
from qwen_nvfp4_serve.quality.result import Result
from qwen_nvfp4_serve.quality.runner import Order, run_quality
from qwen_nvfp4_serve.quality.task import Exam
from qwen_nvfp4_serve.smoke import connect

SMALL = Exam(
    lengths=(512, 1024),
    depths=(0, 100),
    needles=1,
    each=1,
    think_tokens=512,
    long_tokens=256,
    concurrency=4,
    timeout_s=20.0,
)
SUMS = replace(SMALL, families=("arithmetic",), thinking=("off",))
LONG = replace(SMALL, families=("long",), thinking=("off",))
Spoil = Callable[[Json, Json], tuple[int, Json | bytes]]


def ask(script: Script, exam: Exam) -> Result:
    script.exam = exam
    script.__post_init__()
    with scripted(script) as url:
        return run_quality(Order(exam=exam, subject=subject_of(connect(url, "key"), label="x")), lambda _: None)


def reasons(result: Result) -> set[str | None]:
    return {outcome.miss.reason if outcome.miss else None for outcome in result.outcomes}


def text(content: str) -> Callable[[Json, Json], tuple[int, Json]]:
    """Spoils the content of every answer but the first, which is no question."""

    def spoil(body: Json, reply: Json) -> tuple[int, Json]:
        message_of(reply)["content"] = content
        return 200, reply

    return spoil


def answers(status: int, reply: Json | bytes) -> Spoil:
    """Spoils by answering the same whatever was asked; status 0 hangs up."""
    return lambda *_: (status, reply)


def but_the_first(spoil: Spoil) -> Any:
    def spoilt(body: Json, reply: Json) -> tuple[int, Json | bytes]:
        return (200, reply) if body["max_tokens"] == 1 else spoil(body, reply)

    return spoilt
