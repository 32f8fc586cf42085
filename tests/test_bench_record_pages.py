"""What the pages and charts of the record say."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.bench_visits import DEPTH, H200, RESULTS, ROOT, started, take, visit, words

from qwen_nvfp4_serve.bench.clocks import Clocks
from qwen_nvfp4_serve.bench.engine import EngineResult, read_engine
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
from qwen_nvfp4_serve.models import MODELS
from qwen_nvfp4_serve.planner import PlanModel
from qwen_nvfp4_serve.units import GIB


def test_record_page_says_that_a_size_names_no_code(tmp_path: Path) -> None:
    visit(tmp_path / "visit"), visit(tmp_path / "visit", "27b")
    record = read_card_record(tmp_path, H200, read_visit(tmp_path / "visit", H200))
    assert visits_line(record) is None
    one, other = record
    record = (replace(one, result=replace(one.result, code="5fed8d0")), other)
    assert "35B-A3B of code 5fed8d0, 27B of code that its file does not name" in record_markdown(record, H200)


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
