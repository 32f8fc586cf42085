"""`qwen-nvfp4 kernels`: what it shows of the tables in the cache."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from qwen_nvfp4_serve.cli import kernels
from qwen_nvfp4_serve.dims import dims_from_config
from qwen_nvfp4_serve.errors import UnsupportedHostError, UsageError
from qwen_nvfp4_serve.host import Gpu
from qwen_nvfp4_serve.kernels import admission
from qwen_nvfp4_serve.kernels.admission import Finding, Shape, Table, Verdict, store
from qwen_nvfp4_serve.kernels.admission.shapes import layers_of
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS
from qwen_nvfp4_serve.synthetic import CheckpointSpec
from qwen_nvfp4_serve.synthetic.config import model_config

CARD = Gpu(name="NVIDIA GeForce RTX 5090", capability=(12, 0), memory_bytes=None, free_bytes=None, driver="590.1")
SHAPE = Shape(1024, 2048)
FINDINGS = (
    Finding(candidate="good", shape=SHAPE, verdict=Verdict.ADMITTED, times_us=tuple((m, 1.0) for m in TIMED_TOKENS)),
    Finding(candidate="bad", shape=SHAPE, verdict=Verdict.CRASHED, reason="ended the process: SIGSEGV"),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    monkeypatch.setenv("CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "detect_gpus", lambda: (CARD,))
    return tmp_path


def keep(**facts: str) -> None:
    valid_for = store.facts(CARD) | {"candidates": "good,bad"} | facts
    path = store.path_of(store.folder(), valid_for, [SHAPE])
    store.write(path, Table(facts=valid_for, findings=FINDINGS, took_s=3.0))


def run(*words: str) -> str:
    app = typer.Typer()
    app.callback()(lambda: None)
    kernels.register(app)
    done = CliRunner().invoke(app, ["kernels", *words])
    if done.exception:
        raise done.exception
    return done.output


def test_kernels_shows_who_serves_and_who_was_left_out(cache: Path) -> None:
    keep()
    shown = run()
    assert "RTX 5090" in shown
    assert "holds here" in shown
    assert "[1024, 2048]: M>=1 good (left out: bad crashed: ended the process: SIGSEGV)" in shown


def test_kernels_says_which_table_no_longer_holds(cache: Path) -> None:
    keep(driver="580.0")
    assert "made under other conditions" in run()


def test_kernels_json_has_the_times(cache: Path) -> None:
    keep()
    found = json.loads(run("--json"))
    (table,) = found["tables"]
    assert table["holds"] is True
    assert table["findings"][0]["times_us"][0] == [1, 1.0]


def test_kernels_without_a_table_says_how_to_make_one(cache: Path) -> None:
    assert "NVFP4_BACKEND=hybrid" in run()


def test_kernels_passes_over_what_is_no_regular_file_in_the_cache(cache: Path) -> None:
    keep()
    (store.folder() / "a.json").mkdir()
    (store.folder() / "b.json").symlink_to("b.json")
    os.mkfifo(store.folder() / "c.json")
    (store.folder() / "d.json").symlink_to("nowhere")
    assert len(json.loads(run("--json"))["tables"]) == 1
    assert [store.read(store.folder() / f"{name}.json") for name in "abcd"] == [None] * 4


@pytest.mark.parametrize("cards", ["0", "-1"])
def test_kernels_of_a_model_split_over_no_card_is_refused(cache: Path, cards: str) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    kernels.register(app)
    done = CliRunner().invoke(app, ["kernels", "--config", str(cache), "--tensor-parallel", cards])
    assert done.exit_code == 2
    assert "--tensor-parallel" in done.output


def test_kernels_admission_without_a_card_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "detect_gpus", lambda: ())
    (tmp_path / "config.json").write_text(json.dumps(model_config(CheckpointSpec())))
    with pytest.raises(UnsupportedHostError, match="no NVIDIA card"):
        run("--config", str(tmp_path))


@pytest.mark.parametrize("folder", ["missing", "empty", "broken"])
@pytest.mark.parametrize("cards", [(), (CARD,)])
def test_kernels_admission_of_no_models_folder_is_refused_with_a_card_and_without(
    cache: Path, monkeypatch: pytest.MonkeyPatch, folder: str, cards: tuple[Gpu, ...]
) -> None:
    monkeypatch.setattr(kernels, "detect_gpus", lambda: cards)
    (cache / "empty").mkdir(), (cache / "broken").mkdir()
    (cache / "broken" / "config.json").write_text("{")
    with pytest.raises(UsageError, match=rf"{folder}/config\.json cannot be read .*--config") as caught:
        run("--config", folder)
    assert "MODEL" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_kernels_admission_asks_for_the_shapes_of_the_config(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def admit(shapes: tuple[Shape, ...], card: Gpu, directory: Path, **more: object) -> None:
        asked.append((shapes, card, directory, more))

    monkeypatch.setattr(kernels, "admit", admit)
    config = model_config(CheckpointSpec())
    (tmp_path / "config.json").write_text(json.dumps(config))
    run("--config", str(tmp_path), "--tensor-parallel", "1")
    linear, plain, experts = asked
    assert len(linear[0]) >= 6
    assert linear[1:] == (CARD, store.folder(), {})
    # First the delta net's two projections of its input as one.
    layers = layers_of(dims_from_config(config))
    together = layers["gdn_qkvz"].n + layers["gdn_ba"].n
    shapes = [(together, layers["gdn_ba"].k), *((shape.n, shape.k) for shape in linear[0])]
    assert [(shape.n, shape.k) for shape in plain[0]] == shapes
    assert {shape.bits for shape in plain[0]} == {16}
    assert plain[3]["names"] == admission.BF16
    text = config["text_config"]
    width, hidden = text["moe_intermediate_size"], text["hidden_size"]
    assert experts[0] == (Shape(2 * width, hidden, text["num_experts"], text["num_experts_per_tok"]),)
    assert experts[3]["names"] == admission.EXPERTS
