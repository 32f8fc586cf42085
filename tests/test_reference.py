"""The known answers as the package reads them, and which server is asked them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.reference import (
    ANSWERS,
    EMBEDDED,
    FOLDER,
    LEAST_TOKENS,
    NAMES,
    Given,
    given,
    joined,
    one_of_each,
    read_answers,
    ready_answer,
    served_folder,
)

CALL = {"index": 0, "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize("name", NAMES)
def test_packaged_answers_are_read_and_their_requests_are_greedy(name: str) -> None:
    answers = read_answers(FOLDER / name)
    assert len(answers) >= 30
    for answer in answers:
        body = answer.body("m")
        assert body["temperature"] == 0
        assert body["chat_template_kwargs"] == {"enable_thinking": answer.thinks}
        assert (answer.expected.reasoning is not None) is answer.thinks
    assert {answer.thinks for answer in answers} == {True, False}


def test_ready_answer_is_short_and_no_lucky_guess() -> None:
    answer = ready_answer(read_answers(EMBEDDED))
    assert answer is not None
    assert answer.most_tokens < LEAST_TOKENS
    assert len(answer.expected.content) >= 8
    assert not answer.thinks
    assert not answer.tools


def test_one_of_each_has_every_kind_and_leaves_out_what_does_not_fit() -> None:
    answers = read_answers(EMBEDDED)
    whole, small = one_of_each(answers, 4096), one_of_each(answers, LEAST_TOKENS)
    assert {answer.kind for answer in whole} == {answer.kind for answer in answers}
    assert len({answer.kind for answer in whole}) == len(whole)
    assert any(answer.task == "needle" for answer in whole)
    assert not any(answer.task == "needle" for answer in small)
    assert any(answer.expected.calls for answer in small)
    assert any(answer.thinks and not answer.tools for answer in small)


def test_read_answers_folder_without_them_has_none(tmp_path: Path) -> None:
    assert read_answers(tmp_path) == ()


@pytest.mark.parametrize("text", ["{", "5", "[5]", '[{"id": "a"}]', '{"a": 1}'])
def test_read_answers_broken_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / ANSWERS).write_text(text)
    with pytest.raises(UsageError, match=ANSWERS):
        read_answers(tmp_path)


def message(answer: Given) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in answer.calls]
    return {"content": f" {answer.content}\n", "reasoning": answer.reasoning, "tool_calls": calls or None}


@pytest.mark.parametrize("answer", read_answers(EMBEDDED), ids=lambda answer: answer.id)
def test_given_message_as_expected_is_equal_and_any_change_is_not(answer: Any) -> None:
    expected = answer.expected
    assert given(message(expected)) == expected
    assert given(message(dataclasses.replace(expected, content=expected.content + "x"))) != expected
    assert given(message(expected) | {"reasoning": "x"}) != expected
    assert given(message(dataclasses.replace(expected, calls=(*expected.calls, ("f", {}))))) != expected


def test_given_call_with_an_argument_of_another_type_is_not_equal() -> None:
    right, wrong = (Given(content="", calls=(("f", {"a": value}),)) for value in (1, "1"))
    assert given(message(wrong)) != right


def test_joined_deltas_are_the_message() -> None:
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning": "a"},
        {"reasoning": "b"},
        {"content": "c"},
        {"tool_calls": [CALL]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": '}}]},
        {"tool_calls": [{"index": 0, "function": {"name": None, "arguments": "1}"}}]},
    ]
    assert given(joined(deltas)) == Given(content="c", reasoning="ab", calls=(("f", {"x": 1}),))


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("/opt/venv/lib/python3.11/site-packages/qwen_nvfp4_serve/data/reference/moe", "moe"),
        ("/elsewhere/reference/dense/", "dense"),
        ("/models/moe", None),
        ("/data/reference/other", None),
        ("Kbenkhaled/Qwen3.5-27B-NVFP4", None),
        ("moe", None),
        (None, None),
    ],
)
def test_served_folder_goes_by_the_end_of_the_path(root: str | None, name: str | None) -> None:
    assert served_folder(root) == (FOLDER / name if name else None)


def test_served_folder_of_a_copy_on_this_disk_is_the_copy(tmp_path: Path) -> None:
    assert served_folder(str(tmp_path)) is None
    (tmp_path / ANSWERS).write_text("[]")
    assert served_folder(str(tmp_path)) == tmp_path
    assert served_folder("x" * 5000) is None


def test_pages_for_users_call_it_the_embedded_model_and_nothing_else() -> None:
    root = Path(__file__).resolve().parents[1]
    pages = [root / "README.md", *(root / "docs" / f"{name}.md" for name in ("agents", "api", "docker", "quality"))]
    for page in pages:
        text = re.sub(r"\]\([^)]*\)", "", page.read_text())  # where links lead is another matter
        assert "embedded" in text, page
        assert not re.findall(r"reference model|reference/moe", text), page
