"""Which questions a run asks of this server: what fits its context, and a sentence for what does not."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.quality.calls import call_tasks
from qwen_nvfp4_serve.quality.longs import long_tasks
from qwen_nvfp4_serve.quality.needles import needle_task, room_for_answer
from qwen_nvfp4_serve.quality.sums import sum_tasks
from qwen_nvfp4_serve.quality.task import Exam, Family, Task, Thinking

SHORT_PROMPT_TOKENS = 1024  # more than any task but a needle takes, tools included
FEW_LINES, MANY_LINES, SMALL_MANY_LINES = 4, 64, 16  # notes whose cost tells that of a line
SMALL_CONTEXT_TOKENS = 2048  # may not hold MANY_LINES
UNCHECKED_MARGIN = 0.03  # kept free where no count corrects the estimate
THINKING_MARGIN_TOKENS = 16  # a template's thinking marks, which the count may lack
TRIES = 8
Count = Callable[[Task], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Question:
    """A task in one thinking mode, and how many tokens its answer may take, thinking included."""

    task: Task
    thinking: Thinking
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lines:
    """What a needle's notes cost: tokens = base + each x lines."""

    base: float
    each: float

    def within(self, tokens: float) -> int:
        """The most lines that `tokens` allow, by this estimate; never more than one a token."""
        return max(1, min(math.floor(tokens), math.floor((tokens - self.base) / self.each)))


MAKERS: dict[Family, Callable[[Exam], tuple[Task, ...]]] = {
    "arithmetic": sum_tasks,
    "tools": call_tasks,
    "long": long_tasks,
}


def fitting_lengths(exam: Exam, thinking: Thinking, max_model_len: int | None) -> tuple[int, ...]:
    """The needle lengths that leave room for an answer; all of them where the limit is not known."""
    room = room_for_answer(exam, thinks=thinking != "off")
    return tuple(length for length in exam.lengths if max_model_len is None or length + room <= max_model_len)


def left_out(exam: Exam, max_model_len: int | None) -> tuple[str, ...]:
    """A sentence for each thinking mode in which needle lengths do not fit; none when every length does."""
    if "needle" not in exam.families:
        return ()
    notes = []
    for thinking in exam.thinking:
        fits = fitting_lengths(exam, thinking, max_model_len)
        beyond = [f"{length:,}" for length in exam.lengths if length not in fits]
        if beyond:
            room = room_for_answer(exam, thinks=thinking != "off")
            notes.append(
                f"needles of {', '.join(beyond)} tokens with thinking {thinking} were left out: with {room} tokens for "
                f"the answer they pass the server's limit of {max_model_len:,}"
            )
    return tuple(notes)


def short_questions(exam: Exam, max_model_len: int | None) -> tuple[Question, ...]:
    """Every question but needles: by family and kind, thinking modes beside each other."""
    cap = None if max_model_len is None else max_model_len - min(SHORT_PROMPT_TOKENS, max_model_len // 2)
    return tuple(
        _question(exam, task, thinking, cap)
        for family in exam.families
        if family in MAKERS
        for task in MAKERS[family](exam)
        for thinking in exam.thinking
    )


async def needle_questions(
    exam: Exam, max_model_len: int | None, count: Count, *, counts_are_cheap: bool
) -> tuple[Question, ...]:
    """Needles, each as long as asked by the server's own count, and never longer.

    count: prompt tokens of a task. counts_are_cheap: a count costs no prefill, so that every needle is counted;
    otherwise the length is estimated from two counts and falls short by about 3 %.
    Raises QwenNvfp4Error when counts do not grow with the text.
    """
    if not any(fitting_lengths(exam, thinking, max_model_len) for thinking in exam.thinking):
        return ()
    lines = await measure_lines(exam, max_model_len, count)
    questions = []
    for length in exam.lengths:
        modes = [mode for mode in exam.thinking if length in fitting_lengths(exam, mode, max_model_len)]
        cap = None if max_model_len is None else max_model_len - length
        for depth in exam.depths if modes else ():
            for number in range(exam.needles):
                task = await _fit(exam, (length, depth, number), lines, count if counts_are_cheap else None)
                questions += [_question(exam, task, thinking, cap) for thinking in modes]
    return tuple(questions)


async def measure_lines(exam: Exam, max_model_len: int | None, count: Count) -> Lines:
    """What a line of notes costs, from two counts."""
    is_small = max_model_len is not None and max_model_len < SMALL_CONTEXT_TOKENS
    few, many = FEW_LINES, SMALL_MANY_LINES if is_small else MANY_LINES
    low = await count(needle_task(exam, 0, 50, 0, few))
    high = await count(needle_task(exam, 0, 50, 0, many))
    if high <= low:
        seen = f"{low} tokens for {few} lines and {high} for {many}"
        raise QwenNvfp4Error("needles cannot be made as long as asked", seen=seen, expected="counts that grow")
    each = (high - low) / (many - few)
    return Lines(base=low - each * few, each=each)


async def _fit(exam: Exam, place: tuple[int, int, int], lines: Lines, count: Count | None) -> Task:
    """The longest task at (length, depth, number) that a few counts find; by the estimate alone without `count`."""
    aim = place[0] - THINKING_MARGIN_TOKENS
    if count is None:
        return needle_task(exam, *place, lines.within(aim * (1.0 - UNCHECKED_MARGIN)))
    many, best = lines.within(aim), 1
    for _ in range(TRIES):
        left = aim - await count(needle_task(exam, *place, many))
        best = max(best, many) if left >= 0 else best
        step = math.floor(left / lines.each)
        if step == 0 or many + step <= best:
            break
        many += step
    return needle_task(exam, *place, best)


def _question(exam: Exam, task: Task, thinking: Thinking, cap: int | None) -> Question:
    wanted = task.answer_tokens + (0 if thinking == "off" else exam.think_tokens)
    return Question(task, thinking, wanted if cap is None else min(wanted, cap))
