"""A code hidden in notes: does the model still find it at this length and depth."""

from __future__ import annotations

from random import Random

from qwen_nvfp4_serve.quality.task import Code, Exam, Task
from qwen_nvfp4_serve.quality.words import ADJECTIVES, NOUNS, VERBS

ANSWER_TOKENS = 128
LEAST_THINKING_TOKENS = 512  # with less room than this a miss would say nothing of the model
OTHER_CODES = 32  # notes like the one asked for, so that the form of the line alone does not give it away
ONE_CODE_IN = 8  # lines


def needle_task(exam: Exam, length: int, depth: int, number: int, lines: int) -> Task:
    """The task whose notes have `lines` lines, at least one. Fewer lines are otherwise the same notes."""
    name = f"needle/{length}/{depth}/{number}"
    rng = Random(f"{exam.seed}/{name}")
    key, code = _key(rng), str(rng.randrange(1000, 10000))
    notes = [_note(rng, index, (key, code)) for index in range(max(0, lines - 1))]
    notes.insert(round(depth * len(notes) / 100), _code_line(key, code))
    text = "here are some notes:\n" + "\n".join(notes) + f"\nwhat is the code for {key}?"
    return Task(
        name=name,
        family="needle",
        kind=f"{length:,}",
        messages=({"role": "user", "content": text},),
        want=Code(code),
        answer_tokens=ANSWER_TOKENS,
        length=length,
        depth=depth,
    )


def room_for_answer(exam: Exam, *, thinks: bool) -> int:
    """Tokens that must be free after the prompt for a needle to be worth asking."""
    return ANSWER_TOKENS + (min(LEAST_THINKING_TOKENS, exam.think_tokens) if thinks else 0)


def _note(rng: Random, index: int, taken: tuple[str, str]) -> str:
    if index % ONE_CODE_IN == ONE_CODE_IN - 1 and index < OTHER_CODES * ONE_CODE_IN:
        key, code = _key(rng), str(rng.randrange(1000, 10000))
        if key != taken[0] and code != taken[1]:
            return _code_line(key, code)
    first, second = rng.choice(ADJECTIVES), rng.choice(ADJECTIVES)
    return f"the {first} {rng.choice(NOUNS)} {rng.choice(VERBS)} the {second} {rng.choice(NOUNS)}."


def _code_line(key: str, code: str) -> str:
    return f"the code for {key} is {code}."


def _key(rng: Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
