"""Tests that look at vLLM itself do it as a CPU server would: behind the shims."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from qwen_nvfp4_serve.shims import SHIM_FOLDER


def install_shims(folder: Path = SHIM_FOLDER) -> None:
    """What Python does for a process with the shim folder on PYTHONPATH, for this one; once."""
    if any(type(finder).__name__ == "CpuBuildAnswersForVllm" for finder in sys.meta_path):
        return
    spec = importlib.util.spec_from_file_location("sitecustomize", folder / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture(scope="session")
def cpu_vllm() -> None:
    """vLLM's CPU build, importable; skips where it is not installed or another platform is detected."""
    install_shims()
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM here is not the CPU build")
