"""From samples to the figures of a table, by llama-benchy's definitions; failed requests are left out and counted."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import ConfigDict

from qwen_nvfp4_serve.bench.samples import Arrival, Sample
from qwen_nvfp4_serve.bench.workload import Case, Workload

PEAK_WINDOW_S = 1.0  # as llama-benchy
# Beyond any stream of these models (the record's fastest makes about 400): what was seen is a delivery, by a proxy or a
# busy machine that held tokens back. Those that were seen delivered 50,000 and more.
HELD_BACK_TOKENS_PER_S = 5_000.0
HELD_BACK_TOKENS = 16  # of fewer the first one may be late by no more than what any busy client adds
MS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What several measurements of one thing came to. std: population standard deviation. values: in order taken."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    median: float
    mean: float
    std: float
    low: float
    high: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests sent at the same moment. peaks: tokens/s of the busiest second, of all together and of each that
    succeeded; None where no token's moment is known, or where answers came at once."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    samples: tuple[Sample, ...]
    peak_tokens_per_s: float | None
    request_peaks_tokens_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures of one case; None where nothing was measured. `request` is over each request that succeeded, `total`
    over all requests of a batch together, from the batches in which none failed.

    prefill, decode, peak in tokens/s. ttfr: to the first event of the stream. ttft: to the first token.
    prefill_ms: ttft less the latency of a small request. tpot: per token after the first. All times in ms.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    prefill_total: Spread | None
    prefill_request: Spread | None
    decode_total: Spread | None
    decode_request: Spread | None
    peak_total: Spread | None
    peak_request: Spread | None
    ttfr_ms: Spread | None
    prefill_ms: Spread | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    whole_ms: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that kept the limits given; failed ones are among `requests` and never good."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    good: int
    requests: int
    good_requests_per_s: float


def spread(values: Iterable[float]) -> Spread | None:
    """The spread of `values`, None when there are none."""
    seen = tuple(values)
    if not seen:
        return None
    return Spread(
        median=statistics.median(seen),
        mean=statistics.fmean(seen),
        std=statistics.pstdev(seen),
        low=min(seen),
        high=max(seen),
        values=seen,
    )


def measure(case: Case, batches: Sequence[Batch], *, latency_s: float, cached_tokens: int = 0) -> Metrics:
    """The figures of a case. cached_tokens: prompt tokens that an earlier request left in the cache on purpose."""
    flat = [sample for batch in batches for sample in good_samples(batch)]
    # A batch in which a request failed carried a smaller load, so it says nothing of all requests together.
    whole = [batch for batch in batches if len(good_samples(batch)) == len(batch.samples)]
    prefill_request = spread(
        rate for sample in flat if (rate := _prefill_rate(sample, latency_s, cached_tokens)) is not None
    )
    decode_request = spread(rate for sample in flat if (rate := decode_rate(sample)) is not None)
    alone = case.concurrency == 1
    return Metrics(
        prefill_total=prefill_request
        if alone
        else spread(_each(_batch_prefill_rate(one.samples, cached_tokens) for one in whole)),
        prefill_request=prefill_request,
        decode_total=decode_request if alone else spread(_each(_batch_decode_rate(one.samples) for one in whole)),
        decode_request=decode_request,
        peak_total=spread(_each(batch.peak_tokens_per_s for batch in whole)),
        peak_request=spread(peak for batch in batches for peak in batch.request_peaks_tokens_per_s),
        ttfr_ms=spread(_each(_since_start_ms(sample, sample.first_response_s) for sample in flat)),
        prefill_ms=spread(_each(_prefill_ms(sample, latency_s) for sample in flat)),
        ttft_ms=spread(_each(ttft_ms(sample) for sample in flat)),
        tpot_ms=spread(_each(tpot_ms(sample) for sample in flat)),
        whole_ms=spread(_each(_since_start_ms(sample, sample.end_s) for sample in flat)),
    )


def goodput(workload: Workload, batches: Sequence[Batch]) -> Goodput | None:
    """How many requests kept both limits; None when no limit was given."""
    if workload.ttft_limit_ms is None and workload.tpot_limit_ms is None:
        return None
    samples = [sample for batch in batches for sample in batch.samples]
    good = sum(
        sample.failure is None
        and _within(ttft_ms(sample), workload.ttft_limit_ms)
        # An answer of one token, or one that came at once, has no token that came late after the first.
        and _within(
            0.0 if sample.completion_tokens and tpot_ms(sample) is None else tpot_ms(sample), workload.tpot_limit_ms
        )
        for sample in samples
    )
    seconds = sum(max(sample.end_s for sample in batch.samples) for batch in batches)
    return Goodput(good=good, requests=len(samples), good_requests_per_s=good / seconds if seconds else 0.0)


def peak(arrivals: Iterable[Arrival]) -> float | None:
    """Tokens/s of the busiest second; of an answer shorter than a second, its rate after the first arrival."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.at_s)
    if len(ordered) < 2 or ordered[-1].at_s <= ordered[0].at_s:
        return None
    lasted_s = ordered[-1].at_s - ordered[0].at_s
    if lasted_s < PEAK_WINDOW_S:
        return (sum(arrival.tokens for arrival in ordered) - ordered[0].tokens) / lasted_s
    window: deque[Arrival] = deque()
    inside = most = 0.0
    for arrival in ordered:
        window.append(arrival)
        inside += arrival.tokens
        while window[0].at_s <= arrival.at_s - PEAK_WINDOW_S:
            inside -= window.popleft().tokens
        most = max(most, inside)
    return most / PEAK_WINDOW_S


