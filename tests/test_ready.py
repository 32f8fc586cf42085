"""Readiness against a small stand-in for the server: only a completed request counts, and only the right answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.http_stand_in import running

from qwen_nvfp4_serve import ready
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.reference import EMBEDDED, read_answers, ready_answer
from qwen_nvfp4_serve.stages import Stage


class Engine:
    """What the stand-in answers: text of the completion (None: nothing in time), its logprob, a token counter."""

    def __init__(self) -> None:
        self.text: str | None = " 8"
        self.logprob = -0.5
        self.counter = 7.0
        self.counter_step = 0.0
        self.counters = True
        self.status = 200
        self.keys: list[str | None] = []


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    release = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            engine.counter += engine.counter_step
            tokens = f'vllm:generation_tokens_total{{model="m"}} {engine.counter}\n' if engine.counters else ""
            self._send(f"{tokens}other 3\n".encode())

        def do_POST(self) -> None:
            engine.keys.append(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if engine.text is None:
                release.wait(5)
                return
            if self.path.endswith("/chat/completions"):
                message = {"content": engine.text}
                self._send(json.dumps({"choices": [{"message": message}]}).encode())
                return
            tokens = body["max_tokens"]
            choice = {"text": engine.text, "logprobs": {"token_logprobs": [engine.logprob] * tokens}}
            self._send(json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode())

        def _send(self, content: bytes) -> None:
            self.send_response(engine.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        try:
            yield f"{url}/v1"
        finally:
            release.set()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "PROBE_S", 1.5)
    monkeypatch.setattr(ready, "FIRST_ANSWER_S", 1.5)


def state(url: str, stage: Stage = "READY", **changes: Any) -> ready.State:
    fields = {"pid": os.getpid(), "stage": stage, "message": "m", "since": 0.0, "url": url, "model": "m"}
    return ready.State(**{**fields, **changes})


def test_check_ready_after_a_token_is_ready_and_sends_the_key() -> None:
    engine = Engine()
    with serving(engine) as url:
        verdict = ready.check_ready(state(url), "sk-1")
    assert verdict.ready, verdict
    assert engine.keys == ["Bearer sk-1"]


@pytest.mark.parametrize("stage", ["preflight", "load", "compile", "warm-up", "stopping", "stopped", "failed"])
def test_check_ready_in_any_other_stage_is_not_ready_although_the_server_answers(stage: Stage) -> None:
    engine = Engine()
    with serving(engine) as url:
        verdict = ready.check_ready(state(url, stage), None)
    assert not verdict.ready
    assert verdict.reason.startswith(stage)
    assert engine.keys == []


def test_check_ready_without_a_state_or_its_process_is_not_ready() -> None:
    assert not ready.check_ready(None, None).ready
    assert not ready.check_ready(state("http://127.0.0.1:9/v1", pid=2**22 + 1), None).ready


def test_check_ready_engine_that_stands_still_is_not_ready() -> None:
    engine = Engine()
    engine.text = None
    with serving(engine) as url:
        verdict = ready.check_ready(state(url), None)
    assert not verdict.ready
    assert "no progress" in verdict.reason


def test_check_ready_engine_that_is_busy_with_others_is_ready() -> None:
    engine = Engine()
    engine.text, engine.counter_step = None, 1.0
    with serving(engine) as url:
        verdict = ready.check_ready(state(url), None)
    assert verdict.ready
    assert "busy" in verdict.reason


def test_check_ready_refusing_server_is_not_ready() -> None:
    engine = Engine()
    engine.status = 503
    with serving(engine) as url:
        assert not ready.check_ready(state(url), None).ready


@pytest.mark.parametrize("key", ["sk-wrong", None])
def test_check_ready_wrong_key_names_the_status_and_the_setting(key: str | None) -> None:
    engine = Engine()
    engine.status = 401
    with serving(engine) as url:
        verdict = ready.check_ready(state(url), key)
    assert not verdict.ready
    assert "HTTP 401" in verdict.reason
    assert "VLLM_API_KEY" in verdict.reason
    assert "sk-wrong" not in verdict.reason


def test_check_ready_nobody_listening_is_not_ready() -> None:
    assert not ready.check_ready(state("http://127.0.0.1:9/v1"), None).ready


@pytest.mark.parametrize("known", [True, False])
def test_first_answer_right_is_true(known: bool) -> None:
    with serving(Engine()) as url:
        assert ready.first_answer(url, "m", None, known=known) is True


def test_first_answer_not_there_yet_is_false() -> None:
    engine = Engine()
    engine.text = None
    with serving(engine) as url:
        assert ready.first_answer(url, "m", None, known=True) is False
    assert ready.first_answer("http://127.0.0.1:9/v1", "m", None, known=True) is False


def test_first_answer_wrong_is_an_error_for_a_model_that_must_know() -> None:
    engine = Engine()
    engine.text = "!!!!"
    with serving(engine) as url:
        with pytest.raises(QwenNvfp4Error, match="seen !!!!, expected 8"):
            ready.first_answer(url, "m", None, known=True)
        assert ready.first_answer(url, "m", None, known=False) is True


def test_first_answer_of_a_reference_model_must_be_exact() -> None:
    known = ready_answer(read_answers(EMBEDDED))
    assert known is not None
    engine = Engine()
    with serving(engine) as url:
        engine.text = known.expected.content
        assert ready.first_answer(url, "m", None, known=known) is True
        engine.text = known.expected.content[:-1]
        with pytest.raises(QwenNvfp4Error, match=re.escape(f"expected '{known.expected.content}'")):
            ready.first_answer(url, "m", None, known=known)
        engine.status = 503
        assert ready.first_answer(url, "m", None, known=known) is False
    assert ready.first_answer("http://127.0.0.1:9/v1", "m", None, known=known) is False


def test_first_answer_not_a_number_is_an_error_for_every_model() -> None:
    engine = Engine()
    engine.logprob = float("nan")
    with serving(engine) as url, pytest.raises(QwenNvfp4Error, match="no number"):
        ready.first_answer(url, "m", None, known=False)


def test_recording_keeps_the_last_stage_and_passes_everything_on(tmp_path: Path) -> None:
    path, seen = tmp_path / "state.json", []
    report = ready.recording(lambda stage, message: seen.append((stage, message)), path, url="u", model="m")
    assert ready.read_state(path) is None
    report("load", "first")
    report("notice", "by the way")
    found = ready.read_state(path)
    assert found is not None
    assert (found.stage, found.message, found.pid) == ("load", "first", os.getpid())
    assert seen == [("load", "first"), ("notice", "by the way")]
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_read_state_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("{")
    with pytest.raises(QwenNvfp4Error, match=r"state\.json"):
        ready.read_state(path)


def test_state_path_differs_by_port_and_follows_the_runtime_folder(tmp_path: Path) -> None:
    assert ready.state_path(1, {"XDG_RUNTIME_DIR": str(tmp_path)}).parent == tmp_path
    assert ready.state_path(1, {}) != ready.state_path(2, {})
    assert ready.state_path(1, {"TMPDIR": "/var/tmp"}).parent == Path("/var/tmp")


def test_state_path_full_temporary_folder_still_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", full)
    assert ready.state_path(None, {}) == Path("/tmp/qwen-nvfp4.json")


def test_serving_key_is_the_one_that_the_server_was_started_with() -> None:
    environment = os.environ | {"VLLM_API_KEY": "sk-then"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE) as server:
        assert ready.serving_key(state("u")) == "sk-then"
        server.communicate(b"\n")
    assert ready.serving_key(state("u")) is None
    assert ready.serving_key(state("u", pid=2**22 + 1)) is None
    assert ready.serving_key(None) is None


def test_pulse_beats_while_counters_move_and_asks_only_when_they_stand_still() -> None:
    engine = Engine()
    engine.counter_step = 1.0
    with serving(engine) as url:
        beats = ready.pulse(url, "m", None)
        assert [beats(), beats(), beats()] == [True, True, True]
        assert engine.keys == []
        engine.counter_step = 0.0
        assert beats()
        assert len(engine.keys) == 1


def test_pulse_of_an_engine_that_stands_still_does_not_beat_until_it_works_again() -> None:
    engine = Engine()
    engine.text = None
    with serving(engine) as url:
        beats = ready.pulse(url, "m", None)
        assert [beats(), beats(), beats()] == [True, False, False]
        engine.counter_step = 1.0
        assert beats()


def test_pulse_of_a_server_without_counters_is_not_judged() -> None:
    engine = Engine()
    engine.text, engine.counters = None, False
    with serving(engine) as url:
        beats = ready.pulse(url, "m", None)
        assert [beats(), beats()] == [True, True]
    assert not beats()  # nobody listens


def test_state_path_runtime_folder_that_is_no_folder_gives_the_temporary_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for runtime in (tmp_path / "missing", tmp_path / "file"):
        assert ready.state_path(1, {"XDG_RUNTIME_DIR": str(runtime)}).parent == Path("/tmp")


def test_state_path_runtime_folder_that_may_not_be_written_gives_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert ready.state_path(1, {"XDG_RUNTIME_DIR": str(tmp_path)}).parent == Path("/tmp")


def test_recording_file_that_cannot_be_written_is_one_notice_and_no_stop(tmp_path: Path) -> None:
    path, seen = tmp_path / "state.json", []
    (path / "inside").mkdir(parents=True)  # a full folder in its place: neither replaced nor removed
    report = ready.recording(lambda stage, message: seen.append((stage, message)), path, url="u", model="m")
    for stage in ("load", "READY", "stopped"):
        report(stage, "m")  # type: ignore[arg-type]
    assert [stage for stage, _ in seen] == ["load", "notice", "READY", "stopped"]
    assert str(path) in seen[1][1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("stage", ["stopped", "failed"])
def test_recording_an_ended_server_leaves_no_file(tmp_path: Path, stage: Stage) -> None:
    report = ready.recording(lambda *_: None, tmp_path / "state.json", url="u", model="m")
    report("READY", "m")
    assert list(tmp_path.iterdir())
    report(stage, "m")
    assert list(tmp_path.iterdir()) == []


def test_read_counters_sums_over_labels_and_ignores_the_rest() -> None:
    text = 'vllm:prompt_tokens_total{engine="0"} 2.0\nvllm:prompt_tokens_total{engine="1"} 3.0\n# HELP x\nx 1\n'
    assert ready.read_counters(text) == {"vllm:prompt_tokens_total": 5.0}
