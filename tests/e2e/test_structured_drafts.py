"""Structured outputs with draft tokens, which a grammar refuses in part: the same answers as without, and no crash."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.e2e.serving import Served, serve
from tests.e2e.test_structured import ASKED, CALL, KINDS, NAMED, ORDER, PET, TOOL, chat

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("drafts"), SPECULATIVE_TOKENS="2") as served:
        yield served


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_structured_output_with_drafts_obeys(server: Served, kind: str, thinking: bool) -> None:
    asked, obeys = KINDS[kind]
    for stream in (True, False):
        answer = chat(server, stream=stream, thinking=thinking, **asked)
        assert answer.content is not None
        assert obeys(answer.content), answer
        assert bool(answer.reasoning) is thinking


@pytest.mark.parametrize("thinking", [True, False])
def test_tools_with_drafts_are_called_and_answers_keep_to_their_format(server: Served, thinking: bool) -> None:
    for choice in ("auto", "required"):
        asked = {"messages": ORDER, "tools": [TOOL], "tool_choice": choice, "response_format": NAMED}
        assert chat(server, stream=True, thinking=thinking, **asked).calls == (CALL,)
    answer = chat(server, stream=True, thinking=thinking, messages=ASKED, response_format=NAMED)
    assert json.loads(answer.content or "") == PET
