"""The whole path on a real vLLM: the embedded NVFP4 model, served as `scripts/serve` serves it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI
from tests.e2e.serving import COMMAND, Served, serve

from qwen_nvfp4_serve.smoke import connect, run_checks

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("server")) as served:
        yield served


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


def test_sigterm_with_a_stream_open_leaves_no_process_no_port_and_no_socket(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as temporary,  # tmp_path is too deep for the addresses of sockets
        serve(tmp_path, SHUTDOWN_TIMEOUT_S="1", VLLM_API_KEY="key-1", TMPDIR=temporary) as served,
    ):
        assert httpx.get(f"{served.url}/models").status_code == 401
        family = psutil.Process(served.process.pid).children(recursive=True)
        assert len(family) >= 3
        started = threading.Event()
        reader = threading.Thread(target=_read_long_stream, args=(served.url, started), daemon=True)
        reader.start()
        assert started.wait(60)
        assert served.stop() == 0
        assert not [path for path in Path(temporary).rglob("*") if path.is_socket()]
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert not [
        c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == served.port and c.status == "LISTEN"
    ]
    assert "key-1" not in served.log
    reader.join(timeout=10)
    assert not reader.is_alive()


def test_server_killed_outright_leaves_neither_sockets_nor_files_behind(tmp_path: Path) -> None:
    def left() -> list[Path]:
        ours = ("vllm_dist_", "qwen-nvfp4-")  # torch's own folder is a cache, which stays
        found = Path(temporary).rglob("*")
        return [path for path in found if path.is_socket() or (path.name.startswith(ours) and path.suffix != ".json")]

    with tempfile.TemporaryDirectory() as temporary, serve(tmp_path, TMPDIR=temporary) as served:
        assert any(path.is_socket() for path in left())
        assert any(path.name.startswith("vllm_dist_") for path in left())
        served.process.kill()
        deadline = time.monotonic() + 10
        while left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left() == []


def test_second_start_loads_what_the_first_one_compiled(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++: nothing is compiled")
    env = {"ENFORCE_EAGER": "0", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    for log in ("first", "second"):
        with serve(tmp_path, **env) as served:
            text = served.log
        assert ("Directly load AOT compilation" in text) is (log == "second")
        assert "load failure" not in text


def test_server_without_a_compiler_answers_eagerly_with_one_warning(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "env", "uname", "lscpu", "python3"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    with serve(tmp_path, PATH=str(tools), HOME=str(tmp_path), TMPDIR=str(tmp_path), ENFORCE_EAGER="0") as served:
        assert served.log.count("no C++ compiler") == 1
        checks = run_checks(connect(served.url, None))
    assert all(check.ok for check in checks), checks


def _read_long_stream(url: str, started: threading.Event) -> None:
    body = {"model": "embedded", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer key-1"}
    try:
        with httpx.stream("POST", f"{url}/completions", json=body, headers=headers, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    started.set()
    except httpx.HTTPError:
        return
