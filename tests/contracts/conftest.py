"""Contracts are read in vLLM as a CPU server would import it."""

from __future__ import annotations

import pytest

from qwen_nvfp4_serve import shims


@pytest.fixture(scope="session")
def cpu_vllm() -> None:
    """vLLM's CPU build, importable; skips where it is not installed or another platform is detected."""
    shims.install()
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM here is not the CPU build")
