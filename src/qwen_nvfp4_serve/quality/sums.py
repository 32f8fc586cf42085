"""Arithmetic with one number as the answer, from what a small model knows to what a large one may miss."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from qwen_nvfp4_serve.quality.task import Exam, Number, Task

ANSWER_TOKENS = 256


def sum_tasks(exam: Exam) -> tuple[Task, ...]:
    """`exam.each` tasks of every kind."""
    return tuple(_task(exam, kind, number) for kind in KINDS for number in range(exam.each))


def _task(exam: Exam, kind: str, number: int) -> Task:
    name = f"arithmetic/{kind}/{number}"
    text, value = KINDS[kind](Random(f"{exam.seed}/{name}"))
    question = f"what is {text}? reply with the number only."
    return Task(
        name=name,
        family="arithmetic",
        kind=kind,
        messages=({"role": "user", "content": question},),
        want=Number(value),
        answer_tokens=ANSWER_TOKENS,
    )


def _sum(rng: Random) -> tuple[str, int]:
    a, b = rng.randrange(10, 1000), rng.randrange(10, 1000)
    return f"{a} + {b}", a + b


def _difference(rng: Random) -> tuple[str, int]:
    a, b = rng.randrange(10, 1000), rng.randrange(10, 1000)
    return f"{a} - {b}", a - b


def _product(rng: Random) -> tuple[str, int]:
    a, b = rng.randrange(10, 1000), rng.randrange(2, 10)
    return f"{a} * {b}", a * b


def _large_sum(rng: Random) -> tuple[str, int]:
    a, b = rng.randrange(10_000, 10_000_000), rng.randrange(10_000, 10_000_000)
    return f"{a} + {b}", a + b


def _large_product(rng: Random) -> tuple[str, int]:
    a, b = rng.randrange(100, 1000), rng.randrange(11, 100)
    return f"{a} * {b}", a * b


def _chain(rng: Random) -> tuple[str, int]:
    a, b, c, d = rng.randrange(2, 100), rng.randrange(2, 100), rng.randrange(2, 13), rng.randrange(10, 1000)
    return f"({a} + {b}) * {c} - {d}", (a + b) * c - d


KINDS: dict[str, Callable[[Random], tuple[str, int]]] = {
    "sum": _sum,
    "difference": _difference,
    "product": _product,
    "large sum": _large_sum,
    "large product": _large_product,
    "chain": _chain,
}
