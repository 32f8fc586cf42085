"""Tests that look at vLLM itself do it as a CPU server would: behind the shims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(scope="module")
def vllm_parallel(cpu_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    meeting = tmp_path_factory.mktemp("parallel") / "meeting"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture
def patched_experts(vllm_parallel: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Our patches for experts in place; stand-ins by the name of the kernel. vLLM is as before afterwards."""
    from tests.patches.moe_patched import patched_vllm

    yield from patched_vllm(monkeypatch)