def good_samples(batch: Batch) -> list[Sample]:
    """Those of a batch that did not fail."""
    return [sample for sample in batch.samples if sample.failure is None]


def decode_rate(sample: Sample) -> float | None:
    """Tokens/s after those of the first arrival; None when all came at once."""
    tokens, seconds = _decoded(sample)
    return tokens / seconds if tokens > 0 else None


def came_at_once(sample: Sample) -> bool:
    """True for an answer of several tokens whose arrivals say nothing of the speed at which they were made."""
    several = sample.first_token_s is not None and (sample.completion_tokens or 0) > 1
    return several and _decoded(sample)[0] <= 0


def ttft_ms(sample: Sample) -> float | None:
    """Milliseconds from sending to the first token."""
    return _since_start_ms(sample, sample.first_token_s)


def tpot_ms(sample: Sample) -> float | None:
    """Milliseconds per token after those of the first arrival; None when all came at once."""
    tokens, seconds = _decoded(sample)
    return MS * seconds / tokens if tokens > 0 else None


def _waited(sample: Sample) -> bool:
    """True if the first token waited for the last, so that its time is not the prompt's."""
    return came_at_once(sample) and (sample.completion_tokens or 0) >= HELD_BACK_TOKENS


def _decoded(sample: Sample) -> tuple[float, float]:
    """Tokens after those of the first arrival and the seconds they took; none where they came at once."""
    if sample.first_token_s is None or sample.last_token_s is None:
        return 0.0, 0.0
    tokens = (sample.completion_tokens or 0) - (sample.first_tokens or 0.0)
    seconds = sample.last_token_s - sample.first_token_s
    return (tokens, seconds) if tokens < HELD_BACK_TOKENS_PER_S * seconds else (0.0, 0.0)


def _prefill_ms(sample: Sample, latency_s: float) -> float | None:
    # To the first token, where llama-benchy takes the first event: the same on vLLM, which sends none before it.
    if sample.first_token_s is None or _waited(sample):
        return None
    return MS * max(0.0, sample.first_token_s - sample.start_s - latency_s)


def _prefill_rate(sample: Sample, latency_s: float, cached_tokens: int) -> float | None:
    took_ms = _prefill_ms(sample, latency_s)
    if not took_ms or sample.prompt_tokens is None:
        return None
    return MS * (sample.prompt_tokens - cached_tokens) / took_ms


def _batch_prefill_rate(samples: Sequence[Sample], cached_tokens: int) -> float | None:
    ends = [sample.first_token_s for sample in samples if sample.first_token_s is not None]
    if not ends or any(map(_waited, samples)):
        return None
    seconds = max(ends) - min(sample.start_s for sample in samples)
    tokens = sum((sample.prompt_tokens or 0) - cached_tokens for sample in samples)
    return tokens / seconds if seconds > 0 else None


def _batch_decode_rate(samples: Sequence[Sample]) -> float | None:
    firsts = [sample.first_token_s for sample in samples if sample.first_token_s is not None]
    lasts = [sample.last_token_s for sample in samples if sample.last_token_s is not None]
    tokens = sum(_decoded(sample)[0] for sample in samples)
    if not firsts or tokens <= 0 or any(map(came_at_once, samples)):
        return None
    seconds = max(lasts) - min(firsts)
    return tokens / seconds if seconds > 0 else None


def _since_start_ms(sample: Sample, at_s: float | None) -> float | None:
    return None if at_s is None else MS * (at_s - sample.start_s)


def _within(value: float | None, limit: float | None) -> bool:
    return limit is None or (value is not None and value <= limit)


def _each(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)
