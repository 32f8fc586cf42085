"""Engine logs against plans: recorded starts, what the log's lines mean, and learning from a shortfall."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.test_planner import from_case, request

from qwen_nvfp4_serve.planner import plan
from qwen_nvfp4_serve.planner.feedback import (
    EngineFacts,
    differences,
    extra_after_out_of_memory,
    read_engine_log,
    read_extra,
    write_extra,
)
from qwen_nvfp4_serve.units import GIB

LOGS = json.loads((Path(__file__).parent / "data" / "engine_logs.json").read_text())
LOG = (
    "INFO 11-30 10:00:00 [model_runner.py:429] Model loading took 20.96 GiB memory and 31.512340 seconds\n"
    "INFO 11-30 10:00:05 [interface.py:1110] Setting attention block size to 2096 tokens to ensure that attention page "
    "size is >= mamba page size.\n"
    "INFO 11-30 10:00:40 [gpu_worker.py:700] Available KV cache memory: 5.98 GiB\n"
    "INFO 11-30 10:00:40 [kv_cache_utils.py:1140] GPU KV cache size: 567,978 tokens, Maximum concurrency for 131,072 "
    "tokens per request: 4.33x\n"
    "INFO 11-30 10:01:10 [model_runner.py:1164] Graph capturing finished in 12 secs, took 0.31 GiB\n"
)


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log['given']['model']}-{'-'.join(log['expect'])}")
def test_plan_recorded_start_matches_to_the_token(log: dict[str, Any]) -> None:
    planned = plan(from_case(dict(log["given"])))
    assert {key: getattr(planned, key) for key in log["expect"]} == log["expect"]


def test_read_engine_log_takes_every_line() -> None:
    assert read_engine_log(LOG.splitlines()) == EngineFacts(
        weights_bytes=round(20.96 * GIB),
        graph_bytes=round(0.31 * GIB),
        pool_bytes=round(5.98 * GIB),
        block_size_tokens=2096,
        pool_tokens=567_978,
        context=131_072,
        concurrency=4.33,
    )


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 784.00 MiB.",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests.",
        "ValueError: No available memory for the cache blocks.",
    ],
)
def test_read_engine_log_knows_out_of_memory(line: str) -> None:
    assert read_engine_log(["INFO fine", line]).out_of_memory is True


def test_read_engine_log_of_nothing_is_all_unknown() -> None:
    assert read_engine_log([]) == EngineFacts()


def test_differences_start_as_planned_has_none() -> None:
    wanted = request(kv_pool_bytes=round(5.98 * GIB), context=131_072, gdn_prefill="triton")
    planned = plan(dataclasses.replace(wanted, gpu=None))
    seen = dataclasses.replace(read_engine_log(LOG.splitlines()), graph_bytes=planned.bytes.graphs)
    assert differences(planned, dataclasses.replace(seen, weights_bytes=None)) == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"block_size_tokens": 2112}, "block size: planned 2,096, actual 2,112"),
        ({"pool_tokens": 567_979}, "pool tokens: planned 567,978, actual 567,979"),
        ({"weights_bytes": 25 * GIB}, "weights: planned 20.90 GiB, actual 25.00 GiB"),
        ({"graph_bytes": 5 * GIB}, "CUDA graphs"),
    ],
)
def test_differences_name_what_is_off(change: dict[str, Any], word: str) -> None:
    planned = plan(request(kv_pool_bytes=round(5.98 * GIB), context=131_072, gdn_prefill="triton"))
    as_planned = EngineFacts(block_size_tokens=2096, pool_tokens=567_978, context=131_072)
    (line,) = differences(planned, dataclasses.replace(as_planned, **change))
    assert word in line


def test_differences_free_memory_is_compared_with_the_headroom() -> None:
    planned = plan(request(gpu="rtx-5090"))
    assert planned.bytes.headroom is not None
    assert differences(planned, EngineFacts(), free_bytes=planned.bytes.headroom) == ()
    (line,) = differences(planned, EngineFacts(), free_bytes=3 * GIB)
    assert "free memory after warm-up" in line


def test_extra_after_out_of_memory_lowers_each_next_plan_and_ends() -> None:
    wanted = request(gpu="rtx-5090")
    pools, extras = [], []
    for _ in range(20):
        planned = plan(wanted)
        pools.append(planned.pool_bytes)
        extras.append(planned.request.extra_bytes)
        wanted = dataclasses.replace(wanted, extra_bytes=extra_after_out_of_memory(planned))
    assert pools[:8] == sorted(pools[:8], reverse=True)
    assert len(set(pools[:8])) == 8
    assert extras[-1] == extras[-2] <= 0.25 * 31.36 * GIB + 1


def test_extra_is_kept_by_key_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "plans.json"
    assert read_extra(path, "a") == 0
    write_extra(path, "a", 5)
    write_extra(path, "b", 7)
    assert (read_extra(path, "a"), read_extra(path, "b"), read_extra(path, "c")) == (5, 7, 0)
    path.write_text("{")
    assert read_extra(path, "a") == 0
    path.write_text('{"a": "many", "b": -4}')
    assert (read_extra(path, "a"), read_extra(path, "b")) == (0, 0)
