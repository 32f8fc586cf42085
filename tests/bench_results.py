"""Results made of exact samples, for tests of what is computed and drawn from them."""

from __future__ import annotations

from typing import Any

from qwen_nvfp4_serve.bench.machine import Card, Machine
from qwen_nvfp4_serve.bench.result import FORMAT, CaseResult, Result, ServerFacts
from qwen_nvfp4_serve.bench.samples import Failure, Sample
from qwen_nvfp4_serve.bench.statistics import Batch, goodput, measure
from qwen_nvfp4_serve.bench.workload import Case, Workload, cases

CARD = Card(name="NVIDIA H200", driver="580.1", sm_clock_mhz=1980.0, max_sm_clock_mhz=1980.0, power_limit_w=700.0)


def made_sample(case: Case, tokens_per_s: float, *, start_s: float = 0.0) -> Sample:
    """A request whose first token comes 0.1 s after it starts, the others at the rate."""
    first_s = start_s + 0.1
    last_s = first_s + (case.generate - 1) / tokens_per_s
    return Sample(
        start_s=start_s,
        end_s=last_s,
        first_response_s=first_s,
        first_token_s=first_s,
        last_token_s=last_s,
        prompt_tokens=case.depth + case.prompt,
        completion_tokens=case.generate,
        first_tokens=1,
        chunks=case.generate,
    )


def made_case(case: Case, workload: Workload, tokens_per_s: float, failure: Failure | None = None) -> CaseResult:
    """A case whose runs differ by 1 %; `failure` befalls the first request of the last run."""
    batches = []
    for run in range(workload.runs):
        rate = tokens_per_s * (1 + 0.01 * (run - workload.runs // 2))
        samples = [made_sample(case, rate) for _ in range(case.concurrency)]
        if failure is not None and run == workload.runs - 1:
            samples[0] = Sample(start_s=0.0, end_s=0.2, failure=failure)
        peaks = tuple(rate for sample in samples if sample.failure is None)
        batches.append(Batch(samples=tuple(samples), peak_tokens_per_s=sum(peaks), request_peaks_tokens_per_s=peaks))
    return CaseResult(
        case=case,
        cached_tokens=0,
        warmup_failures=(),
        batches=tuple(batches),
        metrics=measure(case, batches, latency_s=0.0),
        goodput=goodput(workload, batches),
    )


def made_result(tokens_per_s: float = 100.0, failure: Failure | None = None, **changes: Any) -> Result:
    """A complete run at `tokens_per_s` per request. changes: fields of Workload, or of Result."""
    own = {name: changes.pop(name) for name in ("label", "complete", "machine", "server") if name in changes}
    workload = Workload(**({"depths": (0, 4096), "concurrencies": (1, 4), "runs": 3} | changes))
    found = [made_case(case, workload, tokens_per_s) for case in cases(workload)]
    if failure is not None:
        found[-1] = made_case(cases(workload)[-1], workload, tokens_per_s, failure)
    values: dict[str, Any] = {
        "format": FORMAT,
        "complete": True,
        "label": "made",
        "started": "2026-01-02T03:04:05+00:00",
        "seconds": 12.0,
        "project": "0.1.0",
        "workload": workload,
        "nonce": "00",
        "counted_by": "tokenize",
        "latency_ms": 1.5,
        "server": ServerFacts(
            base_url="http://127.0.0.1:8000/v1",
            model="qwen3.5-35b-a3b",
            max_model_len=262_144,
            vllm="0.33.0",
            cache={"cache_dtype": "fp8", "block_size": "2096"},
            kernels=("Using MarlinLinearKernel for NVFP4 GEMM",),
            ready_s=61.4,
            plan={"fits": True},
        ),
        "machine": Machine(
            remote=False,
            card_name=CARD.name,
            cards_before=(CARD,),
            cards_after=(CARD,),
            packages={"vllm": "0.33.0"},
            python="3.11.1",
            system="Linux",
            cpu="a CPU",
            cpu_count=2,
        ),
        "cases": tuple(found),
    }
    return Result(**(values | own))
