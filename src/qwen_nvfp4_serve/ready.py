"""Is the server ready? Judged by completed requests, never by `/health`, which says 200 while vLLM drains or hangs.

The supervising process records its stage in a small file; `qwen-nvfp4 ready` reads it and asks one token.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.reference import KnownAnswer, given
from qwen_nvfp4_serve.stages import Report, Stage

KEY_VARIABLE = "VLLM_API_KEY"  # as vLLM's process is given it
FIRST_ANSWER_S = 600.0  # a first request may compile kernels
PROBE_S = 15.0  # one token, on a server that may be busy with others
METRICS_S = 5.0
# Any language model continues this; wrong kernels or weights do not (their sign is a long run of "!", token 0).
KNOWN_PROMPT, KNOWN_ANSWER, KNOWN_TOKENS = "1, 2, 3, 4, 5, 6, 7,", "8", 4
# Every one of these stands still when the engine does; cache usage also moves during a long prefill (vLLM 0.32, 0.33).
PROGRESS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc")
ENDED: tuple[Stage, ...] = ("stopped", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the supervising process last reported. url ends in /v1 and is reachable from here; since: epoch seconds."""

    pid: int
    stage: Stage
    message: str
    since: float
    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ready or not, and why in a few words."""

    ready: bool
    reason: str


def state_path(port: int | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the state of the server on `port` is kept: the user's runtime folder, or the temporary one without it.

    port: None in a container, which has one server; `.env` may name another port by now. The folder is not tried out,
    so that a full one hides no server that runs.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    usable = runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK | os.X_OK)
    folder = runtime if runtime and usable else environ.get("TMPDIR") or "/tmp"
    return Path(folder) / ("qwen-nvfp4.json" if port is None else f"qwen-nvfp4-{os.getuid()}-{port}.json")


def recording(report: Report, path: Path, *, url: str, model: str) -> Report:
    """`report`, which also keeps the state file until the server has stopped; notices change nothing.

    A server serves without the file too: that it cannot be kept is said once, as a notice.
    """
    told = False

    def record(stage: Stage, message: str) -> None:
        nonlocal told
        report(stage, message)
        if stage == "notice":
            return
        state = State(pid=os.getpid(), stage=stage, message=message, since=time.time(), url=url, model=model)
        try:
            if stage in ENDED:
                path.unlink(missing_ok=True)
            else:
                write_state(path, state)
        except OSError as error:
            if not told:
                report("notice", f"`qwen-nvfp4 ready` cannot see this server: {path}: {error.strerror or error}")
            told = True

    return record


def write_state(path: Path, state: State) -> None:
    """Replace the file in one step: a reader sees the old or the new state, never a part. Raises OSError."""
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        fresh.write_text(json.dumps(asdict(state)))
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def read_state(path: Path) -> State | None:
    """The recorded state; None when there is none."""
    try:
        return State(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise QwenNvfp4Error(f"the state file {path}", seen=str(error), do="Remove it and start again.") from None


def check_ready(state: State | None, api_key: str | None) -> Verdict:
    """Ready only when the server got READY, is not stopping, and completes a token now or is at work on others."""
    if state is None:
        return Verdict(False, "no server runs")
    if not psutil.pid_exists(state.pid):
        return Verdict(False, "the server has ended")
    if state.stage != "READY":
        return Verdict(False, f"{state.stage}: {state.message.splitlines()[0]}")
    return check_engine(state.url, state.model, api_key)


def check_engine(url: str, model: str, api_key: str | None) -> Verdict:
    """Ready when the server completes a token now, or is at work on others."""
    before = progress(url)
    began = time.monotonic()
    try:
        answer = complete(url, model, api_key, tokens=1, timeout_s=PROBE_S)
    except WrongKeyError as error:
        return Verdict(False, error.sentence())
    if answer is not None:
        return Verdict(True, f"one token in {time.monotonic() - began:.2f} s")
    after = progress(url)
    busy = bool(before and after and before != after)
    idle = f"no token within {PROBE_S:g} s and no progress on other requests"
    return Verdict(busy, "busy: the token is still queued, others are being computed" if busy else idle)


def serving_key(state: State | None) -> str | None:
    """The key that the running server was started with, from its own environment: `.env` may have changed since."""
    for process in _children(state.pid) if state else ():
        with contextlib.suppress(psutil.Error):
            if key := process.environ().get(KEY_VARIABLE):
                return key
    return None


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.Error:
        return []


def pulse(url: str, model: str, api_key: str | None) -> Callable[[], bool]:
    """Asks, each time it is called, whether the server did anything since the last time, or does when asked now.

    Its counters are looked at first, so that a busy server is not asked for more; one that keeps none is not judged.
    """
    seen: Mapping[str, float] | None = None

    def beats() -> bool:
        nonlocal seen
        now = progress(url)
        moved, seen = now is not None and now != seen, now
        return moved or now == {} or check_engine(url, model, api_key).ready

    return beats


def first_answer(url: str, model: str, api_key: str | None, *, known: KnownAnswer | bool) -> bool:
    """True once the server answered; False while it cannot.

    known: what is asked, and must be answered exactly; or whether the continuation that any language model knows must
    be right, or only made of numbers. Raises QwenNvfp4Error for a wrong answer: such a server must not be used.
    """
    if progress(url) is None:
        return False
    if isinstance(known, KnownAnswer):
        return _first_known_answer(url, known, model, api_key)
    answer = complete(url, model, api_key, tokens=KNOWN_TOKENS, timeout_s=FIRST_ANSWER_S)
    if answer is None:
        return False
    if not all(math.isfinite(value) for value in answer.logprobs):
        raise QwenNvfp4Error("the first answer", seen="a probability that is no number", do=WRONG)
    if known and KNOWN_ANSWER not in answer.text:
        raise QwenNvfp4Error(
            f"the first answer, to {KNOWN_PROMPT!r}", seen=answer.text, expected=KNOWN_ANSWER, do=WRONG
        )
    return True


def _first_known_answer(url: str, known: KnownAnswer, model: str, api_key: str | None) -> bool:
    row = _post(f"{url}/chat/completions", known.body(model), api_key, timeout_s=FIRST_ANSWER_S)
    try:
        seen = given(row["choices"][0]["message"]) if row else None
    except (ValueError, KeyError, TypeError, IndexError):
        return False
    if seen is not None and seen != known.expected:
        raise QwenNvfp4Error(
            f"the first answer, to {known.question!r}", seen=seen.shown(), expected=known.expected.shown(), do=WRONG
        )
    return seen is not None


WRONG = "The weights or a kernel are wrong: compare with NVFP4_BACKEND=marlin, or another checkpoint."


class WrongKeyError(UsageError):
    """The server answered HTTP 401."""

    def __init__(self, *, has_key: bool):
        seen = "the server wants another VLLM_API_KEY" if has_key else "the server wants a key"
        super().__init__(f"HTTP 401, {seen}", do="Set VLLM_API_KEY to the key that it was started with.")


@dataclass(frozen=True, slots=True)
class Answer:
    """A completed request: its text and the log-probability of each token."""

    text: str
    logprobs: tuple[float, ...]


def complete(url: str, model: str, api_key: str | None, *, tokens: int, timeout_s: float) -> Answer | None:
    """The greedy continuation of the known prompt; None when it does not come in time, whole, with HTTP 200.

    Raises WrongKeyError for HTTP 401, which no waiting mends.
    """
    body = {
        "model": model,
        "prompt": KNOWN_PROMPT,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 0,
    }
    row = _post(f"{url}/completions", body, api_key, timeout_s=timeout_s)
    try:
        if row is None or row["usage"]["completion_tokens"] != tokens:
            return None
        return Answer(row["choices"][0]["text"], tuple(row["choices"][0]["logprobs"]["token_logprobs"]))
    except (KeyError, TypeError):
        return None


def _post(url: str, body: Mapping[str, Any], api_key: str | None, *, timeout_s: float) -> Any:
    """The JSON of the answer; None when it does not come in time, whole, with HTTP 200. Raises WrongKeyError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.post(url, json=body, headers=headers, timeout=timeout_s, trust_env=False)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise WrongKeyError(has_key=bool(api_key))
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, ValueError):
        return None


def progress(url: str) -> Mapping[str, float] | None:
    """The counters that move while the engine works, summed over their labels; None when nothing answers."""
    try:
        answer = httpx.get(url.removesuffix("/v1") + "/metrics", timeout=METRICS_S, trust_env=False)
        answer.raise_for_status()
        return read_counters(answer.text)
    except httpx.HTTPError:
        return None


def read_counters(text: str) -> Mapping[str, float]:
    """PROGRESS's metrics out of Prometheus text."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in PROGRESS:
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return sums
