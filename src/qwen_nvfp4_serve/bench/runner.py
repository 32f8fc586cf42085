"""The benchmark itself: calibrate, warm up, send batches, and keep what was seen, also when it is interrupted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from qwen_nvfp4_serve import __version__
from qwen_nvfp4_serve.bench import client
from qwen_nvfp4_serve.bench.client import Target
from qwen_nvfp4_serve.bench.machine import query_cards
from qwen_nvfp4_serve.bench.prompts import LEAD, Prompt, Vocabulary, learn_vocabulary
from qwen_nvfp4_serve.bench.result import FORMAT, CaseResult, Result
from qwen_nvfp4_serve.bench.samples import Failure, read_exchange
from qwen_nvfp4_serve.bench.statistics import Batch, came_at_once, goodput, measure, peak
from qwen_nvfp4_serve.bench.subject import Subject, machine_of
from qwen_nvfp4_serve.bench.workload import Case, Workload, cases

CountedBy = Literal["tokenize", "usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that a run needs. nonce: see Result."""

    workload: Workload
    subject: Subject
    nonce: str


@dataclass(frozen=True, slots=True)
class Step:
    """Progress: `done` of `total` batches are over, `failures` requests failed so far, `doing` is under way."""

    done: int
    total: int
    failures: int
    doing: str


@dataclass(slots=True)
class Notebook:
    """What a run has found so far, so that an interruption loses only the case under way."""

    latency_s: float = 0.0
    counted_by: CountedBy = "usage"
    done: int = 0
    failures: int = 0
    cases: tuple[CaseResult, ...] = ()


def run_bench(order: Order, observe: Callable[[Step], None]) -> Result:
    """Runs every case. After Ctrl-C the result holds the finished cases and `complete` is false.

    Raises QwenNvfp4Error when the server does not answer the questions that come before the first case.
    """
    started, began_s, before = datetime.now(UTC), time.perf_counter(), query_cards()
    notebook = Notebook()
    complete = True
    try:
        asyncio.run(_run(order, notebook, observe))
    except KeyboardInterrupt:
        complete = False
    return Result(
        format=FORMAT,
        complete=complete,
        label=order.subject.label,
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - began_s,
        project=__version__,
        workload=order.workload,
        nonce=order.nonce,
        counted_by=notebook.counted_by,
        latency_ms=1000.0 * notebook.latency_s,
        server=order.subject.server,
        machine=machine_of(order.subject, before),
        cases=notebook.cases,
    )


async def _run(order: Order, notebook: Notebook, observe: Callable[[Step], None]) -> None:
    workload, server = order.workload, order.subject.server
    async with client.open_target(
        server.base_url,
        order.subject.api_key,
        model=server.model,
        endpoint=workload.endpoint,
        streams=max(workload.concurrencies),
        temperature=workload.temperature,
        ignore_eos=workload.ignore_eos,
        timeout_s=workload.timeout_s,
    ) as target:
        observe(Step(0, total_batches(workload), 0, "calibrating prompt lengths"))
        vocabulary, notebook.counted_by = await _calibrate(target)
        notebook.latency_s = await client.measure_latency(target, workload.latency_mode)
        for case in cases(workload):
            notebook.cases += await _Session(order, target, vocabulary, notebook, observe).run(case)


def total_batches(workload: Workload) -> int:
    """How many batches a run sends, warm-up and context loads included."""
    each = workload.warmup_runs + workload.runs
    return sum(each * (2 if workload.cached_context and case.depth else 1) for case in cases(workload))


async def _calibrate(target: Target) -> tuple[Vocabulary, CountedBy]:
    """Word costs by /tokenize when it agrees with the usage of a real request, else by usage."""
    probe = Prompt(context="", prompt=f"{LEAD} day night river")
    by_usage = await client.count_by_usage(target, probe)
    if await client.count_by_tokenize(target, probe) != by_usage:
        return await learn_vocabulary(lambda prompt: client.count_by_usage(target, prompt)), "usage"

    async def count(prompt: Prompt) -> int:
        tokens = await client.count_by_tokenize(target, prompt)
        return await client.count_by_usage(target, prompt) if tokens is None else tokens

    return await learn_vocabulary(count), "tokenize"


