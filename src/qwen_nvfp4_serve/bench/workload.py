"""What one benchmark asks of a server: the settings that two runs must share to be comparable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

from pydantic import ConfigDict

from qwen_nvfp4_serve.errors import UsageError

Endpoint = Literal["completions", "chat"]
LatencyMode = Literal["api", "generation", "none"]
Phase = Literal["request", "context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Every setting of a run. Lengths in tokens, limits in ms, None where no limit was given.

    depths: context before the prompt. generates: tokens asked for. concurrencies: requests sent at the same moment.
    runs, warmup_runs: counted and uncounted batches of each case. cached_context: send the context first, so that
    the measured request finds it in the prefix cache. reuse_prompts: send the same prompts in every run, which a
    prefix cache may answer. latency_mode: what is taken off the time to first token to estimate prefill time.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    endpoint: Endpoint = "completions"
    depths: tuple[int, ...] = (0,)
    prompts: tuple[int, ...] = (2048,)
    generates: tuple[int, ...] = (32,)
    concurrencies: tuple[int, ...] = (1,)
    runs: int = 5
    warmup_runs: int = 1
    seed: int = 0
    cached_context: bool = False
    reuse_prompts: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    latency_mode: LatencyMode = "api"
    timeout_s: float = 600.0
    ttft_limit_ms: float | None = None
    tpot_limit_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table: `concurrency` requests of `depth + prompt` tokens that generate `generate` each.

    phase `context` is the load of the context alone, `request` the request itself.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    depth: int
    prompt: int
    generate: int
    concurrency: int
    phase: Phase = "request"

    @property
    def prefill(self) -> str:
        """The name of the prefill row, as llama-benchy writes it: `pp2048 @ d4096 (c4)`."""
        return self._name("ctx_pp" if self.phase == "context" else f"pp{self.prompt}")

    @property
    def decode(self) -> str:
        """The name of the decode row: `tg32 @ d4096 (c4)`."""
        return self._name("ctx_tg" if self.phase == "context" else f"tg{self.generate}")

    @property
    def whole(self) -> str:
        """A name that no other case of a run has: `pp2048 tg32 @ d4096 (c4)`."""
        return self._name(f"pp{self.prompt} tg{self.generate}" + (" context" if self.phase == "context" else ""))

    def _name(self, test: str) -> str:
        depth = f" @ d{self.depth}" if self.depth else ""
        return f"{test}{depth} (c{self.concurrency})"


def cases(workload: Workload) -> tuple[Case, ...]:
    """Every combination, in llama-benchy's order: depth, prompt, generate, concurrency."""
    axes = product(workload.depths, workload.prompts, workload.generates, workload.concurrencies)
    return tuple(Case(depth=depth, prompt=pp, generate=tg, concurrency=many) for depth, pp, tg, many in axes)


def check_workload(workload: Workload, max_model_len: int) -> None:
    """Raises UsageError naming the option that is wrong. max_model_len: the server's limit in tokens, 0 if unknown."""
    lists = {
        "--depth": (workload.depths, 0),
        "--prompt": (workload.prompts, 16),  # room for the words that keep a prompt out of the prefix cache
        "--generate": (workload.generates, 2),  # a rate needs a second token
        "--concurrency": (workload.concurrencies, 1),
        "--runs": ((workload.runs,), 1),
        "--warmup": ((workload.warmup_runs,), 0),
    }
    for option, (values, least) in lists.items():
        if not values or min(values) < least or len(set(values)) != len(values):
            seen = ",".join(str(value) for value in values) or "nothing"
            raise UsageError(option, seen=seen, expected=f"different numbers, each {least} or more")
    limits = {
        "--timeout-s": workload.timeout_s,
        "--ttft-ms": workload.ttft_limit_ms,
        "--tpot-ms": workload.tpot_limit_ms,
    }
    for option, limit in limits.items():
        if limit is not None and not 0 < limit < math.inf:
            raise UsageError(option, seen=f"{limit:g}", expected="a number above 0")
    if not 0 <= workload.temperature < math.inf:
        raise UsageError("--temperature", seen=f"{workload.temperature:g}", expected="0 or more")
    longest = max(workload.depths) + max(workload.prompts) + max(workload.generates)
    if max_model_len and longest > max_model_len:
        raise UsageError(
            "--depth, --prompt and --generate together",
            seen=f"{longest} tokens",
            expected=f"at most the server's {max_model_len}",
            do="Ask for less, or serve with a larger MAX_MODEL_LEN.",
        )
    if workload.cached_context and not any(workload.depths):
        raise UsageError("--cached-context", seen="only depth 0", expected="a --depth above 0")
