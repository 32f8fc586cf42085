"""The record of a card: joined from a visit's files, refused where they do not belong together, drawn from JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.test_bench_engine import made, result

from qwen_nvfp4_serve.bench.clocks import Clocks
from qwen_nvfp4_serve.bench.engine import EngineResult, dump_engine, read_engine
from qwen_nvfp4_serve.bench.landscape import DEPTHS
from qwen_nvfp4_serve.bench.record import (
    file_of,
    read_card_record,
    read_visit,
    record_markdown,
    visits_line,
    write_card_record,
)
from qwen_nvfp4_serve.bench.record_charts import start_bars
from qwen_nvfp4_serve.bench.rows import number
from qwen_nvfp4_serve.bench.statistics import spread
from qwen_nvfp4_serve.cli import main
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import GpuRow, find_gpu
from qwen_nvfp4_serve.models import MODELS
from qwen_nvfp4_serve.planner import PlanModel
from qwen_nvfp4_serve.units import GIB

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
H200 = find_gpu("h200")
DEPTH = 65_536


def part(label: str, rate: float) -> EngineResult:
    """What one engine of a visit leaves: its own configuration in a folder of the visit."""
    whole = result()
    run = replace(made(rate, label), options={"model": "/visit/35b", "kv_cache_dtype": "fp8"})
    return replace(whole, spec=replace(whole.spec, configurations={label: {"a": 1}}), runs=(run,))


def visit(folder: Path, size: str = "35b", **changed: Callable[[EngineResult], EngineResult]) -> Path:
    folder.mkdir(exist_ok=True)
    for label, rate in (("stock", 200.0), ("ours", 300.0)):
        found = changed.get(label, lambda same: same)(part(label, rate))
        (folder / f"engine-{size}-{label}.json").write_bytes(dump_engine(found))
    return folder


def take(seen: Path, folder: Path, card: GpuRow) -> tuple[Path, ...]:
    """Keeps what a visit found, without pages and charts."""
    kept = []
    for size, found in read_visit(seen, card).items():
        kept.append(file_of(folder, size, card))
        kept[-1].write_bytes(dump_engine(found))
    return tuple(kept)


def words(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


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


def test_record_page_says_that_a_size_names_no_code(tmp_path: Path) -> None:
    visit(tmp_path / "visit"), visit(tmp_path / "visit", "27b")
    record = read_card_record(tmp_path, H200, read_visit(tmp_path / "visit", H200))
    assert visits_line(record) is None
    one, other = record
    record = (replace(one, result=replace(one.result, code="5fed8d0")), other)
    assert "35B-A3B of code 5fed8d0, 27B of code that its file does not name" in record_markdown(record, H200)


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


def labelled(*labels: str) -> Callable[[EngineResult], EngineResult]:
    """The run of a file under other names than the file's."""

    def change(found: EngineResult) -> EngineResult:
        runs = tuple(replace(found.runs[0], label=label) for label in labels)
        return replace(found, runs=runs, spec=replace(found.spec, configurations={label: {} for label in labels}))

    return change


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


def test_record_page_says_once_a_size_where_the_card_lowered_its_clocks(tmp_path: Path) -> None:
    capped = Clocks(sm_mhz=1980.0, sm_mhz_low=1830.0, reasons=("sw_power_cap",))

    def hot(found: EngineResult) -> EngineResult:
        return replace(
            found, runs=(replace(found.runs[0], clocks={"decode 1": Clocks(reasons=()), "decode 8": capped}),)
        )

    take(visit(tmp_path / "visit", ours=hot), tmp_path, H200)
    take(visit(tmp_path / "other", "27b"), tmp_path, H200)
    page = record_markdown(read_card_record(tmp_path, H200), H200)
    said = [line for line in page.splitlines() if "lowered its clocks" in line]
    assert said == ["The card lowered its clocks (sw_power_cap) during decode 8 of ours."]
    assert [line for line in page.splitlines() if line.endswith("ours.") and "not recorded" in line] == [
        "What the card's clocks did meanwhile was not recorded: stock, ours."
    ]
    assert "was not recorded: stock.\n" in page


