"""Rows of names for people: no name is ever cut, whatever the width, and a note below each row is wrapped."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

GAP, INDENT = 2, 4


def print_listing(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """Print `rows` in columns under `head`; `notes` has one text for each row, or is empty."""
    widths = [max(map(len, column)) + GAP for column in zip(head, *rows, strict=True)]
    for place, row in enumerate((head, *rows)):
        line = "".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        console.print(Text(line, style="" if place else "bold"), soft_wrap=True)
        if place and notes:
            # Only a terminal's reader needs lines that fit.
            note, wraps = Text(notes[place - 1], style="dim"), console.is_terminal
            console.print(Padding(note, (0, 0, 0, INDENT)) if wraps else Text(" " * INDENT) + note, soft_wrap=not wraps)
