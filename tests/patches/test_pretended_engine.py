"""A real engine with our card patches in place answers what the reference model knows, compiled, then from cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tests.plain_projections import with_plain_projections

from qwen_nvfp4_serve.shims import python_path

SCRIPT = Path(__file__).parent / "pretended_engine.py"
MARK = "PRETENDED "
QUESTIONS = 6

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def ask(folder: Path, questions: Path, cache: Path) -> tuple[dict[str, Any], str]:
    """What the engine answered and counted, and its log."""
    environment = os.environ | {
        "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")),
        "QWEN_NVFP4_BACKEND": "hybrid",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(SCRIPT), str(folder), str(questions)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, log[-4000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return found, log


def test_engine_with_our_block_and_experts_answers_what_the_model_knows(tmp_path: Path) -> None:
    reference = Path(str(resources.files("qwen_nvfp4_serve"))) / "data" / "reference" / "moe"
    folder = with_plain_projections(reference, tmp_path / "model")
    known = json.loads((folder / "known_answers.json").read_text())
    plain = [
        row for row in known if not row["enable_thinking"] and row["expect"].get("content") and not row.get("tools")
    ]
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps([row["messages"] for row in plain[:QUESTIONS]]))
    first, _ = ask(folder, questions, tmp_path / "cache")
    assert first["answers"] == [row["expect"]["content"] for row in plain[:QUESTIONS]]
    text = json.loads((folder / "config.json").read_text())["text_config"]
    layers = text["num_hidden_layers"]
    ran = first["ran"]
    # Prompts are vLLM's block with our experts, tokens after them our block, each once a layer.
    assert ran["experts"] >= QUESTIONS * layers
    assert ran["block"] >= QUESTIONS * layers
    assert ran["experts"] % layers == ran["block"] % layers == 0
    # The delta net's two projections were one product at each of them.
    recurrent = text["layer_types"].count("linear_attention")
    assert ran["projected"] >= (ran["experts"] + ran["block"]) // layers * recurrent > 0
    # A compiled graph that an earlier start left holds our op as well.
    second, log = ask(folder, questions, tmp_path / "cache")
    assert second["answers"] == first["answers"]
    assert (second["ran"]["block"], second["ran"]["projected"] > 0) == (ran["block"], True)
    assert "Directly load" in log, log[-4000:]