def test_record_page_says_where_the_core_ran_once_a_size(tmp_path: Path) -> None:
    def apart(found: EngineResult) -> EngineResult:
        return replace(found, runs=(replace(found.runs[0], core_process=True),))

    take(visit(tmp_path / "visit", stock=apart, ours=apart), tmp_path, H200)
    take(visit(tmp_path / "other", "27b"), tmp_path, H200)
    page = record_markdown(read_card_record(tmp_path, H200), H200)
    assert [line for line in page.splitlines() if line.startswith("The engine's core")] == [
        "The engine's core had a process of its own.",
        "The engine's core shared the bench's process.",
    ]


def test_record_page_names_the_kernels_that_vllm_was_told_to_use(tmp_path: Path) -> None:
    def marlin(found: EngineResult) -> EngineResult:
        told = found.runs[0].options | {"linear_backend": "marlin", "moe_backend": "marlin"}
        return replace(found, runs=(replace(found.runs[0], options=told),))

    take(visit(tmp_path / "visit", stock=marlin), tmp_path, H200)
    take(visit(tmp_path / "other", "27b"), tmp_path, H200)
    page = record_markdown(read_card_record(tmp_path, H200), H200)
    said = "vLLM was told which of its kernels to use for stock: linear_backend marlin, moe_backend marlin."
    assert page.count("was told which of its kernels") == page.count(said) == 1


def test_record_page_names_the_rates_that_scatter(tmp_path: Path) -> None:
    def scattered(found: EngineResult) -> EngineResult:
        """Standard deviations of 5.1 % and 4.9 % of the median."""
        rates = {1: spread([94.9, 105.1]), 2: spread([95.1, 104.9])}
        return replace(found, runs=(replace(found.runs[0], decode=rates, prefill={8192: spread([6000.0, 8000.0])}),))

    take(visit(tmp_path / "visit", ours=scattered), tmp_path, H200)
    take(visit(tmp_path / "other", "27b"), tmp_path, H200)
    page = record_markdown(read_card_record(tmp_path, H200), H200)
    assert [line for line in page.splitlines() if "scatter" in line] == [
        "Rates that scatter, with a standard deviation above 5 % of the median: decode 1, prefill 8192 of ours."
    ]


def test_record_bounds_are_of_the_weights_that_were_measured() -> None:
    """A step reads all weights but the embedding, so that no bound of the 27B exceeds bandwidth over what it loaded."""
    (whole,) = (one for one in read_card_record(RESULTS, H200) if one.size == "27b")
    at_most = H200.bandwidth_bytes_per_s / (min(run.model_bytes or 0 for run in whole.result.runs) - 2.5 * GIB)
    page = record_markdown((whole,), H200)
    said = re.search(r"\| share of the byte roofline, ([\d.]+) t/s at 272 tokens \|", page)
    assert said is not None
    assert 0.9 * at_most < float(said[1]) < at_most
    assert "| bound of Qwen3.5-27B with GDN in BF16 by bandwidth, " in page
    row = next(row for row in MODELS if row.name == "qwen3.5-27b")
    assert row.dims is not None
    listed = record_markdown((replace(whole, model=PlanModel.from_row(row, row.dims)),), H200)
    assert page.count("| computed |") == listed.count("| computed |") + len(DEPTHS)
    assert "share of the byte roofline," not in listed


def test_record_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"engine-35b-h200\.json"):
        read_card_record(tmp_path, H200)
    with pytest.raises(UsageError, match="no engine"):
        take(tmp_path, tmp_path, H200)


def test_record_under_the_name_of_another_card_is_refused(tmp_path: Path) -> None:
    file_of(tmp_path, "35b", find_gpu("rtx-5090")).write_bytes(dump_engine(result()))
    with pytest.raises(UsageError, match=r"NVIDIA H200.*RTX 5090"):
        read_card_record(tmp_path, find_gpu("rtx-5090"))


