"""The benchmark against a scripted server: its rates are the server's, and everything that fails is counted as that."""

from __future__ import annotations

import statistics

import pytest
from tests.bench_stand_in import MAX_MODEL_LEN, Script, scripted

from qwen_nvfp4_serve.bench.report import markdown
from qwen_nvfp4_serve.bench.result import CaseResult, Result
from qwen_nvfp4_serve.bench.runner import Order, Step, run_bench
from qwen_nvfp4_serve.bench.subject import subject_of
from qwen_nvfp4_serve.bench.workload import Workload
from qwen_nvfp4_serve.smoke import connect

QUICK = {"prompts": (40,), "generates": (64,), "runs": 2, "warmup_runs": 0}


def bench(script: Script, *, nonce: str = "n", **settings: object) -> Result:
    workload = Workload(**(QUICK | settings))  # type: ignore[arg-type]
    with scripted(script) as url:
        order = Order(workload=workload, subject=subject_of(connect(url, None), label="test"), nonce=nonce)
        return run_bench(order, lambda _: None)


def only(result: Result) -> CaseResult:
    (case,) = result.cases
    return case


def error_of_rate(script: Script, result: Result) -> float:
    """How far the rates are from what the server's own clock says of the same requests: the median of all."""
    seen = only(result).metrics.decode_request
    assert seen is not None
    pairs = zip(seen.values, script.true_rates, strict=True)
    return statistics.median(abs(ours / true - 1.0) for ours, true in pairs)


@pytest.mark.parametrize("counts", [True, False], ids=["running count", "usage at the end"])
@pytest.mark.parametrize("bundle", [1, 4])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_decode_rate_is_the_servers_within_two_percent(endpoint: str, bundle: int, counts: bool) -> None:
    script = Script(tokens_per_s=200, bundles=(bundle,), counts=counts)
    assert error_of_rate(script, bench(script, endpoint=endpoint, runs=3)) < 0.02


def test_decode_rate_uneven_bundles_with_running_count_is_within_two_percent() -> None:
    script = Script(tokens_per_s=200, bundles=(7, 1, 2))
    assert error_of_rate(script, bench(script, runs=3)) < 0.02


def test_decode_rate_of_four_streams_is_four_times_one() -> None:
    script = Script(tokens_per_s=200)
    metrics = only(bench(script, concurrencies=(4,))).metrics
    assert metrics.decode_total is not None
    assert metrics.decode_request is not None
    assert metrics.decode_total.median == pytest.approx(4 * statistics.median(script.true_rates), rel=0.15)
    assert metrics.decode_request.median == pytest.approx(statistics.median(script.true_rates), rel=0.05)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("bundle", [1, 64], ids=["burst", "one event"])
def test_answers_that_came_at_once_have_no_rates_and_are_said(bundle: int, concurrency: int) -> None:
    held_back = dict.fromkeys(range(2 * concurrency), "held back")
    script = Script(bundles=(bundle,), faults=held_back, prefill_s=0.05)
    result = bench(script, concurrencies=(concurrency,), tpot_limit_ms=100.0)
    metrics, goodput = only(result).metrics, only(result).goodput
    rates = (metrics.decode_total, metrics.decode_request, metrics.prefill_total, metrics.prefill_request)
    assert (*rates, metrics.tpot_ms, metrics.prefill_ms) == (None,) * 6
    assert metrics.peak_request is None
    assert metrics.peak_total is None
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.median >= 50
    assert goodput is not None
    assert goodput.good == goodput.requests
    page = markdown(result)
    assert f"{2 * concurrency} answers came at once, whole or faster than 5,000 tokens/s" in page
    assert "ttfr and e2e_ttft have them as they came" in page


def test_batch_in_which_one_answer_came_at_once_has_no_rates_of_all_together() -> None:
    metrics = only(bench(Script(faults={0: "held back"}), concurrencies=(2,), runs=1)).metrics
    assert (metrics.decode_total, metrics.peak_total, metrics.prefill_total) == (None, None, None)
    for value in (metrics.decode_request, metrics.peak_request, metrics.prefill_request):
        assert value is not None
        assert len(value.values) == 1  # the other's


def test_answers_without_text_are_said_not_to_have_come_at_once() -> None:
    page = markdown(bench(Script(counts=False, silent=True)))
    assert "2 answers brought no text" in page
    assert "at once" not in page


def test_answers_of_one_token_have_no_rate_and_keep_the_limit_of_later_tokens() -> None:
    result = bench(Script(), generates=(1,), tpot_limit_ms=100.0)
    assert only(result).metrics.decode_request is None
    goodput = only(result).goodput
    assert goodput is not None
    assert (goodput.good, goodput.requests) == (2, 2)
    assert "at once" not in markdown(result)


def test_prefill_rate_counts_the_whole_prompt_over_its_time() -> None:
    script = Script(prefill_s=0.2)
    metrics = only(bench(script, prompts=(400,), latency_mode="none", runs=5)).metrics
    assert metrics.prefill_total is not None
    assert metrics.prefill_total.median == pytest.approx(400 / statistics.median(script.true_firsts), rel=0.1)


