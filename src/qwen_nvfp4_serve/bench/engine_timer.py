"""What is asked of one engine, and how long it takes: answers, and the kernels of its steps.

vLLM is loaded by name: nothing else in this package imports it.
"""

from __future__ import annotations

import time
from importlib import import_module
from random import Random
from typing import Any

from qwen_nvfp4_serve.bench.engine import DepthRates, EngineSpec, Kernel

MAX_KERNELS = 80


class Timer:
    """Times whole answers; each prompt is new, so that no cache answers.

    prefill_steps: measurement -> in how many steps the streams of each of its runs began, for several streams.
    """

    def __init__(self, engine: Any, spec: EngineSpec):
        self.engine, self.spec, self.sent = engine, spec, 0
        self.prefill_steps: dict[str, tuple[int, ...]] = {}

    def seconds(self, tokens: int, streams: int, prompt: int | None = None, *, name: str | None = None) -> float:
        """How long `streams` answers of `tokens` take together. name: the measurement that they are a run of."""
        prompts = self.prompts(streams, prompt or self.spec.prompt)
        if streams > 1:
            self._queue(prompts, tokens)
        start_s = time.perf_counter()
        answers = self._queued() if streams > 1 else self._answers(prompts, tokens)
        seconds = time.perf_counter() - start_s
        stamps = [answer.metrics for answer in answers]
        if name is not None and streams > 1 and None not in stamps:  # one step stamps all that begin in it alike
            steps = len({one.scheduled_ts for one in stamps})
            self.prefill_steps[name] = (*self.prefill_steps.get(name, ()), steps)
        return seconds

    def behind(self, depth: int) -> DepthRates:
        """Rates of one answer behind `depth` tokens, by the engine's time stamps."""
        (answer,) = self._answers(self.prompts(1, depth), self.spec.long)
        stamps = answer.metrics
        return DepthRates(
            prefill=depth / (stamps.first_token_ts - stamps.scheduled_ts),
            decode=(self.spec.long - 1) / (stamps.last_token_ts - stamps.first_token_ts),
        )

    def prompts(self, streams: int, tokens: int) -> list[dict[str, list[int]]]:
        """New ones, of tokens that any vocabulary has."""
        prompts = []
        for _ in range(streams):
            self.sent += 1
            draw = Random(self.sent)  # a row that repeats would elect the same experts again and again
            prompts.append({"prompt_token_ids": [draw.randrange(5, 245) for _ in range(tokens)]})
        return prompts

    def _answers(self, prompts: list[dict[str, list[int]]], tokens: int) -> Any:
        return self.engine.generate(prompts, sampling(tokens), use_tqdm=False)

    def _queue(self, prompts: list[dict[str, list[int]]], tokens: int) -> None:
        """Lets the engine have all prompts before it begins one: a core in a process of its own would begin with those
        that have come, in more steps of prefill in one run than in another."""
        self.engine.sleep(level=0, mode="keep")  # schedules nothing, forgets nothing
        self.engine.enqueue(prompts, sampling(tokens), use_tqdm=False)

    def _queued(self) -> Any:
        """The answers to what was queued."""
        self.engine.wake_up(["scheduling"])
        return self.engine.wait_for_completion(use_tqdm=False)

    def kernels(self, tokens: int, streams: int) -> tuple[Kernel, ...]:
        """The dearest kernels (operators on a CPU) of a decode step of `streams` streams, per step: what answers that
        are longer by `tokens` add, so that prefill cancels."""
        short, long = (self._profile(count, streams) for count in (self.spec.short, self.spec.short + tokens))
        found = []
        for name, (us, calls) in long.items():
            less_us, less_calls = short.get(name, (0.0, 0))
            if calls > less_calls:  # others are of the prefill alone
                more_us = max(0.0, us - less_us)  # noise may be more than a short kernel's time
                found.append(Kernel(name=name[:160], us=more_us / tokens, calls=(calls - less_calls) / tokens))
        return tuple(sorted(found, key=lambda kernel: -kernel.us)[:MAX_KERNELS])

    def _profile(self, tokens: int, streams: int) -> dict[str, tuple[float, int]]:
        self.engine.collective_rpc("bench_profile_start")
        self.seconds(tokens, streams, name=f"profile {streams}")
        (rows,) = self.engine.collective_rpc("bench_profile_stop")
        sums: dict[str, tuple[float, int]] = {}
        for name, us, calls in rows:  # one name can be of several kinds of events
            us_before, calls_before = sums.get(name, (0.0, 0))
            sums[name] = (us_before + us, calls_before + calls)
        return sums


def sampling(tokens: int) -> Any:
    """vLLM's parameters of an answer that is as long as asked."""
    return import_module("vllm").SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)
