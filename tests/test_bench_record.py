"""The record of a card: joined from a visit's files, refused where they do not belong together, drawn from JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.bench_visits import H200, command, labelled, started, take, visit, words
from tests.test_bench_engine import made, result

from qwen_nvfp4_serve.bench.engine import EngineResult, dump_engine, read_engine
from qwen_nvfp4_serve.bench.record import (
    file_of,
    read_card_record,
    read_visit,
    record_markdown,
    write_card_record,
)
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import find_gpu


def test_take_joins_the_engines_of_a_size_without_the_visits_folder(tmp_path: Path) -> None:
    assert take(visit(tmp_path / "visit"), tmp_path, H200) == (tmp_path / "engine-35b-h200.json",)
    joined = read_engine(tmp_path / "engine-35b-h200.json")
    assert [run.label for run in joined.runs] == ["stock", "ours"]
    assert list(joined.spec.configurations) == ["stock", "ours"]
    assert joined.spec.model_folder == "qwen3.5-35b-a3b"
    assert "/visit" not in (tmp_path / "engine-35b-h200.json").read_text()
    page = record_markdown(read_card_record(tmp_path, H200), H200)
    assert "| decode, 1 stream, t/s | 200.0 ± 0.0 | 300.0 ± 0.0 (1.50x) |" in page


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: replace(found, vllm="0.34.0"), "vLLM: seen 0.34.0"),
        (lambda found: replace(found, torch="2.14"), "torch"),
        (lambda found: replace(found, spec=replace(found.spec, rounds=9)), "workload"),
        (
            lambda found: replace(found, cards=(replace(found.cards[0], name="NVIDIA B200"),)),
            "card: seen NVIDIA B200",
        ),
        (lambda found: replace(found, cards=None), "card: seen none"),
        (
            lambda found: replace(found, runs=(replace(found.runs[0], core_process=True),)),
            "core_process of its runs: seen True",
        ),
        (
            lambda found: replace(found, runs=(replace(found.runs[0], side_by_side=True),)),
            "side_by_side of its runs: seen True, expected False",
        ),
        (
            lambda found: replace(found, runs=(replace(found.runs[0], kernels_apart=True),)),
            "kernels_apart of its runs: seen True, expected False",
        ),
        (
            lambda found: replace(found, cards=(replace(found.cards[0], driver="1.2"),)),
            "driver: seen 1.2, expected ",
        ),
        (
            lambda found: replace(found, cards=(replace(found.cards[0], power_limit_w=350.0),)),
            "power limit: seen 350.0, expected ",
        ),
    ],
)
def test_take_of_what_does_not_belong_together_is_refused_and_nothing_written(
    tmp_path: Path, change: Callable[[EngineResult], EngineResult], says: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(f"engine-35b-ours.json, {says}")):
        take(visit(tmp_path / "visit", ours=change), tmp_path, H200)
    assert not list(tmp_path.glob("*.json"))


def test_take_keeps_what_is_known_of_the_size_that_a_visit_has_nothing_of(tmp_path: Path) -> None:
    take(visit(tmp_path / "first", "27b"), tmp_path, H200)
    take(visit(tmp_path / "second"), tmp_path, H200)
    both = read_card_record(tmp_path, H200)
    assert [(one.title, [run.label for run in one.result.runs]) for one in both] == [
        ("35B-A3B", ["stock", "ours"]),
        ("27B", ["stock", "ours"]),
    ]


@pytest.mark.parametrize(("gone", "left"), [("stock", "ours"), ("ours", "stock")])
def test_take_of_one_engine_alone_is_refused_and_keeps_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gone: str, left: str
) -> None:
    take(visit(tmp_path / "good"), tmp_path, H200)
    before = {file: file.read_bytes() for file in tmp_path.glob("*.*")}
    visit(tmp_path / "visit", "27b")
    (visit(tmp_path / "visit") / f"engine-35b-{gone}.json").unlink()
    assert command(monkeypatch, "--take", str(tmp_path / "visit"), "--out", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert f"35B-A3B: seen {left} alone, expected stock and ours of one visit" in said
    assert len(said.splitlines()) == 1
    assert {file: file.read_bytes() for file in tmp_path.glob("*.*")} == before


def test_take_of_one_size_alone_keeps_the_others_record_and_says_whose_code_each_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A visit that ended before its other size was whole."""
    out, first, second = (str(tmp_path / name) for name in ("out", "first", "second"))
    visit(tmp_path / "first"), visit(tmp_path / "first", "27b")
    assert command(monkeypatch, "--take", first, "--code", "99d4d53", "--out", out) == 0
    page, other = tmp_path / "out" / "h200.md", tmp_path / "out" / "engine-27b-h200.json"
    kept = other.read_bytes()
    assert page.read_text().count(", code 99d4d53.") == 2
    assert "of a visit of its own" not in page.read_text()
    (visit(tmp_path / "second", "27b") / "engine-27b-ours.json").unlink()
    visit(tmp_path / "second", ours=lambda found: replace(found, runs=(made(400.0, "ours"),)))
    assert command(monkeypatch, "--take", second, "--size", "35b", "--code", "5fed8d0", "--out", out) == 0
    assert other.read_bytes() == kept
    text = page.read_text()
    said = "Each size is of a visit of its own: 35B-A3B of code 5fed8d0, 27B of code 99d4d53."
    assert f"{said} Figures compare within a size alone." in text.splitlines()
    assert "| 200.0 ± 0.0 | 400.0 ± 0.0 (2.00x) |" in text.split("## 27B")[0]
    assert "| 200.0 ± 0.0 | 300.0 ± 0.0 (1.50x) |" in text.split("## 27B")[1]
    assert ", code 5fed8d0" in (tmp_path / "out" / "engine-35b-h200.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--take", "visit", "--size", "35B"), "size: seen 35B, expected 35b or 27b"),
        (("--take", "visit", "--size", "27b"), "seen no engine"),
        (("--take", "gone"), "visit gone: seen no such folder"),
        (("--take", "visit/engine-35b-ours.json"), "visit visit/engine-35b-ours.json: seen no such folder"),
        (("--take", "visit", "--code", "today"), "code: seen Value error, no commit: 7 to 40 digits"),
        (("--size", "35b"), "seen no --take"),
        (("--code", "5fed8d0"), "seen no --take"),
    ],
)
def test_command_refuses_a_size_or_code_that_is_none_and_keeps_the_record(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
) -> None:
    take(visit(tmp_path / "visit"), tmp_path, H200)
    before = {file: file.read_bytes() for file in tmp_path.glob("*.*")}
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *words, "--out", str(tmp_path)) == 2
    assert says in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.glob("*.*")} == before


