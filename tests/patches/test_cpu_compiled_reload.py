"""What torch loads from the cache can be finalized, whoever compiled it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qwen_nvfp4_patches.cpu_compiled_reload import tolerating, with_tolerant_load


def loaded(compiled: Any) -> Any:
    return SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=compiled))


def test_tolerating_plain_function_gets_nothing_to_finalize() -> None:
    def compiled() -> None: ...

    result = tolerating(lambda _file: loaded(compiled))("file")
    assert result._artifacts.compiled_fn.finalize_loading(object()) is None


def test_tolerating_artifact_of_vllm_is_left_alone() -> None:
    artifact = SimpleNamespace(finalize_loading=lambda config: f"finalized {config}")
    result = tolerating(lambda _file: loaded(artifact))("file")
    assert result._artifacts.compiled_fn.finalize_loading("it") == "finalized it"


def test_with_tolerant_load_restores_torch_also_after_a_failure() -> None:
    import torch

    before = torch.compiler.load_compiled_function

    def original(_model: object, _path: str) -> None:
        assert torch.compiler.load_compiled_function is not before
        raise RuntimeError("corrupt")

    with pytest.raises(RuntimeError, match="corrupt"):
        with_tolerant_load(original)(object(), "path")
    assert torch.compiler.load_compiled_function is before
