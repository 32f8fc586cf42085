"""Whether the hub would give the model to this user: one question, for as long as a doctor may take."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.parse import quote

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.models import resolve_model

ENDPOINT = "https://huggingface.co"
ANSWER_S = 0.6  # without a network, looking up a name alone may take ten times that


def probe_hub(model: str, token: str | None, cache: Path, environ: Mapping[str, str]) -> dict[str, int]:
    """`hf_status`: what the hub answers for the model's config.json; nothing without an answer in time.

    Nor is anything asked of a model that comes from elsewhere, or whose download has begun.
    """
    try:
        ref = resolve_model(model)
    except UsageError:
        return {}
    if ref.repo is None or (cache / f"models--{ref.repo.replace('/', '--')}").exists():
        return {}
    endpoint = environ.get("HF_ENDPOINT") or ENDPOINT
    url = f"{endpoint.rstrip('/')}/{quote(ref.repo)}/resolve/{ref.revision or 'main'}/config.json"
    return _in_time(url, token) if re.match(r"https?://", url) else {}


def _in_time(url: str, token: str | None) -> dict[str, int]:
    found: dict[str, int] = {}

    def ask() -> None:
        with suppress(OSError, ValueError, HTTPException):
            found["hf_status"] = _status(url, token)

    # Nothing ends a look-up of a name from outside: it is left behind, and ends with the process.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    return dict(found)


def _status(url: str, token: str | None) -> int:
    request = urllib.request.Request(url, method="HEAD")
    if token:
        # Unredirected: where large files lie, the token is nobody's business.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
