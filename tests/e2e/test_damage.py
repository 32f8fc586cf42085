"""Deliberate damage is seen: through vLLM, the smoke test's questions are answered wrongly, and rightly without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoint_damage import Tensors, drop_global_scale, swizzle_block_scales

from qwen_nvfp4_serve.reference import EMBEDDED
from qwen_nvfp4_serve.shims import python_path

ENGINE = Path(__file__).parent / "damage_engine.py"
MARK = "DAMAGE "
BLOCK_SIZE = "384"  # what the plan gives the embedded model with an FP8 cache
STATES = ("others slot", "lost between chunks", "convolution lost")

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def run_engine(cases: dict[str, tuple[Path, str]]) -> dict[str, list[str]]:
    """Ids of wrong answers by case, all cases in one engine process."""
    environment = os.environ | {
        "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "qwen_nvfp4",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",  # threads that wait for each other on a busy machine take many times longer
    }
    words = json.dumps({case: [str(folder), damage] for case, (folder, damage) in cases.items()})
    done = subprocess.run(
        [sys.executable, str(ENGINE), BLOCK_SIZE, words], env=environment, capture_output=True, text=True, check=False
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert answers, (done.stdout + done.stderr)[-4000:]
    wrong: dict[str, list[str]] = json.loads(answers[-1].removeprefix(MARK))
    return wrong


@pytest.fixture(scope="module")
def states() -> dict[str, list[str]]:
    return run_engine({damage: (EMBEDDED, damage) for damage in ("", *STATES, "bfloat16")})


def test_whole_model_answers_all(states: dict[str, list[str]]) -> None:
    assert states[""] == []


@pytest.mark.parametrize("damage", STATES)
def test_damaged_state_is_caught(states: dict[str, list[str]], damage: str) -> None:
    assert states[damage]


def test_state_in_bfloat16_passes(states: dict[str, list[str]]) -> None:
    assert states["bfloat16"] == []


def swap_two_experts(tensors: Tensors) -> None:
    """The two of the last layer that these questions use most: 13 and 10 % of its routing weight, measured."""
    for name in [name for name in tensors if "language_model.layers.7.mlp.experts.8." in name]:
        other = name.replace("experts.8.", "experts.6.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def double_values(tensors: Tensors) -> None:
    """V twice as large in all layers; q, k and v share a scale in an engine, so the blocks' own are doubled."""
    for name, tensor in tensors.items():
        if ".v_proj.weight_scale" in name:
            tensors[name] = (tensor.float() * 2).to(tensor.dtype)


WEIGHTS = (drop_global_scale, swizzle_block_scales, swap_two_experts, double_values)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Each damage done to a copy of the embedded model."""
    from safetensors.torch import load_file, save_file

    cases = {}
    for damage in WEIGHTS:
        folder = shutil.copytree(EMBEDDED, tmp_path_factory.mktemp("damaged") / damage.__name__)
        tensors = load_file(str(folder / "model.safetensors"))
        damage(tensors)
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        cases[damage.__name__] = (folder, "")
    return run_engine(cases)


@pytest.mark.parametrize("damage", WEIGHTS, ids=lambda damage: damage.__name__)
def test_damaged_weights_are_caught(weights: dict[str, list[str]], damage: Callable[[Tensors], None]) -> None:
    assert weights[damage.__name__]
