"""The reader of Qwen3.5 output, alone: every case at every cut, and outputs made up at random."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parser_scripts import (
    CASES,
    PARAMETERS,
    SPECIAL,
    Result,
    Script,
    cuts,
    expected,
    markup_in,
    parsed,
    scripts,
)

from qwen_nvfp4_patches.qwen3_arguments import types_of, value_of
from qwen_nvfp4_patches.qwen3_cursor import Kind
from qwen_nvfp4_patches.qwen3_markup import Reader


def read(pieces: Iterable[str], *, thinking: bool, **options: Any) -> Result:
    reader = Reader(thinking=thinking, tools=options.pop("tools", PARAMETERS), dropped=SPECIAL, **options)
    texts: dict[Kind, list[str]] = {Kind.REASONING: [], Kind.CONTENT: []}
    calls: list[tuple[str, list[str]]] = []
    events = [event for piece in pieces for event in reader.feed(piece)]
    for event in events + reader.finish():
        if event.kind is Kind.CALL:
            assert event.call == len(calls)
            calls.append((event.text, []))
        else:
            (calls[event.call][1] if event.kind is Kind.ARGUMENTS else texts[event.kind]).append(event.text)
    reasoning, content = ("".join(texts[kind]) for kind in (Kind.REASONING, Kind.CONTENT))
    return reasoning, content, tuple((name, "".join(arguments)) for name, arguments in calls)


def by(size: int, text: str) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


OUTPUTS = pytest.mark.parametrize("case", CASES["outputs"], ids=lambda case: case["id"])


@OUTPUTS
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 100_000])
def test_reader_case_in_pieces_of_any_size_gives_what_is_expected(case: dict[str, Any], size: int) -> None:
    assert parsed(read(by(size, case["text"]), thinking=case["thinking"])) == expected(case)


@OUTPUTS
def test_reader_case_cut_once_at_every_place_gives_what_is_expected(case: dict[str, Any]) -> None:
    text = case["text"]
    for at in range(len(text) + 1):
        assert parsed(read((text[:at], text[at:]), thinking=case["thinking"])) == expected(case), at


@given(st.sampled_from(CASES["outputs"]), st.data())
@settings(max_examples=200, deadline=None)
def test_reader_case_cut_anywhere_equals_whole(case: dict[str, Any], data: st.DataObject) -> None:
    text = case["text"]
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(pieces, thinking=case["thinking"]) == read([text], thinking=case["thinking"])


@given(st.lists(st.sampled_from((*SPECIAL, "<", ">", "\n", " ", "a", "=", "/", '"', "{", "}", "\u2060", "f", *(
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>",
    "<parameter=", "</parameter>", '{"name": "f"}',
))), max_size=40), st.booleans(), st.randoms(use_true_random=False))  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_reader_tag_soup_cut_anywhere_equals_whole_with_json_arguments(
    pieces: list[str], thinking: bool, rng: Random
) -> None:
    text = "".join(pieces)
    whole = read([text], thinking=thinking)
    parsed(whole)
    places = cuts(rng, len(text))
    assert read([text[a:b] for a, b in pairwise(places)], thinking=thinking) == whole


def check(script: Script, rng: Random) -> None:
    whole = read([script.text], thinking=script.thinking)
    parsed(whole)
    places = cuts(rng, len(script.text))
    pieces = [script.text[a:b] for a, b in pairwise(places)]
    assert read(pieces, thinking=script.thinking) == whole, script
    assert not (script.clean and markup_in(whole)), (script, whole)


def test_reader_random_outputs_streamed_equal_whole_without_markup() -> None:
    rng = Random(1)
    for script in scripts(500):
        check(script, rng)


@pytest.mark.slow
def test_reader_ten_thousand_random_outputs_streamed_equal_whole_without_markup() -> None:
    rng = Random(2)
    for script in scripts(10_000, seed=3):
        check(script, rng)


def test_reader_streams_a_string_before_it_is_complete() -> None:
    reader = Reader(thinking=False, tools=PARAMETERS)
    reader.feed("<tool_call>\n<function=f>\n<parameter=a>\n")
    assert "".join(event.text for event in reader.feed("first words, ")) == '{"a": "first words, '
    assert "".join(event.text for event in reader.feed('then "more"')) == 'then \\"more\\"'


def test_reader_without_tools_leaves_call_markup_in_the_text() -> None:
    text = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    assert read([text], thinking=False, tools=None) == ("", text, ())


def test_reader_literal_content_is_data_after_thinking() -> None:
    text = 'why\n</think>\n\n{"a": "x</think>y<tool_call>"}\n'
    assert read(by(3, text), thinking=True, tools=None, literal=True) == (
        "why",
        '{"a": "x</think>y<tool_call>"}\n',
        (),
    )


def test_reader_megabyte_argument_is_complete_json() -> None:
    value = '<line> of "text" </line>\n' * 44_000
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert len(text) > 1_000_000
    assert parsed(read(by(16, text), thinking=False))[2] == [("f", {"a": value})]


def test_reader_deeply_nested_argument_stays_text() -> None:
    text = f"<tool_call>\n<function=g>\n<parameter=l>\n{'[' * 100_000}\n</parameter>\n</function>\n</tool_call>"
    assert parsed(read([text], thinking=False))[2] == [("g", {"l": "[" * 100_000})]


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5), (" 5 ", {"integer"}, 5), ("5.0", {"integer"}, 5), ("5.5", {"integer"}, "5.5"),
        ("5", {"number"}, 5), ("2.50", {"number"}, 2.5), ("1_000", {"number"}, "1_000"), ("inf", {"number"}, "inf"),
        ("1e400", {"number"}, "1e400"), ("9" * 5000, {"integer"}, "9" * 5000), ("null", {"null", "string"}, None),
        ("TRUE", {"boolean"}, True), ("0", {"boolean"}, False), ("[1]", {"object"}, "[1]"), ("[1]", {"array"}, [1]),
        ("[NaN]", {"array"}, "[NaN]"), ('{"a": 1e999}', {"object"}, '{"a": 1e999}'), ("12", {"string", "integer"}, 12),
        ("x", {"string", "integer"}, "x"), ("5", set(), "5"), ("5", {"string"}, "5"),
    ],
)  # fmt: skip
def test_value_of_takes_the_first_type_that_fits(text: str, types: set[str], value: Any) -> None:
    result = value_of(text, frozenset(types))
    assert (result, type(result)) == (value, type(value))
    json.loads(json.dumps(result, allow_nan=False))


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "str"}, {"string"}), ({"type": ["integer", "null"]}, {"integer", "null"}), ({}, set()), (None, set()),
        ({"anyOf": [{"type": "array"}, {"$ref": "#/$defs/A"}]}, {"array", "object"}), ({"const": 3}, {"integer"}),
        ({"enum": ["a", None, True]}, {"string", "null", "boolean"}), ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/nowhere/x"}, set()), ({"type": 7}, set()),
    ],
)  # fmt: skip
def test_types_of_follows_references_and_branches(schema: object, types: set[str]) -> None:
    root = {"$defs": {"A": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}}
    assert types_of(schema, root) == types
