"""Small questions to a running server."""

from __future__ import annotations

import httpx

ANSWER_TIMEOUT_S = 120.0  # a first request may compile kernels


def ask_once(base_url: str, model_id: str, api_key: str | None) -> bool:
    """True when the server completed a real one-token request; False while it does not listen, loads or fails."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = {"model": model_id, "prompt": "1 + 1 =", "max_tokens": 1, "temperature": 0}
    try:
        with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            health = client.get(base_url.removesuffix("/v1") + "/health", timeout=5.0)
            if health.status_code != httpx.codes.OK:
                return False
            answer = client.post(f"{base_url}/completions", json=body, headers=headers)
            return answer.status_code == httpx.codes.OK and answer.json()["usage"]["completion_tokens"] == 1
    except (httpx.HTTPError, ValueError, KeyError):
        return False
