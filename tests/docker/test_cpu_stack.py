"""`docker compose up -d --wait cpu`, used and mistreated as people do. The tests run in order on one stack."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from typing import Any

import httpx
import openai
import pytest
from engine import docker, need
from stack import KEY, Stack, wait_until

pytestmark = pytest.mark.docker
LONG = 4000  # tokens: nearly the embedded model's context, many times SHUTDOWN_TIMEOUT_S


def test_up_cpu_starts_exactly_one_server(stack: Stack) -> None:
    rows = [json.loads(line) for line in stack.compose("ps", "-a", "--format", "json").stdout.splitlines()]
    assert [(row["Service"], row["Health"]) for row in rows] == [("cpu", "healthy")]


def test_up_stages_are_json_lines_in_order(stack: Stack) -> None:
    stages = [row["stage"] for row in stack.stages()]
    wanted = ["preflight", "load", "warm-up", "READY"]
    assert [stage for stage in dict.fromkeys(stages) if stage in wanted] == wanted
    assert "http://127.0.0.1" in stack.stages()[-1]["message"]


def test_health_is_good_only_after_the_first_answer(stack: Stack) -> None:
    """The engine keeps five results: those that failed came before READY, those that passed after it."""
    lines = need(docker(), "logs", "--timestamps", stack.container()).splitlines()
    ready_at = next(line.split(" ", 1)[0] for line in lines if '"stage": "READY"' in line)
    results = stack.inspect()["State"]["Health"]["Log"]
    passed = [instant(row["End"]) for row in results if row["ExitCode"] == 0]
    assert passed
    assert min(passed) >= instant(ready_at)
    assert all("not ready" in row["Output"] for row in results if row["ExitCode"] != 0)


def instant(text: str) -> float:
    """Epoch seconds of an RFC 3339 time, whatever its digits."""
    return datetime.fromisoformat(text.rstrip("Z")[:26]).timestamp()


def test_container_is_not_root_and_its_root_is_read_only(stack: Stack) -> None:
    assert stack.execute("id", "-u").stdout.strip() == "1000"
    assert "Read-only file system" in stack.execute("touch", "/opt/x").stderr
    assert (
        stack.execute("sh", "-c", "cp /bin/true /tmp/t && /tmp/t && touch /cache/t && rm /tmp/t /cache/t").returncode
        == 0
    )
    host = stack.inspect()["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert not host["Privileged"]


def test_only_loopback_and_only_the_port_are_published(stack: Stack) -> None:
    ports = stack.inspect()["NetworkSettings"]["Ports"]
    published = [(port, row["HostIp"], row["HostPort"]) for port, rows in ports.items() for row in rows or []]
    assert published == [(f"{stack.port}/tcp", "127.0.0.1", str(stack.port))]


def test_key_is_asked_for_and_shown_nowhere(stack: Stack) -> None:
    assert httpx.get(f"{stack.url}/models", trust_env=False).status_code == 401
    assert stack.post({"prompt": "1, 2", "max_tokens": 1}).status_code == 200
    assert KEY not in need(docker(), "inspect", stack.container())
    assert KEY not in stack.logs()


def test_smoke_finds_the_server_by_its_alias(stack: Stack) -> None:
    done = stack.compose("run", "--rm", "smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "http://server:" in done.stdout


def test_bench_measures_the_server_and_keeps_its_results(stack: Stack) -> None:
    done = stack.compose("run", "--rm", "bench", "--prompt", "64", "--generate", "8", "--runs", "1", "--warmup", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    listed = stack.compose("run", "--rm", "--entrypoint", "find", "bench", "/results", "-name", "result.json")
    assert listed.stdout.count("result.json") == 1


def test_openai_client_from_outside_streams_an_answer(stack: Stack) -> None:
    client = openai.OpenAI(base_url=stack.url, api_key=KEY, max_retries=0)
    chunks = list(
        client.chat.completions.create(
            model="embedded",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=64,
            temperature=0,
            stream=True,
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices).strip() == "Paris"
    assert any(chunk.choices and chunk.choices[0].finish_reason for chunk in chunks)


@pytest.mark.parametrize("title", ["VLLM::EngineCor", pytest.param("VLLM::Worker", marks=pytest.mark.slow)])
def test_kill_of_the_engine_ends_the_container_and_it_serves_again(stack: Stack, title: str) -> None:
    lives = stack.inspect()["RestartCount"]
    send(stack, "KILL", title)
    wait_until("the container ends", lambda: stack.inspect()["RestartCount"] == lives + 1, within_s=10)
    assert "ended by itself" in last_failure(stack, lives + 1)


def test_engine_that_hangs_is_unhealthy_although_health_says_200_then_ended_and_serves_again(stack: Stack) -> None:
    """HANG_TIMEOUT_S is 60; the next look after it may come 50 s later."""
    lives = stack.inspect()["RestartCount"]
    send(stack, "STOP", "VLLM::EngineCor")
    wait_until("it is unhealthy", lambda: stack.health() == "unhealthy", within_s=110, every_s=1)
    assert httpx.get(f"{stack.url.removesuffix('/v1')}/health", trust_env=False).status_code == 200
    wait_until("the container ends", lambda: stack.inspect()["RestartCount"] == lives + 1, within_s=120)
    assert "HANG_TIMEOUT_S=60" in last_failure(stack, lives + 1)


@pytest.mark.slow
def test_supervisor_that_is_killed_ends_the_container_and_it_serves_again(stack: Stack) -> None:
    lives = stack.inspect()["RestartCount"]
    send(stack, "KILL", "qwen-nvfp4")
    wait_until("the container ends", lambda: stack.inspect()["RestartCount"] == lives + 1, within_s=10)
    serves_again(stack)


def send(stack: Stack, name: str, title: str) -> None:
    """A signal to every process of that title inside; the container may end under the command (137)."""
    kill = f'for p in /proc/[0-9]*; do [ "$(cat $p/comm)" = {title} ] && kill -{name} "${{p#/proc/}}"; done; true'
    assert stack.execute("sh", "-c", kill).returncode in (0, 137)


def last_failure(stack: Stack, count: int) -> str:
    """What the last of `count` failures said, once the server is back."""
    serves_again(stack)
    failed = [row for row in stack.stages() if row["stage"] == "failed"]
    assert len(failed) == count
    return str(failed[-1]["message"])


def serves_again(stack: Stack) -> None:
    """Returns when the restarted container is healthy and answers."""
    wait_until("it serves again", lambda: stack.health() == "healthy", within_s=300, every_s=2)
    assert stack.post({"prompt": "1, 2", "max_tokens": 1}).status_code == 200


def test_edited_env_file_leaves_the_running_server_healthy(stack: Stack) -> None:
    """It is read at a start; the health check asks with the key that the server was started with."""
    env, key = stack.folder / ".env", stack.folder / "secrets" / "key"
    before = env.read_text()
    try:
        env.write_text(before + "MAX_MODEL_LENGTH=1\n")
        key.write_text("sk-of-tomorrow")
        done = stack.execute("qwen-nvfp4", "ready")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        env.write_text(before)
        key.write_text(KEY)


def test_stop_ends_four_open_streams_properly_and_takes_no_new_work(stack: Stack) -> None:
    """Two streams fit into SHUTDOWN_TIMEOUT_S and finish, two do not and are told so; all four end with [DONE]."""
    streams = [Stream(stack, tokens) for tokens in (300, 300, LONG, LONG)]
    wait_until("all four streams run", lambda: all(stream.lines for stream in streams), within_s=60, every_s=0.05)
    stopping = threading.Thread(target=stack.compose, args=("stop", "cpu"))
    stopping.start()
    wait_until("the drain is seen", lambda: refuses(stack), within_s=8, every_s=0.2)
    assert stack.execute("qwen-nvfp4", "ready").returncode == 1
    for stream in streams:
        stream.join(timeout=60)
    stopping.join(timeout=60)
    assert all(stream.lines[-1] == "data: [DONE]" for stream in streams), [stream.lines[-2:] for stream in streams]
    last = [stream.lines[-2] for stream in streams]
    assert not any("error" in line for line in last[:2]), f"{last}\n{stack.logs()[-5000:]}"
    assert all(json.loads(line[6:])["error"]["code"] == 503 for line in last[2:]), last
    state = stack.inspect()["State"]
    assert (state["Status"], state["ExitCode"]) == ("exited", 0)
    assert stack.stages()[-1]["stage"] == "stopped"


class Stream(threading.Thread):
    """A streamed completion of exactly `tokens` tokens, read in the background."""

    def __init__(self, stack: Stack, tokens: int) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._url = f"{stack.url}/completions"
        self._body: dict[str, Any] = {
            "model": "embedded", "prompt": "x", "max_tokens": tokens, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        self.start()

    def run(self) -> None:
        """Collect the lines that are not empty."""
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream("POST", self._url, json=self._body, headers=headers, timeout=120, trust_env=False) as answer:
            self.lines.extend(line for line in answer.iter_lines() if line)


def refuses(stack: Stack) -> bool:
    """True when a new request is answered with 503, or nobody listens any more."""
    try:
        return stack.post({"prompt": "x", "max_tokens": 1}, timeout_s=5).status_code == 503
    except httpx.HTTPError:
        return True


def test_down_leaves_nothing_running(stack: Stack) -> None:
    assert stack.compose("down", "cpu").returncode == 0  # as the README says: no profile, but its name
    label = f"label=com.docker.compose.project={stack.name}"
    assert need(docker(), "ps", "-a", "-q", "--filter", label).split() == []
    assert need(docker(), "network", "ls", "-q", "--filter", label).split() == []
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{stack.url}/models", timeout=2, trust_env=False)
