"""Long answers: texts that must not degenerate, and copies and counts that must be exact to the end."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from qwen_nvfp4_serve.quality.task import Exam, Prose, Task, Want, Words
from qwen_nvfp4_serve.quality.words import ADJECTIVES, CITIES, NOUNS

COPY_WORDS = (12, 20, 40, 60)
COUNT = 120
SUBJECTS = (
    "the tides of the sea",
    "the history of paper",
    "how bread is made",
    "how a bridge carries weight",
    "how a ship finds its way",
    "the life of bees",
    "how a clock keeps time",
    "the seasons of the year",
)
PROGRAMS = (
    "a card game for two players",
    "a parser for arithmetic expressions",
    "a small library of books with loans and returns",
    "a maze generator that prints the maze and its solution",
)


def long_tasks(exam: Exam) -> tuple[Task, ...]:
    """`exam.each` tasks of every kind."""
    return tuple(_task(exam, kind, number) for kind in KINDS for number in range(exam.each))


def _task(exam: Exam, kind: str, number: int) -> Task:
    name = f"long/{kind}/{number}"
    text, want = KINDS[kind](Random(f"{exam.seed}/{name}"), number)
    return Task(
        name=name,
        family="long",
        kind=kind,
        messages=({"role": "user", "content": text},),
        want=want,
        answer_tokens=exam.long_tokens,
    )


def _story(rng: Random, _: int) -> tuple[str, Want]:
    hero, other = rng.sample(NOUNS, 2)
    place, mood = rng.choice(CITIES).capitalize(), rng.choice(ADJECTIVES)
    return f"Write a long story about the {mood} {hero} and the {other} in {place}. Use at least 800 words.", Prose()


def _essay(rng: Random, number: int) -> tuple[str, Want]:
    subject, city = SUBJECTS[number % len(SUBJECTS)], rng.choice(CITIES).capitalize()
    return f"Explain {subject} in detail to a child in {city}, in at least 800 words, without lists.", Prose()


def _program(rng: Random, number: int) -> tuple[str, Want]:
    what, word = PROGRAMS[number % len(PROGRAMS)], rng.choice(NOUNS)
    return (
        f"Write a long Python program: {what}. Name its main class {word.capitalize()} and comment each part.",
        Prose(),
    )


def _copy(rng: Random, number: int) -> tuple[str, Want]:
    words = tuple(rng.sample(NOUNS, COPY_WORDS[number % len(COPY_WORDS)]))
    return f"repeat this: {' '.join(words)}", Words(words)


def _count(rng: Random, _: int) -> tuple[str, Want]:
    first = rng.randrange(1, 500)
    numbers = tuple(str(value) for value in range(first, first + COUNT))
    text = f"write all whole numbers from {first} to {numbers[-1]}, with a space between them and nothing else."
    return text, Words(numbers)


KINDS: dict[str, Callable[[Random, int], tuple[str, Want]]] = {
    "story": _story,
    "essay": _essay,
    "program": _program,
    "copy": _copy,
    "count": _count,
}
