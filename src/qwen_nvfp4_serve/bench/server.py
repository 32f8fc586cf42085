"""What a server says of itself: version, cache, and, from its log, the kernels it chose."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx

from qwen_nvfp4_serve.bench.result import ServerFacts
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.smoke import Server

PROBE_TIMEOUT_S = 10.0
# Lines in which vLLM 0.32 and 0.33 and this project's plugin say which implementation they took. A patch that one
# process does not need may serve in another: that line says nothing.
KERNEL_LINE = re.compile(
    r"(?:Using|Selected) .*(?:kernel|backend|attention|experts)|Patch [\w-]+: (?!not needed)|torch\.ops\.qwen_nvfp4",
    re.IGNORECASE,
)
READY_LINE = re.compile(r"^\[qwen-nvfp4 +(\d+(?:\.\d+)?)s\] READY:", re.MULTILINE)
LINE_PREFIX = re.compile(r"^.*?\[[\w.]+:\d+\]\s*")  # `(EngineCore pid=7) INFO 11-30 10:00:00 [cpu.py:104] `
CACHE_METRIC = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def describe_server(server: Server, *, log: Path | None, plan: Path | None) -> ServerFacts:
    """Facts of a running server. log: a file with what it printed. plan: JSON of `qwen-nvfp4 plan --json`.

    Raises UsageError when a file that was named cannot be read.
    """
    root = server.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    with httpx.Client(headers=headers, timeout=PROBE_TIMEOUT_S, trust_env=False) as http:
        version, metrics = _get(http, f"{root}/version"), _get(http, f"{root}/metrics")
    said = None if log is None else _read(log, "--server-log")
    return ServerFacts(
        base_url=server.base_url,
        model=server.model,
        max_model_len=server.max_model_len or None,
        vllm=version_of(version),
        cache=cache_labels(metrics or ""),
        kernels=None if said is None else kernel_lines(said),
        ready_s=None if said is None else ready_seconds(said),
        plan=None if plan is None else _plan(plan),
    )


def cache_labels(metrics: str) -> dict[str, str] | None:
    """The labels of vLLM's cache_config_info in a Prometheus text; None when it is not there."""
    found = CACHE_METRIC.search(metrics)
    return dict(LABEL.findall(found.group(1))) if found else None


def kernel_lines(log: str) -> tuple[str, ...]:
    """Each line of a server's log that names a kernel, once, without time and process."""
    lines = (LINE_PREFIX.sub("", line).strip() for line in log.splitlines() if KERNEL_LINE.search(line))
    return tuple(dict.fromkeys(lines))


def ready_seconds(log: str) -> float | None:
    """Seconds from the start to READY in a log of `qwen-nvfp4 serve`; None when it does not say."""
    found = READY_LINE.search(log)
    return float(found.group(1)) if found else None


def _get(http: httpx.Client, url: str) -> str | None:
    try:
        answer = http.get(url)
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == httpx.codes.OK else None


def version_of(text: str | None) -> str | None:
    """The version in what /version answers; None where it names none."""
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    version = value.get("version") if isinstance(value, dict) else None
    return version if isinstance(version, str) else None


def _plan(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path, "--plan"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"--plan {path}", seen="no JSON object", expected="what `qwen-nvfp4 plan --json` prints")
    return value


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{option} {path}", seen=error.strerror, expected="a readable file") from None
