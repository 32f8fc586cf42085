"""The rows of a table, the same for terminal, Markdown and comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qwen_nvfp4_serve.bench.result import CaseResult, Result
from qwen_nvfp4_serve.bench.statistics import Spread
from qwen_nvfp4_serve.bench.workload import Workload

HEADERS = (
    "test",
    "t/s (total)",
    "t/s (req)",
    "peak t/s",
    "peak t/s (req)",
    "ttfr (ms)",
    "est_ppt (ms)",
    "e2e_ttft (ms)",
    "failed",
)
CACHE_LABELS = ("cache_dtype", "block_size", "num_gpu_blocks", "enable_prefix_caching")
LARGE, SMALL = 1000.0, 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line: the test's name, then a cell for each of HEADERS[1:], empty where nothing was measured."""

    test: str
    cells: tuple[str, ...]
    failed: bool


def table_rows(result: Result) -> tuple[Row, ...]:
    """Two rows a case, prefill and decode, with llama-benchy's names and columns, then how many requests failed."""
    return tuple(row for case in result.cases for row in _case_rows(case))


def _case_rows(case: CaseResult) -> tuple[Row, Row]:
    seen = case.metrics
    failures = len(case.failures)
    failed = f"{failures}/{case.requests}"
    prefill = (seen.prefill_total, seen.prefill_request, None, None, seen.ttfr_ms, seen.prefill_ms, seen.ttft_ms)
    decode = (seen.decode_total, seen.decode_request, seen.peak_total, seen.peak_request, None, None, None)
    return (
        Row(case.case.prefill, (*map(cell, prefill), failed), failures > 0),
        Row(case.case.decode, (*map(cell, decode), failed), failures > 0),
    )


def cell(value: Spread | None) -> str:
    """`median ± standard deviation`, both with the digits of the median; one value alone has none. Empty for None."""
    if value is None:
        return ""
    if len(value.values) == 1:
        return number(value.median)
    return f"{number(value.median)} ± {value.std:,.{_digits(value.median)}f}"


def spread_words(workload: Workload) -> str:
    """What the figures of a page or a chart are."""
    if workload.runs > 1:
        return f"median of {workload.runs} runs ± standard deviation"
    return "one run" + (", ± between its requests" if max(workload.concurrencies) > 1 else "")


def number(value: float) -> str:
    """Digits that the value deserves: 12,345, 123.4, 1.23."""
    return f"{value:,.{_digits(value)}f}"


def _digits(value: float) -> int:
    return 0 if abs(value) >= LARGE else 1 if abs(value) >= SMALL else 2


def settings_rows(result: Result) -> tuple[tuple[str, str], ...]:
    """Name and value of everything that a reader must know beside the figures."""
    machine, server, workload = result.machine, result.server, result.workload
    rows: list[tuple[str, str | None]] = [
        ("model", server.model),
        ("card", machine.title),
        ("vLLM", server.vllm),
        ("measured", f"{result.started}, {result.seconds:.0f} s, qwen-nvfp4 {result.project}"),
        ("server", f"{server.base_url}{' (another machine)' if machine.remote else ''}"),
        ("runs", f"{workload.runs} counted after {workload.warmup_runs} warm-up, seed {workload.seed}"),
        ("requests", _requests(result)),
        ("latency", f"{result.latency_ms:.2f} ms ({workload.latency_mode}), taken off e2e_ttft to give est_ppt"),
        ("host", f"{machine.cpu or 'unknown CPU'}, {machine.cpu_count} threads, {machine.system}"),
    ]
    for card in machine.cards_after or ():
        clocks = f"SM {_unit(card.sm_clock_mhz)} of {_unit(card.max_sm_clock_mhz)} MHz"
        memory = f"memory {_unit(card.memory_clock_mhz)} MHz"
        power = f"power limit {_unit(card.power_limit_w)} W"
        used = f"{_unit(card.memory_used_mib)} of {_unit(card.memory_mib)} MiB used"
        rows.append((card.name, f"driver {card.driver}, {clocks}, {memory}, {power}, {used}"))
    if server.ready_s is not None:
        rows.append(("start to READY", f"{server.ready_s:.0f} s"))
    if server.cache:
        rows.append(("cache", cache_words(server.cache)))
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    rows.append(("packages", packages or None))
    return tuple((name, value if value is not None else "unknown") for name, value in rows)


def cache_words(cache: Mapping[str, str]) -> str:
    """What a reader can use of vLLM's cache_config_info, whose other labels are its own business."""
    return ", ".join(f"{name} {cache[name]}" for name in CACHE_LABELS if name in cache)


def _requests(result: Result) -> str:
    workload = result.workload
    caching = "the same prompts in every run" if workload.reuse_prompts else "prompts never sent before"
    context = ", context sent first" if workload.cached_context else ""
    return f"{workload.endpoint}, temperature {workload.temperature:g}, {caching}{context}"


def _unit(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
