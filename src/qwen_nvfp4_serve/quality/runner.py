"""The run itself: ask one question first, make the rest fit the server, ask them all, keep what came also when cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from qwen_nvfp4_serve import __version__
from qwen_nvfp4_serve.bench.client import Target, count_by_tokenize, count_by_usage, open_target
from qwen_nvfp4_serve.bench.machine import query_cards
from qwen_nvfp4_serve.bench.prompts import Prompt
from qwen_nvfp4_serve.bench.runner import Step
from qwen_nvfp4_serve.bench.subject import Subject, machine_of
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.quality import client, plan
from qwen_nvfp4_serve.quality.answer import Answer, Failure
from qwen_nvfp4_serve.quality.plan import Question
from qwen_nvfp4_serve.quality.result import FORMAT, Outcome, Result
from qwen_nvfp4_serve.quality.scoring import score
from qwen_nvfp4_serve.quality.task import Exam, Task

UNREACHABLE = ("no connection", "timeout", "dropped")
LEAST_UNREACHABLE = 8  # requests in a row without any answer, after which a server is taken for gone
REFUSED = (400, 422)  # a request that the server understands but does not take
NO_LOGPROBS = (
    "the server refuses logprobs: single tokens were not looked at, and runs and loops were looked for in words"
)
SMALL_MODEL = (
    "the model is a small one that comes with this package and is right only in phrasings that it learned: most of "
    "these it did not, so a low score says nothing against the server (docs/quality.md)"
)
INTERRUPTED = "it was interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that a run needs."""

    exam: Exam
    subject: Subject


@dataclass(slots=True)
class Notebook:
    """What a run has found so far, so that an end before its time loses only what is under way."""

    asked: int = 0
    silent: int = 0
    misses: int = 0
    stopped: str | None = None
    notes: list[str] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)


def run_quality(order: Order, observe: Callable[[Step], None]) -> Result:
    """Asks every question. After Ctrl-C, or when the server is gone, the result is what came until then.

    Raises QwenNvfp4Error when the server does not answer the first question.
    """
    started, began_s, before = datetime.now(UTC), time.perf_counter(), query_cards()
    notebook = Notebook()
    try:
        asyncio.run(_run(order, notebook, observe))
    except KeyboardInterrupt:
        notebook.stopped = INTERRUPTED
    outcomes = tuple(outcome for _, outcome in sorted(notebook.outcomes.items()))
    return Result(
        format=FORMAT,
        complete=notebook.stopped is None,
        stopped=notebook.stopped,
        label=order.subject.label,
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - began_s,
        project=__version__,
        exam=order.exam,
        asked=notebook.asked,
        notes=(*notebook.notes, *odd_thinking(outcomes), *((SMALL_MODEL,) if order.subject.reference else ())),
        server=order.subject.server,
        machine=machine_of(order.subject, before),
        outcomes=outcomes,
    )