@dataclass(frozen=True, slots=True)
class _Session:
    order: Order
    target: Target
    vocabulary: Vocabulary
    notebook: Notebook
    observe: Callable[[Step], None]

    async def run(self, case: Case) -> tuple[CaseResult, ...]:
        """The case's result, after that of its context load where there is one."""
        workload = self.order.workload
        loads = workload.cached_context and case.depth > 0
        warm: list[Failure] = []
        load_warm: list[Failure] = []
        batches: list[Batch] = []
        load_batches: list[Batch] = []
        for run in range(-workload.warmup_runs, workload.runs):
            prompts = [self._prompt(case, run, stream) for stream in range(case.concurrency)]
            if loads:
                contexts = [replace(prompt, prompt="\n" + LEAD) for prompt in prompts]
                self._keep(run, await self._batch(case, run, contexts, "context"), load_warm, load_batches)
            self._keep(run, await self._batch(case, run, prompts, "request"), warm, batches)
        result = self._result(case, warm, batches, cached_tokens=case.depth if loads else 0)
        if not loads:
            return (result,)
        return (self._result(replace(case, phase="context"), load_warm, load_batches, cached_tokens=0), result)

    def _prompt(self, case: Case, run: int, stream: int) -> Prompt:
        reuse = self.order.workload.reuse_prompts
        seed = f"{self.order.workload.seed}/{case.depth}/{case.prompt}/{0 if reuse else run}/{stream}"
        fresh = None if reuse else f"{self.order.nonce}/{case}/{run}/{stream}"
        return self.vocabulary.prompt(case.depth, case.prompt, seed=seed, fresh=fresh)

    async def _batch(self, case: Case, run: int, prompts: Sequence[Prompt], phase: str) -> Batch:
        what = "warm-up" if run < 0 else f"run {run + 1}"
        doing = f"{case.prefill} {case.decode.split(' ')[0]}, {what}{', context' if phase == 'context' else ''}"
        notebook, total = self.notebook, total_batches(self.order.workload)
        self.observe(Step(notebook.done, total, notebook.failures, doing))
        batch = await send_batch(self.target, prompts, case.generate)
        notebook.done += 1
        notebook.failures += sum(sample.failure is not None for sample in batch.samples)
        self.observe(Step(notebook.done, total, notebook.failures, doing))
        return batch

    def _keep(self, run: int, batch: Batch, warm: list[Failure], batches: list[Batch]) -> None:
        if run < 0:
            warm += [sample.failure for sample in batch.samples if sample.failure is not None]
        else:
            batches.append(batch)

    def _result(self, case: Case, warm: list[Failure], batches: list[Batch], *, cached_tokens: int) -> CaseResult:
        return CaseResult(
            case=case,
            cached_tokens=cached_tokens,
            warmup_failures=tuple(warm),
            batches=tuple(batches),
            metrics=measure(case, batches, latency_s=self.notebook.latency_s, cached_tokens=cached_tokens),
            goodput=goodput(self.order.workload, batches),
        )


async def send_batch(target: Target, prompts: Sequence[Prompt], max_tokens: int) -> Batch:
    """Sends all prompts at the same moment and returns when the last answer is over."""
    began_s = time.perf_counter()
    exchanges = await asyncio.gather(*(client.exchange(target, prompt, max_tokens) for prompt in prompts))
    read = [read_exchange(one, began_s) for one in exchanges]
    steady = [arrivals for sample, arrivals in read if sample.failure is None and not came_at_once(sample)]
    held_back = any(came_at_once(sample) for sample, _ in read)
    return Batch(
        samples=tuple(sample for sample, _ in read),
        peak_tokens_per_s=None if held_back else peak(arrival for arrivals in steady for arrival in arrivals),
        request_peaks_tokens_per_s=tuple(found for arrivals in steady if (found := peak(arrivals)) is not None),
    )