@pytest.mark.parametrize(
    ("labels", "seen"), [(("stock",), "stock"), (("ours", "stock"), "ours, stock"), (("more",), "more")]
)
def test_take_of_a_run_under_another_name_than_its_files_is_refused(
    tmp_path: Path, labels: tuple[str, ...], seen: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(f"engine-35b-ours.json, label of its runs: seen {seen}, expected")):
        take(visit(tmp_path / "visit", ours=labelled(*labels)), tmp_path, H200)


def test_take_of_a_configuration_under_another_name_than_its_run_is_refused(tmp_path: Path) -> None:
    def change(found: EngineResult) -> EngineResult:
        return replace(found, spec=replace(found.spec, configurations={"stock": {}}))

    with pytest.raises(UsageError, match=re.escape("engine-35b-ours.json, spec.configurations: seen stock, expected")):
        take(visit(tmp_path / "visit", ours=change), tmp_path, H200)


@pytest.mark.parametrize("labels", [("ours", "stock"), ("ours", "ours"), ("ours",), ("stock", "ours", "more")])
def test_record_whose_columns_are_not_stock_and_ours_is_refused(tmp_path: Path, labels: tuple[str, ...]) -> None:
    file_of(tmp_path, "35b", H200).write_bytes(dump_engine(labelled(*labels)(result())))
    with pytest.raises(UsageError, match=rf"engine-35b-h200\.json, label of its runs: seen {', '.join(labels)}"):
        read_card_record(tmp_path, H200)


def test_record_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"engine-35b-h200\.json"):
        read_card_record(tmp_path, H200)
    with pytest.raises(UsageError, match="no engine"):
        take(tmp_path, tmp_path, H200)


def test_record_under_the_name_of_another_card_is_refused(tmp_path: Path) -> None:
    file_of(tmp_path, "35b", find_gpu("rtx-5090")).write_bytes(dump_engine(result()))
    with pytest.raises(UsageError, match=r"NVIDIA H200.*RTX 5090"):
        read_card_record(tmp_path, find_gpu("rtx-5090"))