def odd_thinking(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Sentences for a thinking switch that seems to do nothing."""
    notes = []
    answered = [one for one in outcomes if one.content or one.calls or one.reasoning]
    thoughts = {mode: [bool(one.reasoning) for one in answered if one.thinking == mode] for mode in ("off", "on")}
    if any(thoughts["off"]):
        notes.append(f"{sum(thoughts['off'])} answers thought although thinking was off")
    if thoughts["on"] and not any(thoughts["on"]):
        notes.append(
            "no answer came with thinking although it was on: the server may not know `enable_thinking`, or has no "
            "reasoning parser"
        )
    return tuple(notes)


async def _run(order: Order, notebook: Notebook, observe: Callable[[Step], None]) -> None:
    exam, server = order.exam, order.subject.server
    limit = server.max_model_len
    async with open_target(
        server.base_url,
        order.subject.api_key,
        model=server.model,
        endpoint="chat",
        streams=exam.concurrency,
        temperature=0.0,
        ignore_eos=False,
        timeout_s=exam.timeout_s,
    ) as target:
        observe(Step(0, 1, 0, "asking a first question"))
        logprobs = await _first_question(target, exam, notebook)
        notebook.notes += plan.left_out(exam, limit)
        observe(Step(0, 1, 0, "making needles as long as asked"))
        questions = (*await _needles(target, exam, limit), *plan.short_questions(exam, limit))
        notebook.asked = len(questions)
        if not questions:
            raise QwenNvfp4Error(f"nothing to ask: {'; '.join(notebook.notes)}", do="Give shorter --lengths.")
        await _ask_all(
            target,
            questions,
            concurrency=exam.concurrency,
            logprobs=logprobs,
            notebook=notebook,
            observe=observe,
        )


async def _first_question(target: Target, exam: Exam, notebook: Notebook) -> bool:
    """Whether the server gives probabilities. Raises QwenNvfp4Error when it does not answer a small request at all."""
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0.0, "max_tokens": 1}
    words = client.thinking_words(exam.thinking[0])
    wanted = "long" in exam.families
    seen = await client.ask(target, body | words | ({"logprobs": True} if wanted else {}))
    if wanted and isinstance(seen, Failure) and seen.status in REFUSED:
        seen, wanted = await client.ask(target, body | words), False
        notebook.notes.append(NO_LOGPROBS)
    if isinstance(seen, Answer):
        return wanted
    hints = {
        401: "Give the server's key: VLLM_API_KEY in the environment, or --api-key.",
        403: "Give a key that may use this model.",
        404: "Is there a chat endpoint below this --base-url, and does it know the --model?",
    }
    hint = hints.get(seen.status or 0)
    if seen.status in REFUSED and words:
        hint = "If it does not know chat_template_kwargs, add --thinking default."
    if seen.reason == "timeout":
        hint = "Is the server busy or hung? Else raise --timeout-s."
    raise QwenNvfp4Error(
        f"no answer to a small chat request at {target.base_url}",
        seen=seen.detail if seen.reason != "no connection" else f"no connection ({seen.detail})",
        expected="an OpenAI chat answer",
        do=hint,
    )


async def _needles(target: Target, exam: Exam, limit: int | None) -> tuple[Question, ...]:
    if "needle" not in exam.families:
        return ()
    cheap = await count_by_tokenize(target, Prompt(context="", prompt="hello")) is not None

    async def count(task: Task) -> int:
        prompt = Prompt(context="", prompt=str(task.messages[-1]["content"]))
        tokens = await count_by_tokenize(target, prompt) if cheap else None
        return await count_by_usage(target, prompt) if tokens is None else tokens

    return await plan.needle_questions(exam, limit, count, counts_are_cheap=cheap)


async def _ask_all(
    target: Target,
    questions: Sequence[Question],
    *,
    concurrency: int,
    logprobs: bool,
    notebook: Notebook,
    observe: Callable[[Step], None],
) -> None:
    """Workers take the questions in order; the next waits only for a free worker."""
    order = iter(enumerate(questions))
    workers = min(len(questions), concurrency)
    patience = max(LEAST_UNREACHABLE, 2 * workers)

    async def work() -> None:
        for index, question in order:
            if notebook.stopped:
                return
            observe(Step(len(notebook.outcomes), len(questions), notebook.misses, question.task.name))
            outcome = await _ask(target, question, logprobs=logprobs)
            notebook.outcomes[index] = outcome
            notebook.misses += not outcome.right
            unreachable = outcome.miss is not None and outcome.miss.reason in UNREACHABLE
            notebook.silent = notebook.silent + 1 if unreachable else 0
            if notebook.silent >= patience:
                notebook.stopped = f"the server did not answer {notebook.silent} requests in a row"

    await asyncio.gather(*(work() for _ in range(workers)))
    observe(Step(len(notebook.outcomes), len(questions), notebook.misses, "done"))


async def _ask(target: Target, question: Question, *, logprobs: bool) -> Outcome:
    task = question.task
    body = client.body_of(
        task, question.thinking, max_tokens=question.max_tokens, logprobs=logprobs and task.family == "long"
    )
    began_s = time.perf_counter()
    seen = await client.ask(target, body)
    answer = Answer() if isinstance(seen, Failure) else seen
    return Outcome(
        task=task.name,
        family=task.family,
        kind=task.kind,
        thinking=question.thinking,
        length=task.length,
        depth=task.depth,
        prompt=task.fingerprint,
        question=task.question,
        expected=str(task.want),
        miss=score(task.want, seen),
        content=answer.content,
        reasoning=answer.reasoning,
        calls=answer.calls,
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        max_tokens=question.max_tokens,
        seconds=time.perf_counter() - began_s,
    )
