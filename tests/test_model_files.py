"""A hub model is looked at before it is downloaded: by the headers on this disk, else by those on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tests.checkpoint_files import LAYER, compressed_tensors, gdn_plain, packed_ct, plain, write_config, write_shard
from tests.hub_stand_in import COMMIT, REPO, Hub, serve

from qwen_nvfp4_serve import fetch as fetching
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.fetch import fetch
from qwen_nvfp4_serve.launch import Model
from qwen_nvfp4_serve.model_files import planned_model
from qwen_nvfp4_serve.models import ModelRef, resolve_model
from qwen_nvfp4_serve.planner import PlanModel
from qwen_nvfp4_serve.settings import Settings

MODEL = Model(source=REPO, ids=("mine", REPO), revision=None, local=False)
SHARD = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a sound checkpoint that is in no table; nothing of it is on this disk."""
    folder = tmp_path / "origin"
    write_config(folder, quantization_config=compressed_tensors(ignore=["lm_head"]))
    write_shard(folder / SHARD, packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | plain("lm_head", 64, 64))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "DISK_MARGIN_BYTES", 0)
    with serve({path.name: path.read_bytes() for path in folder.iterdir()}) as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        yield running


def planned(*, ref: ModelRef | None = None, ask_hub: bool = True, **env: Any) -> tuple[PlanModel | None, list[str]]:
    rows: list[str] = []
    settings = Settings(**env)
    found = planned_model(
        ref or resolve_model(REPO), MODEL, settings, lambda _stage, text: rows.append(text), ask_hub=ask_hub
    )
    return found, rows


def test_planned_model_in_no_table_takes_the_dims_of_its_config_on_the_hub(hub: Hub) -> None:
    found, rows = planned()
    assert found is not None
    assert (found.name, found.dims.layers, found.has_mtp, rows) == ("mine", 64, False, [])
    asked = [wanted for _, path, wanted in hub.log if path.endswith(SHARD)]
    assert asked
    assert all(asked)  # ranges, never the file


def test_planned_model_with_a_fault_is_refused_before_its_download(hub: Hub, tmp_path: Path) -> None:
    write_shard(tmp_path / SHARD, packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | gdn_plain())
    hub.files = {**hub.files, SHARD: (tmp_path / SHARD).read_bytes()}
    with pytest.raises(QwenNvfp4Error, match="is BF16, but the config makes it NVFP4"):
        planned()
    assert not (tmp_path / "cache").exists()


def test_planned_model_without_a_drafter_is_refused_when_drafts_are_asked(hub: Hub) -> None:
    with pytest.raises(QwenNvfp4Error, match="mtp"):
        planned(SPECULATIVE_TOKENS=2)


def test_planned_model_that_is_here_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    fetch(REPO, cache=tmp_path / "cache")
    hub.log.clear()
    found, _ = planned()
    assert found is not None
    assert found.dims.layers == 64
    assert hub.log == []


@pytest.mark.parametrize("reason", ["a dry run", "offline", "no answer"])
def test_planned_model_that_nobody_can_look_at_is_the_tables_or_none(hub: Hub, reason: str) -> None:
    hub.status = 503 if reason == "no answer" else None
    offline, ask = reason == "offline", reason != "a dry run"
    assert planned(ask_hub=ask, HF_HUB_OFFLINE=offline)[0] is None
    row = resolve_model("qwen3.5-35b-a3b")
    found, _ = planned(ref=row, ask_hub=ask, HF_HUB_OFFLINE=offline)
    assert found is not None
    assert found.name == "qwen3.5-35b-a3b"
    assert (hub.log == []) is (reason != "no answer")


def test_planned_model_behind_a_gate_is_refused_in_one_line(hub: Hub) -> None:
    hub.status, hub.error_code = 403, "GatedRepo"
    with pytest.raises(QwenNvfp4Error, match="gated"):
        planned()


def test_planned_model_at_a_pinned_revision_is_that_one(hub: Hub) -> None:
    pinned = Model(source=REPO, ids=("mine",), revision=COMMIT, local=False)
    settings = Settings()
    assert planned_model(resolve_model(REPO), pinned, settings, lambda *_: None, ask_hub=True) is not None
    assert all(COMMIT in path for _, path, _ in hub.log)
