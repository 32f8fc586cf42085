"""Listings: a name is whole at any width, on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from qwen_nvfp4_serve.cli.listing import print_listing

LONG = "a-publisher-with-a-name/Qwen3.5-35B-A3B-NVFP4-of-some-length"
NOTE = "a note that is longer than the narrowest of the terminals in this test"


def listing(*, width: int, terminal: bool) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=terminal, no_color=True, highlight=False)
    print_listing(console, ("MODEL", "checkpoint"), [("short", LONG), (LONG, "x")], [NOTE, "two"])
    return text.getvalue().splitlines()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [20, 80, 200])
def test_print_listing_any_width_cuts_no_name(width: int, terminal: bool) -> None:
    lines = listing(width=width, terminal=terminal)
    assert sum(LONG in line for line in lines) == 2
    assert not any("…" in line for line in lines)


def test_print_listing_in_a_pipe_keeps_a_note_on_one_line_and_wraps_it_on_a_terminal() -> None:
    assert [line.strip() for line in listing(width=40, terminal=False)].count(NOTE) == 1
    wrapped = [line for line in listing(width=40, terminal=True) if "note" in line or "terminals" in line]
    assert len(wrapped) > 1
