"""What vLLM files compiled graphs under: the patches and the choice of kernels are part of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from qwen_nvfp4_patches import compiled_identity, seams

NAMES = ("aot_compile_hash_factors", "get_inductor_factors")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    compiled_identity.identity.cache_clear()
    yield
    compiled_identity.identity.cache_clear()


def changed(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    compiled_identity.identity.cache_clear()
    return compiled_identity.identity()


def test_identity_is_of_the_choice_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QWEN_NVFP4_BACKEND", raising=False)
    first = compiled_identity.identity()
    assert changed(monkeypatch) == first
    assert changed(monkeypatch, QWEN_NVFP4_BACKEND="hybrid") not in (
        first,
        changed(monkeypatch, QWEN_NVFP4_BACKEND="stock"),
    )


def test_identity_is_of_every_patchs_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in compiled_identity.SOURCES.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = compiled_identity.identity()
    monkeypatch.setattr(compiled_identity, "SOURCES", tmp_path)
    assert changed(monkeypatch) == first
    (tmp_path / "gpu_whole_rows.py").write_text("# another\n")
    second = changed(monkeypatch)
    (tmp_path / "gpu_whole_rows.py").rename(tmp_path / "renamed.py")
    assert len({first, second, changed(monkeypatch)}) == 3


@pytest.mark.usefixtures("cpu_vllm")
def test_vllm_files_compiled_graphs_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.compilation import caching, compiler_interface
    from vllm.config import VllmConfig

    modules = {NAMES[0]: (caching,), NAMES[1]: (compiler_interface, caching)}
    for name, holders in modules.items():
        for module in holders:
            monkeypatch.setattr(module, name, seams.stock_of(getattr(module, name)))
    stock = compiler_interface.get_inductor_factors()
    compiled_identity._apply()
    compiled_identity._apply()
    ours = compiled_identity.identity()
    assert compiler_interface.get_inductor_factors() == [*stock, ours]
    assert caching.get_inductor_factors is compiler_interface.get_inductor_factors
    factors = caching.aot_compile_hash_factors(VllmConfig())
    assert factors.count(ours) == 1 or factors[-1] == ours
    # what vLLM calls in the place where it compiles
    adaptor: Any = compiler_interface.InductorAdaptor()
    config = SimpleNamespace(compute_hash=lambda: "a")
    before = adaptor.compute_hash(config)
    monkeypatch.setattr(compiled_identity, "identity", lambda: "another")
    assert adaptor.compute_hash(config) != before