def test_prefill_rate_of_a_server_that_sends_an_empty_event_first_is_not_fooled() -> None:
    script = Script(prefill_s=0.2, early_role=True)
    metrics = only(bench(script, prompts=(400,), endpoint="chat", runs=5)).metrics
    assert metrics.prefill_total is not None
    assert metrics.ttfr_ms is not None
    assert metrics.prefill_total.median == pytest.approx(400 / statistics.median(script.true_firsts), rel=0.15)
    assert metrics.ttfr_ms.median < 150


@pytest.mark.parametrize("has_tokenize", [True, False])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("depth", [0, 100])
def test_prompts_are_exactly_as_long_as_asked(depth: int, endpoint: str, has_tokenize: bool) -> None:
    script = Script(has_tokenize=has_tokenize, tokens_per_s=4000, dear_words=True)
    result = bench(script, endpoint=endpoint, depths=(depth,), prompts=(40, 77), generates=(4,))
    assert result.counted_by == ("tokenize" if has_tokenize else "usage")
    for case in result.cases:
        asked = depth + case.case.prompt
        assert {sample.prompt_tokens for batch in case.batches for sample in batch.samples} == {asked}


def test_prompts_begin_differently_in_every_request_and_every_run_of_the_command() -> None:
    script = Script(tokens_per_s=4000)
    settings = {"generates": (4,), "concurrencies": (2,), "runs": 3}
    bench(script, nonce="first", **settings)
    bench(script, nonce="second", **settings)
    beginnings = {" ".join(body["prompt"].split()[:9]) for body in script.bodies}
    assert len(beginnings) == len(script.bodies) == 12


def test_prompts_with_equal_seed_and_nonce_are_equal() -> None:
    first, second = Script(tokens_per_s=4000), Script(tokens_per_s=4000)
    for script in (first, second):
        bench(script, generates=(4,))
    assert [body["prompt"] for body in first.bodies] == [body["prompt"] for body in second.bodies]


def test_prompts_reused_are_equal_in_every_run() -> None:
    script = Script(tokens_per_s=4000)
    bench(script, generates=(4,), runs=3, reuse_prompts=True)
    assert len({body["prompt"] for body in script.bodies}) == 1


def test_cached_context_is_sent_first_and_not_counted_as_prefilled() -> None:
    script = Script(prefill_s=0.1)
    result = bench(script, depths=(200,), cached_context=True, generates=(8,), latency_mode="none", runs=1)
    load, request = result.cases
    assert [load.case.prefill, request.case.prefill] == ["ctx_pp @ d200 (c1)", "pp40 @ d200 (c1)"]
    assert script.bodies[1]["prompt"].startswith(script.bodies[0]["prompt"])
    assert load.metrics.prefill_total is not None
    assert request.metrics.prefill_total is not None
    load_s, request_s = script.true_firsts
    assert load.metrics.prefill_total.median == pytest.approx(200 / load_s, rel=0.2)
    assert request.metrics.prefill_total.median == pytest.approx(40 / request_s, rel=0.2)


@pytest.mark.parametrize("kind", ["http", "error event", "dropped", "bad event", "no usage", "timeout"])
def test_failure_is_counted_by_kind_and_left_out_of_the_rates(kind: str) -> None:
    script = Script(faults={1: kind})
    case = only(bench(script, runs=3, timeout_s=0.8))
    assert [failure.kind for failure in case.failures] == [kind]
    assert case.requests == 3
    assert case.metrics.decode_request is not None
    assert len(case.metrics.decode_request.values) == 2


def test_failure_of_a_server_that_ends_a_stream_early_is_dropped() -> None:
    script = Script(faults={0: "ends early"})
    (failure,) = only(bench(script, runs=1)).failures
    assert failure.kind == "dropped"
    assert "[DONE]" in failure.detail


def test_failure_in_warm_up_is_kept_apart() -> None:
    script = Script(faults={0: "http"}, tokens_per_s=4000)
    case = only(bench(script, warmup_runs=1, runs=1))
    assert [failure.kind for failure in case.warmup_failures] == ["http"]
    assert case.failures == ()


def test_goodput_slow_and_failed_requests_are_not_good() -> None:
    script = Script(faults={0: "http"}, prefill_s=0.05)
    quick = only(bench(script, runs=4, ttft_limit_ms=1000.0, tpot_limit_ms=100.0)).goodput
    assert quick is not None
    assert (quick.good, quick.requests) == (3, 4)
    slow = only(bench(Script(prefill_s=0.05), ttft_limit_ms=40.0)).goodput
    assert slow is not None
    assert (slow.good, slow.requests) == (0, 2)


def test_progress_counts_every_batch() -> None:
    steps: list[Step] = []
    workload = Workload(prompts=(40,), generates=(4,), depths=(0, 64), runs=2, warmup_runs=1, cached_context=True)
    with scripted(Script(tokens_per_s=4000)) as url:
        order = Order(workload=workload, subject=subject_of(connect(url, None), label="test"), nonce="n")
        run_bench(order, steps.append)
    assert steps[-1].done == steps[-1].total == 3 + 2 * 3
    assert sorted(step.done for step in steps) == [step.done for step in steps]


def test_server_facts_are_what_it_says() -> None:
    facts = bench(Script(tokens_per_s=4000), generates=(4,), runs=1).server
    assert (facts.vllm, facts.max_model_len, facts.model) == ("9.9", MAX_MODEL_LEN, "m")
    assert facts.cache == {"block_size": "16", "cache_dtype": "fp8", "enable_prefix_caching": "True"}
