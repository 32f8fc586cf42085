"""A quantized checkpoint and its own BF16 dequantization say the same, token for token, through vLLM on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.shims import python_path
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec, Precision, write_checkpoint

ENGINE = Path(__file__).parent / "numerics_engine.py"
MARK = "NUMERICS "
PRESETS = {"moe": "embedded", "dense": "embedded-dense"}
# Each style, and the one whose dequantization it shares: the same weights under other names (tests/test_synthetic.py).
STYLES = {
    "ct-w4a4": "ct-w4a4",
    "ct-w4a16": "ct-w4a4",
    "modelopt-nvfp4": "ct-w4a4",
    "ct-mixed": "ct-mixed",
    "modelopt-mixed": "modelopt-mixed",
}

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True)
class Run:
    """`results` by checkpoint name, and the engine's log."""

    results: dict[str, Any]
    log: str


def run_engine(folder: Path, specs: dict[str, CheckpointSpec], **variables: str) -> Run:
    """Writes each checkpoint and runs them all in one engine process."""
    paths = {name: str(write_checkpoint(folder / name, spec)) for name, spec in specs.items()}
    environment = os.environ | {
        "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "qwen_nvfp4",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, str(ENGINE), *paths.values()], env=environment, capture_output=True, text=True, check=False
    )
    log = done.stdout + done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert answers, log[-4000:]
    by_path = json.loads(answers[-1].removeprefix(MARK))
    return Run({name: by_path[path] for name, path in paths.items()}, log)


def spec(kind: str, style: str, **changes: Any) -> CheckpointSpec:
    return CheckpointSpec(architecture=ARCHITECTURES[PRESETS[kind]], style=style, **changes)


def with_twin(kind: str, style: str, **changes: Any) -> dict[str, CheckpointSpec]:
    """A quantized checkpoint and its BF16 dequantization."""
    name = f"{kind}-{style}"
    return {
        name: spec(kind, style, **changes),
        f"{name}-bf16": spec(kind, style, dequantized=True, **changes),
    }


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One checkpoint of each tool with every kind of layer: NVFP4 experts and linears, FP8 linears, NVFP4 head."""
    specs = with_twin("moe", "ct-w4a4") | with_twin("moe", "modelopt-mixed")
    return run_engine(tmp_path_factory.mktemp("few"), specs)


@pytest.fixture(scope="module")
def all_styles(tmp_path_factory: pytest.TempPathFactory) -> Run:
    specs = {f"{kind}-{style}": spec(kind, style) for kind in PRESETS for style in STYLES}
    for kind in PRESETS:
        specs |= {f"{kind}-{twin}-bf16": spec(kind, twin, dequantized=True) for twin in set(STYLES.values())}
    return run_engine(tmp_path_factory.mktemp("all"), specs)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every matrix with a global scale of its own, GDN quantized as well."""
    specs: dict[str, CheckpointSpec] = {}
    for kind in PRESETS:
        specs |= with_twin(kind, "ct-w4a4", unequal_scales=True, gdn=Precision.NVFP4)
        specs[f"{kind}-modelopt-nvfp4"] = spec(kind, "modelopt-nvfp4", unequal_scales=True, gdn=Precision.NVFP4)
    specs |= with_twin("moe", "modelopt-mixed", unequal_scales=True)
    return run_engine(tmp_path_factory.mktemp("unequal"), specs)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same checkpoints with activations rounded as they declare."""
    specs = {f"moe-{style}": spec("moe", style) for style in ("ct-w4a4", "modelopt-nvfp4", "ct-w4a16")}
    return run_engine(tmp_path_factory.mktemp("rounded"), specs, QWEN_NVFP4_CPU_ACTIVATIONS="w4a4")


@pytest.mark.parametrize("style", ["ct-w4a4", "modelopt-mixed"])
def test_quantized_moe_equals_its_dequantization(few: Run, style: str) -> None:
    assert few.results[f"moe-{style}"] == few.results[f"moe-{style}-bf16"]


def test_log_names_our_classes_and_every_patch(few: Run) -> None:
    for words in (
        "Using CpuNvFp4LinearKernel for NVFP4 GEMM",
        "Using CpuNvFp4Experts on",
        "Selected CpuFp8WeightOnlyLinearKernel",
        "Patch cpu-nvfp4-linear: applied",
        "Patch cpu-nvfp4-moe: applied",
        "Patch fused-scales: applied",
        "Patch cpu-fp8-linear: applied",
        "Patch cpu-mtp-state: applied",
    ):
        assert words in few.log, words


def test_checkpoints_of_different_precision_do_not_agree_by_accident(few: Run) -> None:
    assert few.results["moe-ct-w4a4"] != few.results["moe-modelopt-mixed"]


@pytest.mark.slow
@pytest.mark.parametrize(("style", "twin"), list(STYLES.items()))
@pytest.mark.parametrize("kind", list(PRESETS))
def test_every_style_equals_its_dequantization(all_styles: Run, kind: str, style: str, twin: str) -> None:
    assert all_styles.results[f"{kind}-{style}"] == all_styles.results[f"{kind}-{twin}-bf16"]


@pytest.mark.slow
def test_rounded_activations_change_w4a4_alike_for_both_tools_and_leave_w4a16(rounded: Run, all_styles: Run) -> None:
    assert rounded.results["moe-ct-w4a4"] == rounded.results["moe-modelopt-nvfp4"]
    assert rounded.results["moe-ct-w4a4"] != all_styles.results["moe-ct-w4a4"]
    assert rounded.results["moe-ct-w4a16"] == all_styles.results["moe-ct-w4a16"]
    assert "Using CpuNvFp4W4A4Experts for NVFP4 MoE" in rounded.log


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PRESETS))
def test_unequal_global_scales_in_fused_layers_are_exact(unequal: Run, kind: str) -> None:
    twin = unequal.results[f"{kind}-ct-w4a4-bf16"]
    assert unequal.results[f"{kind}-ct-w4a4"] == twin
    assert unequal.results[f"{kind}-modelopt-nvfp4"] == twin


@pytest.mark.slow
def test_unequal_scales_of_fp8_layers_are_exact(unequal: Run) -> None:
    assert unequal.results["moe-modelopt-mixed"] == unequal.results["moe-modelopt-mixed-bf16"]
