"""Errors a person can act on: what failed, what was seen, what was expected, what to do."""

from __future__ import annotations

from typing import ClassVar


class QwenNvfp4Error(Exception):
    """A failed check. `str()` is one sentence; `exit_code` is what the command line exits with.

    what: what failed, naming the knob, file or module. seen: the value found. expected: what would have been right.
    do: the line to type or the setting to change.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, seen: str | None = None, expected: str | None = None, do: str | None = None):
        self.what, self.seen, self.expected, self.do = what, seen, expected, do
        super().__init__(self.sentence())

    def sentence(self) -> str:
        """One line: `what: seen …, expected …. Do: …`, leaving out what is unknown."""
        details = [f"{name} {value}" for name, value in (("seen", self.seen), ("expected", self.expected)) if value]
        text = self.what + (": " + ", ".join(details) if details else "")
        return f"{text}. {self.do}" if self.do else text


class UsageError(QwenNvfp4Error):
    """The request itself is wrong: an unknown knob, a value out of range, a file that is not there. Exit code 2."""

    exit_code = 2


class UnsupportedHostError(QwenNvfp4Error):
    """This machine cannot run what was asked: no card, an old driver, a vLLM outside the window. Exit code 3."""

    exit_code = 3