def test_command_writes_and_draws_what_a_visit_found_starts_and_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = partial(started, side_by_side=False)
    visit(tmp_path / "visit", stock=alone, ours=alone)
    out = tmp_path / "out"
    assert command(monkeypatch, "h200", "--take", str(tmp_path / "visit"), "--out", str(out)) == 0
    assert {"h200.md", "h200-35b.png", "h200-beside.svg"} <= {file.name for file in out.iterdir()}
    page = (out / "h200.md").read_text()
    assert "| weights in memory, GiB | 21.00 | 21.00 |" in page
    assert "| start from empty caches, s | 60 | 60 |" in page
    assert "| start from the caches of the first, s | 72 | 72 |" in page
    assert "![memory and start](h200-35b-costs.png)" in page
    drawn = words(out / "h200-35b-costs.svg")
    assert {"stock: weights", "stock: empty caches", "ours: caches filled", "72.0", "60.0", "21.0"} <= set(drawn)


def test_command_of_a_folder_without_an_engine_is_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    for out in ("docs/results", "own"):
        assert command(monkeypatch, "--out", str(tmp_path / out)) == 2
        assert "no engine of this card" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["own"]  # no folder that was not there


def wrong(path: str, value: str) -> Callable[[str], str]:
    """Puts `value` in a result's JSON where `path` leads."""

    def change(text: str) -> str:
        found = at = json.loads(text)
        *way, last = path.split(".")
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
        at[int(last) if isinstance(at, list) else last] = json.loads(value)
        return json.dumps(found)

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("runs.0.decode.1.median", "Infinity"),
        ("runs.0.decode.1.median", "NaN"),
        ("runs.0.decode.1.median", "0"),
        ("runs.0.decode.1.median", "1e308"),
        ("runs.0.model_bytes", "1" + "0" * 400),
        ("runs.0.decode.1.std", "-1"),
        ("runs.0.decode.1.std", "7"),
        ("runs.0.decode.1.mean", "NaN"),
        ("runs.0.decode.1.low", "Infinity"),
        ("runs.0.decode.1.high", "0"),
        ("runs.0.decode.1.values", "[]"),
        ("runs.0.decode.1.values.1", "NaN"),
        ("runs.0.decode.1.median", "201"),
        ("runs.0.prefill.8192.high", "6999"),
        ("runs.0.depths.65536.decode", "0"),
        ("runs.0.depths.65536.decode", "1e-300"),
        ("runs.0.decode", "{}"),
        ("runs.0.prefill", "{}"),
        ("runs.0.depths", "{}"),
        ("runs.0.kernels_at.1", "[]"),
        ("cards.0.power_limit_w", "NaN"),
        ("cards.0.sm_clock_mhz", "Infinity"),
        ("spec.prompt", "-500"),
        ("spec.prompt", "1000000000000"),
        ("spec.short", "-1"),
        ("spec.long", "1000000000000"),
        ("spec.rounds", "0"),
        ("spec.streams", "[]"),
        ("spec.streams", "[0]"),
    ],
)
def test_command_take_of_what_cannot_be_drawn_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str, value: str
) -> None:
    take(visit(tmp_path / "good"), tmp_path, H200)
    before = {file: file.read_bytes() for file in tmp_path.glob("*.*")}
    visit(tmp_path / "visit")
    for file in (tmp_path / "visit").iterdir():
        file.write_text(wrong(path, value)(file.read_text()))
    assert command(monkeypatch, "--take", str(tmp_path / "visit"), "--out", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert f"engine-35b-stock.json, {path}: seen" in said
    assert len(said.splitlines()) == 1
    assert {file: file.read_bytes() for file in tmp_path.glob("*.*")} == before


def test_nothing_is_written_that_could_not_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no NaN: what was written in its place is another option."""
    take(visit(tmp_path / "good"), tmp_path, H200)
    before = {file: file.read_bytes() for file in tmp_path.glob("*.*")}
    stock = visit(tmp_path / "visit") / "engine-35b-stock.json"
    stock.write_text(wrong("spec.configurations.stock.a", "NaN")(stock.read_text()))
    assert command(monkeypatch, "--take", str(tmp_path / "visit"), "--out", str(tmp_path)) == 2
    assert "engine-35b-h200.json" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.glob("*.*")} == before


def test_record_whose_charts_fail_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take(visit(tmp_path / "good"), tmp_path, H200)
    before = {file: file.read_bytes() for file in tmp_path.glob("*.*")}

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qwen_nvfp4_serve.bench.record_charts.draw_record", fail)
    seen = visit(tmp_path / "visit", ours=lambda found: replace(found, runs=(made(400.0, "ours"),)))
    with pytest.raises(KeyboardInterrupt):
        write_card_record(tmp_path, H200, read_visit(seen, H200))
    assert {file: file.read_bytes() for file in tmp_path.glob("*.*")} == before