def test_record_page_sets_ours_beside_the_seeds_rows_each_with_its_card(tmp_path: Path) -> None:
    take(visit(tmp_path / "visit"), tmp_path, H200)
    take(visit(tmp_path / "visit", "27b"), tmp_path, H200)
    page = record_markdown(read_card_record(tmp_path, H200), H200)
    for row in (
        f"| 35B-A3B | **ours** | {DEPTH:,} tokens | 150.0 | {number(5000)} | H200 | this project |",
        "| 35B-A3B | 35B stack (Marlin) | 4,096 tokens | 196 | 21,000 | GeForce RTX 5090 | authors of the stack |",
        "| 35B-A3B | 35B stack (Marlin) | 262,144 tokens | 156 | 5,000 | GeForce RTX 5090 | authors of the stack |",
        "| 27B | 27B stack, Marlin | not stated | 80 | 4,000 | GeForce RTX 5090 | authors of the stack |",
    ):
        assert row in page
    rows = [line for line in page.splitlines() if line.startswith(("| 35B-A3B |", "| 27B |"))]
    assert all(("H200" in row) != ("RTX 5090" in row) for row in rows)
    assert "costs.png" not in page


def started(found: EngineResult, *, side_by_side: bool) -> EngineResult:
    """The same with what it holds in memory and how long it took to start."""
    costs = {"model_bytes": 21 * GIB, "reserved_bytes": 30 * GIB, "cold": True, "restart_s": (71.0, 73.0)}
    return replace(found, runs=(replace(found.runs[0], side_by_side=side_by_side, **costs),))


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code of `qwen-nvfp4 bench record`."""
    monkeypatch.setattr("sys.argv", ["qwen-nvfp4", "bench", "record", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


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


def test_start_beside_other_engines_is_said_on_page_and_chart(tmp_path: Path) -> None:
    beside = partial(started, side_by_side=True)
    take(visit(tmp_path / "visit", stock=beside, ours=beside), tmp_path, H200)
    record = read_card_record(tmp_path, H200)
    assert "| start from empty caches, beside other engines' starts, s | 60 | 60 |" in record_markdown(record, H200)
    assert [name for name, *_ in start_bars(record[0].result.runs)] == [
        "stock: empty caches, beside others",
        "ours: empty caches, beside others",
        "stock: caches filled",
        "ours: caches filled",
    ]


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


def test_record_in_the_docs_is_what_its_json_says(tmp_path: Path) -> None:
    record = read_card_record(RESULTS, H200)
    assert (RESULTS / "h200.md").read_text() == record_markdown(record, H200), "run `qwen-nvfp4 bench record`"
    for one in record:
        file = file_of(RESULTS, one.size, H200)
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_card_record(tmp_path, H200)
    for chart in tmp_path.glob("*.svg"):
        assert words(RESULTS / chart.name) == words(chart), "run `qwen-nvfp4 bench record`"
        assert (RESULTS / chart.name).with_suffix(".png").exists()


def test_ratios_of_the_readme_are_those_of_the_record() -> None:
    stock, ours = read_engine(file_of(RESULTS, "35b", H200)).runs
    deepest = max(stock.depths)
    ratios = [ours.decode[streams].median / stock.decode[streams].median for streams in (1, 8)]
    ratios.append(ours.depths[deepest].decode / stock.depths[deepest].decode)
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(
        r"decodes 35B-shaped dummy weights ([\d.]+) times as fast as vLLM's own at one stream, ([\d.]+) times at eight "
        r"and ([\d.]+) times behind 256K tokens",
        text,
    )
    assert said is not None
    assert list(said.groups()) == [f"{ratio:.2f}" for ratio in ratios]
    stock, ours = read_engine(file_of(RESULTS, "27b", H200)).runs
    dense = [ours.decode[streams].median / stock.decode[streams].median for streams in (1, 8)]
    assert "a 27B is {:.2f} times as fast at one stream, {:.2f} times at eight".format(*dense) in text
