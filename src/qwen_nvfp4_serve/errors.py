"""Errors a person can act on: what failed, what was seen, what was expected, what to do."""

from __future__ import annotations

from typing import ClassVar

SEEN_CHARS = 120


def printable(text: str, limit: int | None = None) -> str:
    """`text` as it may be shown in a line: escapes for what a terminal would obey, an end mark when cut at `limit`."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return shown if limit is None or len(shown) <= limit else shown[: limit - 1] + "…"


class QwenNvfp4Error(Exception):
    """A failed check. `str()` is one sentence; `exit_code` is what the command line exits with.

    what: what failed, naming the knob, file or module. seen: the value found. expected: what would have been right.
    do: the line to type or the setting to change. output: last lines of another program, shown below the sentence.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        *,
        seen: str | None = None,
        expected: str | None = None,
        do: str | None = None,
        output: str | None = None,
    ):
        self.what, self.seen, self.expected, self.do, self.output = what, seen, expected, do, output
        super().__init__(self.sentence() + (f"\n{output}" if output else ""))

    def sentence(self) -> str:
        """One line: `what: seen …, expected …. Do: …`, leaving out what is unknown; a long `seen` is cut."""
        seen = printable(self.seen, SEEN_CHARS) if self.seen else None
        details = [f"{name} {value}" for name, value in (("seen", seen), ("expected", self.expected)) if value]
        text = self.what + (": " + ", ".join(details) if details else "")
        return printable(f"{text}. {self.do}" if self.do else text)


class UsageError(QwenNvfp4Error):
    """The request itself is wrong: an unknown knob, a value out of range, a file that is not there. Exit code 2."""

    exit_code = 2


class UnsupportedHostError(QwenNvfp4Error):
    """This machine cannot run what was asked: no card, an old driver, a vLLM outside the window. Exit code 3."""

    exit_code = 3
