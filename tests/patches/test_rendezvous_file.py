"""The file through which vLLM's processes find each other lies with their sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_patches import rendezvous_file, seams

pytestmark = pytest.mark.usefixtures("cpu_vllm")


def stock() -> Any:
    from vllm.utils import network_utils

    return seams.stock_of(network_utils.get_file_store_init_method)


def test_file_lies_with_the_sockets_and_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    assert rendezvous_file._needed().needed
    place = rendezvous_file.beside_the_sockets(stock())()
    assert place.startswith(f"file://{tmp_path}/vllm_dist_")
    assert Path(stock()().removeprefix("file://")).parent != tmp_path


def test_patch_is_not_needed_where_the_sockets_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setenv("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    assert not rendezvous_file._needed().needed


def test_apply_reaches_the_executors_that_imported_it_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import network_utils
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    modules = (network_utils, multiproc_executor, uniproc_executor)
    for module in modules:
        monkeypatch.setattr(module, rendezvous_file.NAME, stock())
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    rendezvous_file._apply()
    assert all(str(tmp_path) in module.get_file_store_init_method() for module in modules)
