"""The questions: the same for the same seed, right by construction, as long as asked, and what does not fit is said."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.quality_stand_in import count

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.quality.needles import needle_task, room_for_answer
from qwen_nvfp4_serve.quality.plan import (
    THINKING_MARGIN_TOKENS,
    fitting_lengths,
    left_out,
    needle_questions,
    short_questions,
)
from qwen_nvfp4_serve.quality.sums import sum_tasks
from qwen_nvfp4_serve.quality.task import FULL, QUICK, Calls, Code, Exam, Number, Says, Task, Words, check_exam

LM_EVAL = Path(__file__).resolve().parent.parent / "docs" / "lm-eval"


async def count_task(task: Task) -> int:
    return count(list(task.messages))


def all_tasks(exam: Exam) -> list[Task]:
    return [question.task for question in short_questions(exam, None)]


def test_short_questions_same_seed_same_questions_other_seed_others() -> None:
    prints = [task.fingerprint for task in all_tasks(FULL)]
    assert prints == [task.fingerprint for task in all_tasks(FULL)]
    others = [task.fingerprint for task in all_tasks(replace(FULL, seed=1))]
    assert sum(one == other for one, other in zip(prints, others, strict=True)) < len(prints) / 20


def test_short_questions_fewer_of_each_are_among_the_more() -> None:
    many = {task.name: task.fingerprint for task in all_tasks(FULL)}
    few = {task.name: task.fingerprint for task in all_tasks(QUICK)}
    assert few.items() <= many.items()
    assert len(few) < len(many)


def test_short_questions_name_and_thinking_are_unique() -> None:
    questions = short_questions(FULL, None)
    assert len({(question.task.name, question.thinking) for question in questions}) == len(questions)


def test_arithmetic_answers_are_what_python_computes() -> None:
    sums = [task for task in all_tasks(FULL) if task.family == "arithmetic"]
    assert len({task.kind for task in sums}) == 6
    for task in sums:
        text = re.fullmatch(r"what is ([\d+\-*() ]+)\? reply with the number only\.", task.question)
        assert text
        assert task.want == Number(eval(text.group(1)))


def test_tool_tasks_ask_for_what_they_want_from_tools_they_offer() -> None:
    calls = [task for task in all_tasks(FULL) if task.family == "tools"]
    assert len({task.kind for task in calls}) == 7
    for task in calls:
        asked = str(task.messages[0]["content"])
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}
        if isinstance(task.want, Says):
            assert task.kind in ("result", "none")
            continue
        assert isinstance(task.want, Calls)
        for call in task.want.calls:
            assert call.name in asked
            assert set(offered[call.name]["required"]) == set(call.arguments)
            for name, value in call.arguments.items():
                spoken = str(value).lower() if isinstance(value, bool) else str(value)
                assert isinstance(value, dict | list) or spoken in asked, (name, value)


def test_long_tasks_exact_ones_say_what_they_want() -> None:
    for task in all_tasks(FULL):
        if task.kind == "copy":
            assert isinstance(task.want, Words)
            assert task.question == f"repeat this: {task.want}"
        if task.kind == "count":
            assert isinstance(task.want, Words)
            assert f"from {task.want.words[0]} to {task.want.words[-1]}," in task.question
            assert len(task.want.words) == 120


@pytest.mark.parametrize("depth", [0, 10, 50, 100])
def test_needle_stands_at_its_depth_once(depth: int) -> None:
    task = needle_task(FULL, 4096, depth, 0, 401)
    assert isinstance(task.want, Code)
    lines = str(task.messages[0]["content"]).splitlines()
    key = re.fullmatch(r"what is the code for (.+)\?", lines[-1])
    assert key
    found = [place for place, line in enumerate(lines[1:-1]) if line.startswith(f"the code for {key.group(1)} is")]
    assert found == [depth * 4]
    assert sum(task.want.code in line for line in lines) == 1
    assert sum("the code for" in line for line in lines) == 34  # the needle, 32 like it, the question


def test_needle_of_fewer_lines_has_the_same_notes() -> None:
    short, long = (str(needle_task(FULL, 4096, 100, 0, lines).messages[0]["content"]) for lines in (50, 60))
    assert long.startswith(short[: short.rindex("the code for", 0, short.rindex("\n"))])


@pytest.mark.parametrize("length", [256, 1024, 5000])
@pytest.mark.parametrize("cheap", [True, False])
def test_needle_questions_are_as_long_as_asked_and_never_longer(length: int, cheap: bool) -> None:
    exam = replace(QUICK, lengths=(length,), needles=2)
    questions = asyncio.run(needle_questions(exam, None, count_task, counts_are_cheap=cheap))
    assert len(questions) == 3 * 2 * 2
    for question in questions:
        tokens = count(list(question.task.messages))
        assert tokens <= length - THINKING_MARGIN_TOKENS
        assert tokens > (length - THINKING_MARGIN_TOKENS) * (0.97 if cheap else 0.90) - 10


def test_needle_questions_allow_what_the_context_leaves() -> None:
    exam = replace(QUICK, lengths=(1024,), depths=(50,))
    off, on = asyncio.run(needle_questions(exam, 2000, count_task, counts_are_cheap=True))
    assert (off.thinking, off.max_tokens) == ("off", 128)
    assert (on.thinking, on.max_tokens) == ("on", 2000 - 1024)


def test_needle_questions_none_fits_asks_nothing_of_the_server() -> None:
    async def never(task: Task) -> int:
        raise AssertionError

    assert asyncio.run(needle_questions(QUICK, 1000, never, counts_are_cheap=True)) == ()


def test_needle_questions_counts_that_do_not_grow_are_refused() -> None:
    async def same(task: Task) -> int:
        return 7

    with pytest.raises(QwenNvfp4Error, match="counts that grow"):
        asyncio.run(needle_questions(QUICK, None, same, counts_are_cheap=True))


def test_needle_questions_counts_that_hardly_grow_stay_bounded() -> None:
    async def slow(task: Task) -> int:
        return 1 + len(str(task.messages[0]["content"]).splitlines()) // 60

    questions = asyncio.run(needle_questions(QUICK, None, slow, counts_are_cheap=False))
    assert max(len(str(question.task.messages[0]["content"]).splitlines()) for question in questions) <= 4096 + 2


def test_left_out_names_lengths_mode_and_limit() -> None:
    exam = replace(FULL, lengths=(1024, 3968, 4096))
    assert room_for_answer(exam, thinks=False) == 128
    assert fitting_lengths(exam, "off", 4096) == (1024, 3968)
    assert fitting_lengths(exam, "on", 4096) == (1024,)
    off, on = left_out(exam, 4096)
    assert "4,096 tokens with thinking off" in off
    assert "3,968, 4,096 tokens with thinking on" in on
    assert "limit of 4,096" in on
    assert left_out(exam, None) == ()
    assert left_out(replace(exam, families=("tools",)), 512) == ()


def test_short_questions_never_ask_for_more_than_the_context() -> None:
    assert max(question.max_tokens for question in short_questions(FULL, 4096)) <= 4096 - 1024
    assert max(question.max_tokens for question in short_questions(FULL, 512)) == 256
    assert max(question.max_tokens for question in short_questions(FULL, None)) == 4096 + 1024


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("--families", {"families": ("needles",)}),
        ("--families", {"families": ("",)}),
        ("--thinking", {"thinking": ("on", "on")}),
        ("--lengths", {"lengths": (255,)}),
        ("--lengths", {"lengths": (1024, 1024)}),
        ("--lengths", {"lengths": ()}),
        ("--depths", {"depths": (-1,)}),
        ("--depths", {"depths": (101,)}),
        ("--needles", {"needles": 0}),
        ("--each", {"each": 0}),
        ("--each", {"each": 10**9}),
        ("--think-tokens", {"think_tokens": -1}),
        ("--long-tokens", {"long_tokens": 0}),
        ("--concurrency", {"concurrency": 0}),
        ("--seed", {"seed": -1}),
        ("--timeout-s", {"timeout_s": 0.0}),
        ("--timeout-s", {"timeout_s": float("nan")}),
    ],
)
def test_check_exam_names_the_wrong_option(option: str, change: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=option):
        check_exam(replace(FULL, **change))  # type: ignore[arg-type]


def test_lm_eval_task_holds_the_first_sums_and_differences() -> None:
    tasks = [task for task in sum_tasks(replace(FULL, each=20)) if task.kind in ("sum", "difference")]
    lines = [json.loads(line) for line in (LM_EVAL / "sums.jsonl").read_text().splitlines()]
    assert lines == [{"question": task.question, "answer": str(task.want)} for task in tasks]
    assert "test: sums.jsonl" in (LM_EVAL / "qwen_nvfp4_sums.yaml").read_text()


def test_check_exam_defaults_are_right() -> None:
    check_exam(FULL)
    check_exam(QUICK)
