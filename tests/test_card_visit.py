"""The order of a visit to a card: what runs beside what, and that nothing is timed before all of that is done."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from tests import card_visit


class Rehearsal(card_visit.Visit):
    """Processes that end at once, and a record of what was asked."""

    happened: ClassVar[list[str]] = []

    def start(self, name: str, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        open_gate = any((self.out / f"{name}.{gate}").exists() for gate in ("ready", "go"))
        self.happened.append(f"start {name}" + (" with its gate open" if open_gate else ""))
        if name.startswith("engine-"):
            (self.out / f"{name}.ready").touch()
        return super().start(name, [sys.executable, "-c", "", *command], **more)

    def finish(self, name: str, process: subprocess.Popen[bytes], limit_s: float) -> bool:
        late = not name.startswith("engine-") and any(self.out.glob("*.go"))
        self.happened.append(f"finish {name}" + (" beside what is timed" if late else ""))
        return super().finish(name, process, limit_s)


@pytest.fixture
def visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Where results go, and what has happened."""
    monkeypatch.setattr(card_visit, "Visit", Rehearsal)
    monkeypatch.setattr(card_visit, "this_card", lambda: "90a")
    monkeypatch.setattr(Rehearsal, "happened", [])
    return tmp_path / "out", Rehearsal.happened


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["card_visit", *words])
    card_visit.main()


def test_elections_are_counted_while_the_first_models_engines_start_and_before_anything_is_timed(
    visit: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, happened = visit
    run(monkeypatch, str(out), "--models", "27b", "35b", "--known", "stock", "ours")
    engines = [line for line in happened if not line.split()[1].startswith(("build", "admission"))]
    beside = ["known-stock", "known-ours", "elected"]
    pair = ["engine-27b-stock", "engine-27b-ours"]
    assert engines[:10] == [
        *(f"start {name}" for name in (*pair, *beside)),
        *(f"finish {name}" for name in (*beside, *pair)),
    ]
    assert engines[10:14] == [
        f"{what} engine-35b-{label}" for what in ("start", "finish") for label in ("stock", "ours")
    ]


@pytest.mark.parametrize(("models", "times"), [(("27b",), 0), (("27b", "35b"), 1)])
def test_elections_are_counted_once_and_of_a_mixture_of_experts_alone(
    models: tuple[str, ...], times: int, visit: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, happened = visit
    run(monkeypatch, str(out), "--models", *models, "--parts", "elected")
    assert happened.count("start elected") == happened.count("finish elected") == times


def test_gates_of_an_earlier_visit_to_the_same_folder_let_no_engine_through(
    visit: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, happened = visit
    for _ in range(2):
        run(monkeypatch, str(out), "--models", "27b", "--parts", "engines")
    assert [line for line in happened if line.startswith("start engine-")] == [
        "start engine-27b-stock",
        "start engine-27b-ours",
    ] * 2


def test_restarts_are_those_of_every_models_engines(
    visit: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = visit
    run(monkeypatch, str(out), "--parts", "engines", "--restarts", "2")
    specs = {path.name: json.loads(path.read_text())["restarts"] for path in out.glob("*.spec.json")}
    assert specs == {
        f"engine-{model}-{label}.spec.json": 2 for model in card_visit.MODELS for label in card_visit.LABELS
    }
