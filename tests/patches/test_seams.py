"""The helpers that write to vLLM: they check first, and doing it twice changes nothing."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from qwen_nvfp4_patches import seams
from qwen_nvfp4_serve.errors import UnsupportedHostError


def original(backend: str) -> str:
    return backend


def louder(function: Any) -> Any:
    return lambda backend: function(backend) + "!"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    """A defining module, a vLLM module that imported the function by name, and a stranger that did."""
    found = []
    for name in ("vllm.fake_owner", "vllm.fake_consumer", "stranger"):
        module = ModuleType(name)
        module.select = original  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        found.append(module)
    return found[0], found[1], found[2]


def test_replace_function_reaches_every_vllm_importer_and_no_other(modules: Any) -> None:
    owner, consumer, stranger = modules
    seams.replace_function(owner, "select", louder, parameters=("backend",))
    assert owner.select("a") == consumer.select("a") == "a!"
    assert stranger.select is original


def test_replace_function_twice_wraps_once(modules: Any) -> None:
    owner = modules[0]
    for _ in range(2):
        seams.replace_function(owner, "select", louder, parameters=("backend",))
    assert owner.select("a") == "a!"


def doubled(function: Any) -> Any:
    return lambda backend: function(backend) * 2


@pytest.mark.parametrize("makers", [(louder, doubled), (doubled, louder)])
def test_replace_function_by_two_puts_one_around_the_other_once_each(modules: Any, makers: Any) -> None:
    owner, consumer, stranger = modules
    for make in makers * 2:
        seams.replace_function(owner, "select", make, parameters=("backend",))
    assert owner.select("a") == consumer.select("a") == makers[1](makers[0](original))("a")
    assert seams.stock_of(owner.select) is seams.stock_of(original) is stranger.select is original


def test_replace_function_again_checks_the_parameters_of_vllms_own(modules: Any) -> None:
    owner = modules[0]
    seams.replace_function(owner, "select", lambda _: lambda *words: str(words), parameters=("backend",))
    seams.replace_function(owner, "select", louder, parameters=("backend",))
    assert owner.select("a") == "('a',)!"


def test_replace_function_with_other_parameters_is_refused_untouched(modules: Any) -> None:
    owner = modules[0]
    with pytest.raises(UnsupportedHostError, match="seen backend, expected backend, layer"):
        seams.replace_function(owner, "select", louder, parameters=("backend", "layer"))
    assert owner.select is original


def test_require_attribute_absent_names_the_place() -> None:
    with pytest.raises(UnsupportedHostError, match=r"fake\.gone: seen absent"):
        seams.require_attribute(ModuleType("fake"), "gone")


def test_add_once_puts_first_and_never_twice() -> None:
    items: list[type] = [int]
    for _ in range(2):
        seams.add_once(items, str, first=True)
        seams.add_once(items, bytes)
    assert items == [str, int, bytes]
