"""Through the real server: an NVFP4 checkpoint and its own BF16 dequantization give the same greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI
from tests.e2e.serving import serve

from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec, write_checkpoint

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
IGNORE_EOS = {"ignore_eos": True}
PROMPTS = ("The quick brown fox", "0123456789" * 20, "def add(a, b):\n    return", "Zwölf Boxkämpfer jagen")


def greedy(folder: Path, spec: CheckpointSpec) -> tuple[list[str], list[list[float]], str]:
    """Text and log-probabilities of every prompt, asked one by one, and the server's log."""
    folder.mkdir()
    checkpoint = write_checkpoint(folder / "model", spec)
    texts, scores = [], []
    with serve(folder, MODEL=str(checkpoint)) as served:
        client = OpenAI(base_url=served.url, api_key="none", max_retries=0)
        for prompt in PROMPTS:
            choice = client.completions.create(
                model="model", prompt=prompt, max_tokens=48, temperature=0, logprobs=1, extra_body=IGNORE_EOS
            ).choices[0]
            texts.append(choice.text)
            scores.append(list(choice.logprobs.token_logprobs or []) if choice.logprobs else [])
        return texts, scores, served.log


@pytest.mark.parametrize(
    ("preset", "style"),
    [
        ("embedded-dense", "modelopt-nvfp4"),
        # in one engine: test_numerics.py; as a server gives it: test_known_answers.py
        pytest.param("embedded", "ct-w4a4", marks=pytest.mark.slow),
        pytest.param("embedded", "modelopt-nvfp4", marks=pytest.mark.slow),
        pytest.param("embedded-dense", "ct-w4a4", marks=pytest.mark.slow),
    ],
)
def test_server_quantized_checkpoint_equals_its_dequantization(tmp_path: Path, preset: str, style: str) -> None:
    spec = CheckpointSpec(architecture=ARCHITECTURES[preset], style=style)
    twin = CheckpointSpec(architecture=ARCHITECTURES[preset], style=style, dequantized=True)
    texts, scores, log = greedy(tmp_path / "quantized", spec)
    twin_texts, twin_scores, twin_log = greedy(tmp_path / "dequantized", twin)
    assert "CpuNvFp4LinearKernel" in log
    assert "CpuNvFp4LinearKernel for" not in twin_log
    assert all(len(row) == 48 for row in scores)
    assert texts == twin_texts
    assert scores == twin_scores
