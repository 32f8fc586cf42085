"""The whole path on a real vLLM: the embedded NVFP4 model, served as `scripts/serve` serves it."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI
from tests.e2e.serving import COMMAND, Served

from qwen_nvfp4_serve.smoke import connect, run_checks

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.fixture
def server(embedded: Served) -> Served:
    return embedded


def client(server: Served) -> OpenAI:
    return OpenAI(base_url=server.url, api_key="none", max_retries=0)


def test_server_log_names_our_kernels_fp8_cache_and_prefix_caching(server: Served) -> None:
    for says in (
        "CpuNvFp4LinearKernel for NVFP4",
        "CpuNvFp4Experts",
        "Using fp8 data type to store kv cache",
        "enable_prefix_caching=True",
    ):
        assert says in server.log
    for patch in ("cpu-nvfp4-linear", "cpu-nvfp4-moe"):
        assert server.log.count(f"Patch {patch}: applied") == 1


def test_server_stages_come_in_order(server: Served) -> None:
    stages = re.findall(r"^\[qwen-nvfp4 +[\d.]+s\] ([\w-]+):", server.log, flags=re.MULTILINE)
    order = [stages.index(stage) for stage in ("preflight", "load", "warm-up", "READY")]
    assert order == sorted(order)


def test_server_passes_the_smoke_checks(server: Served) -> None:
    checks = run_checks(connect(server.url, None))
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]


def test_server_passes_the_curl_smoke(server: Served) -> None:
    done = subprocess.run([ROOT / "scripts" / "smoke.sh", server.url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 10


def test_readme_examples_answer_as_written(server: Served) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", README.read_text(), flags=re.DOTALL)
    here = f"127.0.0.1:{server.port}"
    curl = next(text for kind, text in blocks if kind == "sh" and "curl" in text).replace("127.0.0.1:8000", here)
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True).stdout
    says = re.findall(r'`("(?:content|reasoning)":".*?")`', README.read_text())
    assert len(says) == 2
    assert all(part in answer for part in says), answer
    program = next(text for kind, text in blocks if kind == "python").replace("127.0.0.1:8000", here)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Paris"]


def test_agents_example_calls_its_tool_and_answers_as_written(server: Served) -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0].replace(":8000", f":{server.port}")
    program = program.replace("price = prices", "print(wanted); price = prices")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["{'item': 'lamp', 'city': 'oslo'}", "the result is 47."]


def test_server_ready_line_is_a_curl_that_answers(server: Served) -> None:
    line = next(line for line in server.log.splitlines() if line.strip().startswith("curl "))
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
    assert '"finish_reason"' in answer


def test_server_greedy_answer_is_the_same_again_and_streamed(server: Served) -> None:
    ask = client(server).completions.create
    arguments = {"model": "embedded", "prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0}
    whole = ask(**arguments).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in ask(**arguments, stream=True))
    assert whole == streamed == ask(**arguments).choices[0].text


def test_server_prefix_caching_hits(server: Served) -> None:
    prompt = "".join(f"line {number}: {number * number}\n" for number in range(120))
    ask = client(server).completions.create
    first = ask(model="embedded", prompt=prompt + "one", max_tokens=1, temperature=0).usage
    second = ask(model="embedded", prompt=prompt + "two", max_tokens=1, temperature=0).usage
    assert first is not None
    assert first.prompt_tokens > 1200
    assert second is not None
    assert second.prompt_tokens_details is not None
    assert (second.prompt_tokens_details.cached_tokens or 0) >= 384


def test_server_answers_sixteen_at_once(server: Served) -> None:
    def ask(number: int) -> int:
        usage = client(server).completions.create(model="embedded", prompt=f"{number} +", max_tokens=8).usage
        return usage.completion_tokens if usage else 0

    with ThreadPoolExecutor(16) as pool:
        assert all(count >= 1 for count in pool.map(ask, range(16)))


def test_second_server_on_the_same_port_is_refused_in_one_line(server: Served, tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "DEVICE": "cpu", "PORT": str(server.port), "CACHE_DIR": str(tmp_path)}
    done = subprocess.run([COMMAND, "serve"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(server.port) in done.stderr
    assert "PORT" in done.stderr
