"""Patches of the HTTP side apply in processes that serve HTTP, and only there."""

from __future__ import annotations

import multiprocessing

import pytest

from qwen_nvfp4_patches.processes import is_worker, serves_http


@pytest.mark.parametrize(("name", "serves"), [("EngineCore", False), ("VllmWorker-0", False), ("ApiServer_1", True)])
def test_serves_http_child_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, serves: bool) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    assert serves_http() is serves


@pytest.mark.parametrize(("name", "worker"), [("EngineCore", False), ("VllmWorker-0", True), ("MainProcess", False)])
def test_worker_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, worker: bool) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    assert is_worker() is worker


def test_serves_http_first_process_does() -> None:
    assert serves_http()
