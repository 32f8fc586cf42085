"""Two runs side by side: pairs, the odds, the sentence, and the pages and charts of either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.bench.machine import Machine
from qwen_nvfp4_serve.bench.result import ServerFacts
from qwen_nvfp4_serve.cli.bench_screen import screen
from qwen_nvfp4_serve.cli.quality import _show
from qwen_nvfp4_serve.cli.quality import compare as compare_command
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.quality.charts import draw_quality
from qwen_nvfp4_serve.quality.compare import (
    compare,
    comparison_markdown,
    differences,
    draw_comparison,
    sign_test,
    warnings,
)
from qwen_nvfp4_serve.quality.report import headline, quality_markdown
from qwen_nvfp4_serve.quality.result import FORMAT, Outcome, Result, read_result, write_result
from qwen_nvfp4_serve.quality.scoring import Miss
from qwen_nvfp4_serve.quality.summary import needle_grid, rows, wilson
from qwen_nvfp4_serve.quality.task import Exam

SERVER = ServerFacts(
    base_url="http://127.0.0.1:1/v1", model="m", max_model_len=4096, vllm="0.32.0", cache=None, kernels=None,
    ready_s=None, plan=None,
)  # fmt: skip
MACHINE = Machine(
    remote=False, card_name="NVIDIA H200", cards_before=None, cards_after=None, packages={}, python="3", system="s",
    cpu="c", cpu_count=2,
)  # fmt: skip


def made_outcome(number: int, right: bool, **changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "task": f"arithmetic/sum/{number}",
        "family": "arithmetic",
        "kind": "sum",
        "thinking": "off",
        "length": None,
        "depth": None,
        "prompt": f"{number:016x}",
        "question": "what is 1 + 1?",
        "expected": "2",
        "miss": None if right else Miss("wrong", "3 | 4\n<b>"),
        "content": "2" if right else "3",
        "reasoning": "",
        "calls": (),
        "finish_reason": "stop",
        "prompt_tokens": 20,
        "completion_tokens": 1,
        "max_tokens": 256,
        "seconds": 0.5,
    }
    return Outcome(**(values | changes))


def made_result(outcomes: Sequence[Outcome], **changes: Any) -> Result:
    values: dict[str, Any] = {
        "format": FORMAT,
        "complete": True,
        "stopped": None,
        "label": "one",
        "started": "2026-11-30T12:00:00+00:00",
        "seconds": 12.0,
        "project": "0.1.0",
        "exam": Exam(),
        "asked": len(outcomes),
        "notes": (),
        "server": SERVER,
        "machine": MACHINE,
        "outcomes": tuple(outcomes),
    }
    return Result(**(values | changes))


def pair_of(marks: str, **changes: Any) -> tuple[Result, Result]:
    """b: both right, 1 and 2: only one of them, n: neither."""
    first = made_result([made_outcome(place, mark in "b1") for place, mark in enumerate(marks)])
    second = [made_outcome(place, mark in "b2") for place, mark in enumerate(marks)]
    return first, made_result(second, **({"label": "two"} | changes))


@pytest.mark.parametrize(
    ("one", "other", "chance"),
    [(0, 0, 1.0), (1, 0, 1.0), (3, 3, 1.0), (5, 0, 2 / 32), (0, 6, 2 / 64), (1, 9, 22 / 1024), (40, 10, None)],
)
def test_sign_test_is_the_exact_binomial(one: int, other: int, chance: float | None) -> None:
    if chance is None:
        chance = 2 * sum(math.comb(50, heads) for heads in range(11)) / 2**50
    assert sign_test(one, other) == pytest.approx(chance)


def test_sign_test_of_thousands_stays_a_probability() -> None:
    assert sign_test(3000, 3000) == 1.0
    assert 0.0 <= sign_test(6000, 10) < 1e-100


def test_compare_counts_pairs() -> None:
    found = compare(*pair_of("bbb112nn"))
    whole = found.whole
    assert (whole.pairs, whole.both, whole.only_first, whole.only_second, whole.neither) == (8, 3, 2, 1, 2)
    assert found.same_words == 5


@pytest.mark.parametrize(
    ("marks", "begins"),
    [
        ("b" * 9 + "n", "No difference: 9 of 10 right in the first, 9 in the second, and the same ones. With 10 pairs"),
        ("b" * 9 + "1", "No more than chance: 10 of 10 right in the first, 9 in the second; 1 right only in the first"),
        ("b" * 9 + "22222", "No more than chance"),
        ("b" * 9 + "222222", "More than chance, the second is better: 9 of 15 right in the first, 15 in the second"),
        ("b" * 9 + "111111", "More than chance, the first is better"),
    ],
)
def test_compare_sentence_says_what_it_comes_to(marks: str, begins: str) -> None:
    assert compare(*pair_of(marks)).sentence.startswith(begins)


def test_compare_no_difference_says_what_could_go_unseen() -> None:
    assert "up to 10.0 % of the answers" in compare(*pair_of("b" * 30)).sentence
    assert "up to 100.0 % of the answers" in compare(*pair_of("b")).sentence


def test_compare_leaves_out_what_one_lacks_and_says_so() -> None:
    first, second = pair_of("b12n")
    found = compare(first, replace(second, outcomes=second.outcomes[:3]))
    assert found.whole.pairs == 3
    assert warnings(found) == ("1 answers have no partner in the other run and were left out",)


def test_compare_pairs_by_thinking_too() -> None:
    off, on = made_outcome(1, True), made_outcome(1, False, thinking="on")
    found = compare(made_result([off, on]), made_result([on, off]))
    assert (found.whole.both, found.whole.neither) == (1, 1)
    assert [one.name for one in found.kinds] == ["arithmetic, thinking off", "arithmetic, thinking on"]


def test_compare_other_prompts_are_said() -> None:
    first, second = pair_of("bb")
    second = replace(second, outcomes=(second.outcomes[0], replace(second.outcomes[1], prompt="f" * 16)))
    assert "1 of 2 pairs were asked in different words" in warnings(compare(first, second))[0]


@pytest.mark.parametrize("change", [{"seed": 1}, {"set": 2}, {"think_tokens": 1}, {"long_tokens": 99}])
def test_compare_other_questions_are_refused_by_name(change: dict[str, int]) -> None:
    first, second = pair_of("bb")
    (name,) = change
    with pytest.raises(UsageError, match=name):
        compare(first, replace(second, exam=replace(second.exam, **change)))


def test_compare_nothing_in_common_is_refused() -> None:
    first, second = pair_of("bb")
    with pytest.raises(UsageError, match="no question that both asked"):
        compare(first, replace(second, outcomes=()))


def test_differences_name_what_differs() -> None:
    first, second = pair_of("b")
    assert differences(first, second) == ()
    second = replace(
        second,
        complete=False,
        stopped="it was interrupted",
        server=replace(SERVER, cache={"cache_dtype": "fp8"}),
        exam=replace(second.exam, concurrency=1),
    )
    assert differences(first, second) == (
        ("cache", "unknown", "cache_dtype fp8"),
        ("state", "complete", "it was interrupted"),
        ("concurrency", "8", "1"),
    )


def test_differences_of_kernels_are_the_lines_that_one_lacks() -> None:
    first, second = pair_of("b")
    stock = replace(first, server=replace(SERVER, kernels=("Using A", "Using B")))
    ours = replace(second, server=replace(SERVER, kernels=("Using B", "Using C")))
    assert differences(stock, ours) == (("kernels", "Using A", "Using C"),)
    assert differences(stock, second) == ()


def test_comparison_page_and_chart_are_written(tmp_path: Path) -> None:
    first, second = pair_of("bbb112nn")
    found = compare(first, second)
    chart = draw_comparison(first, second, found, tmp_path)
    assert chart.stat().st_size > 10_000
    page = comparison_markdown(first, second, found, chart=chart.name)
    assert "| all | 8 | 3 | 2 | 1 | 2 | 1 |" in page
    assert "| arithmetic/sum/3 | off | right | wrong: 3 \\| 4\\n<b> |" in page
    assert "![comparison](quality-compare.png)" in page


def test_compare_command_prints_the_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = pair_of("bbb112nn")
    for name, result in (("a", first), ("b", second)):
        write_result(tmp_path / name / "quality.json", result)
    compare_command(tmp_path / "a", tmp_path / "b" / "quality.json", tmp_path / "both")
    said = capsys.readouterr().out
    assert compare(first, second).sentence in said
    assert (tmp_path / "both" / "quality-compare.md").is_file()


def test_result_through_a_file_is_the_same(tmp_path: Path) -> None:
    first, _ = pair_of("b1n")
    write_result(tmp_path / "quality.json", first)
    assert read_result(tmp_path) == first


@pytest.mark.parametrize(("right", "asked", "low", "high"), [(0, 0, 0, 100), (0, 10, 0, 27.75), (10, 10, 72.25, 100)])
def test_wilson_known_values(right: int, asked: int, low: float, high: float) -> None:
    assert wilson(right, asked) == pytest.approx((low, high), abs=0.01)


def test_rows_and_grid_count_by_place() -> None:
    needles = [
        made_outcome(0, right, task=f"needle/{length}/{depth}/0", family="needle", kind=f"{length:,}", length=length,
                     depth=depth)
        for length, depth, right in ((1024, 0, True), (1024, 100, False), (4096, 0, True))
    ]  # fmt: skip
    result = made_result([made_outcome(9, True), *needles])
    assert [row.cells[:4] for row in rows(result)] == [
        ("needle: 1,024 tokens", "off", "1/2", "50"),
        ("needle: 4,096 tokens", "off", "1/1", "100"),
        ("arithmetic: sum", "off", "1/1", "100"),
        ("all", "", "3/4", "75"),
    ]
    lengths, depths, cells = needle_grid(result.outcomes, "off")
    assert (lengths, depths) == ((1024, 4096), (0, 100))
    assert cells[1024, 100].right == 0
    assert (4096, 100) not in cells
    assert headline(result) == "3 of 4 right (75.0 %): needle 2/3, arithmetic 1/1."


def test_page_shows_of_the_cache_what_a_reader_can_use_and_names_the_processor_without_a_card() -> None:
    first, _ = pair_of("b1n")
    cache = {"cache_dtype": "fp8", "block_size": "384", "_block_size_resolved": "True", "cpu_kvcache_space_bytes": "1"}
    machine = replace(MACHINE, card_name=None)
    page = quality_markdown(replace(first, server=replace(SERVER, cache=cache), machine=machine))
    assert "| cache | cache_dtype fp8, block_size 384 |" in page
    assert "| card | no card (c) |" in page


def test_page_of_an_interrupted_run_says_so_and_escapes(tmp_path: Path) -> None:
    first, _ = pair_of("b1n")
    result = replace(first, complete=False, stopped="it was interrupted", notes=("a note",))
    page = quality_markdown(result, draw_quality(result, tmp_path))
    assert "**Not finished: it was interrupted.**" in page
    assert "- a note." in page
    assert "3 \\| 4\\n<b>" in page


HOSTILE = "[/x] [red] $a$ $\\frac{ \n# h | \x1b[31m"


def test_pages_and_charts_of_a_hostile_label_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = pair_of("b12n", label=HOSTILE)
    first = replace(first, label=HOSTILE, server=replace(SERVER, model=HOSTILE))
    chart = draw_quality(first, tmp_path)
    assert chart is not None
    assert quality_markdown(first, chart).startswith("# [/x] [red]")
    assert "\n# h" not in quality_markdown(first, chart)
    for name, result in (("a", first), ("b", second)):
        write_result(tmp_path / name / "quality.json", result)
    compare_command(tmp_path / "a", tmp_path / "b", tmp_path / "both")
    _show(first, screen())
    assert "\x1b" not in capsys.readouterr().out
    assert "\n# h" not in (tmp_path / "both" / "quality-compare.md").read_text()


def test_compare_command_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    write_result(tmp_path / "quality.json", pair_of("b")[0])
    with pytest.raises(UsageError, match="a folder that can be written"):
        compare_command(tmp_path, tmp_path, tmp_path / "quality.json")


def test_page_and_chart_of_nothing_are_made(tmp_path: Path) -> None:
    empty = made_result([])
    assert draw_quality(empty, tmp_path) is None
    assert "No question was answered." in quality_markdown(empty)
