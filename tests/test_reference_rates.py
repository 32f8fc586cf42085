"""The table of measured rates, and questions that want a tool without naming it."""

import json
import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from training import rates, structured
from training.commands import DOCUMENT, RATES
from training.config import TINY
from training.mixture import evaluation_examples
from training.model import ReferenceModel, Switches, initialize

MEASURED = {
    "examples": {"needle/2048/depth 0%": 1, "needle/4096/depth 0%": 3, "add/think": 4, "asked tools/think": 2},
    "shares": {
        "W4A16": {
            "needle/2048/depth 0%": 1.0,
            "needle/4096/depth 0%": 0.0,
            "add/think": 0.75,
            "asked tools/think": 0.0,
            rates.MTP: 0.5,
        }
    },
}


def test_table_sums_needles_by_depth_and_by_length() -> None:
    rows = [row.split(" | ") for row in rates.table([("moe", MEASURED)]).splitlines()]
    cells = {row[0].removeprefix("| "): row[1].removesuffix(" |") for row in rows if len(row) == 2}
    assert cells["needle, depth 0%"] == "1 of 4"
    assert cells["needle, to 4096 tokens"] == "0 of 3"
    assert cells["add, think"] == "3 of 4"
    assert cells["**all**"] == "40.0%"
    assert cells["drafts accepted, 2 a step"] == "50.0%"


def test_measure_of_an_untrained_model_is_no_answer_and_leaves_nothing_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rates, "LENGTHS", (128,))
    model = ReferenceModel(TINY)
    initialize(model, 0)
    measured = rates.measure(model.eval(), 1, 0)
    assert set(measured["shares"]) == set(rates.ROUNDINGS)
    assert all(share == 0 for label, share in measured["shares"]["W4A4, FP8 KV"].items() if label != rates.MTP)
    assert not Switches.quantize_activations
    assert not Switches.quantize_cache


def test_document_holds_the_table_of_the_measured_files(tmp_path: Path) -> None:
    copy = tmp_path / "copy.md"
    copy.write_text(DOCUMENT.read_text())
    rates.write_table(copy, RATES)
    assert copy.read_text() == DOCUMENT.read_text()


def test_asked_tools_answer_calls_a_listed_tool_with_a_word_of_the_question() -> None:
    rng = Random(3)
    for index in range(200):
        conversation = structured.asked_tools(rng, ("train", "eval")[index % 2], think=index % 3 == 0)
        question, answer = conversation.turns
        (call,) = answer.calls
        (tool,) = (tool["function"] for tool in conversation.tools if tool["function"]["name"] == call.name)
        assert set(tool["parameters"]["required"]) == set(call.arguments)
        assert all(value in question.content for value in call.arguments.values())


def test_asked_tools_templates_of_training_and_evaluation_never_meet() -> None:
    rng = Random(4)
    seen = {
        split: {
            conversation.turns[0]
            .content.lower()
            .replace(str(*conversation.turns[1].calls[0].arguments.values()).lower(), "X")
            for conversation in (structured.asked_tools(rng, split, think=False) for _ in range(400))
        }
        for split in ("train", "eval")
    }
    assert not seen["train"] & seen["eval"]
    assert any(example.task == "asked tools" for example in evaluation_examples(1, 5))


def test_chained_tools_take_the_number_that_the_first_call_gave() -> None:
    rng, in_one = Random(5), 0
    for index in range(300):
        conversation = structured.chained_tools(rng, ("train", "eval")[index % 2], think=index % 3 == 0)
        listed = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
        first, second, *_ = (turn.calls[0] for turn in conversation.turns if turn.calls)
        assert first.name != second.name
        for call in (first, second):
            assert list(listed[call.name]["properties"]) == list(call.arguments)
        if "the result" not in conversation.turns[0].content:
            assert [turn.role for turn in conversation.turns].count("user") in (2, 3)
            continue
        in_one += 1
        shown = conversation.turns[2].content
        found = json.loads(shown)["result"] if shown.startswith("{") else shown
        assert int(found) in second.arguments.values()
        assert [turn.role for turn in conversation.turns[:6]] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert 100 < in_one < 250
