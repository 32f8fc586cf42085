"""Contracts are read in whichever vLLM is installed, CPU build or not."""

from __future__ import annotations

import pytest

from qwen_nvfp4_serve import shims


@pytest.fixture(scope="session")
def any_vllm() -> None:
    """An importable vLLM; the shims are idle where it is not the CPU build."""
    shims.install()
    pytest.importorskip("vllm", reason="vLLM is not installed")
