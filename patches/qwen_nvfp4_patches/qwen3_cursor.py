"""A place in an output that is still arriving, and what can be seen from there."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
THINK_TAGS = (THINK, THINK_END)
CALL_TAGS = (CALL, CALL_END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)
OPENS_CALL = (CALL, FUNCTION)
# Between `<` and the rest of a special token that a client wrote, put there by our chat template, taken out here.
JOINER = "\u2060"
LONGEST_NAME = 512
SHORTEST_CUT_TAG = 5  # an output that ends in this much of a tag was cut inside it
_NO_SPACE = re.compile(r"\S")


class Kind(enum.Enum):
    """What an event adds to."""

    CONTENT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()
    ARGUMENTS = enum.auto()


class Event(NamedTuple):
    """More text of one kind: for CALL the function's name, for ARGUMENTS a piece of JSON. call: which call."""

    kind: Kind
    text: str
    call: int = -1


class Starved(Exception):
    """What comes next decides, and it has not come yet."""


class Cursor:
    """Text that has come and is not read yet, a place in it, and the events of what was read."""

    _step: Callable[[], None]

    def __init__(self) -> None:
        self._buffer, self._at, self._final = "", 0, False
        self._events: list[Event] = []
        self._calls = 0

    def _emit(self, kind: Kind, text: str) -> None:
        index = self._calls - 1 if kind in (Kind.CALL, Kind.ARGUMENTS) else -1
        if text:
            self._events.append(Event(kind, text, index))

    def _take_events(self) -> list[Event]:
        """What was emitted since the last time, adjoining pieces of one text in one."""
        groups = itertools.groupby(self._events, key=lambda event: (event.kind, event.call))
        merged = [Event(kind, "".join(event.text for event in group), call) for (kind, call), group in groups]
        self._events = []
        return merged

    def _tag_at(self, at: int, tags: tuple[str, ...]) -> str:
        for tag in tags:
            if self._buffer.startswith(tag, at):
                return tag
        rest = self._buffer[at : at + 32]
        if not self._final and any(tag.startswith(rest) for tag in tags):
            raise Starved
        return ""

    def _is_cut_tag(self, at: int, tags: tuple[str, ...], least: int = SHORTEST_CUT_TAG) -> bool:
        rest = self._buffer[at : at + 32]
        return self._final and len(rest) >= least and any(tag.startswith(rest) for tag in tags)

    def _char_at(self, at: int) -> str:
        if at >= len(self._buffer) and not self._final:
            raise Starved
        return self._buffer[at : at + 1]

    def _after_space(self, at: int) -> int:
        found = _NO_SPACE.search(self._buffer, at)
        if found is None and not self._final:
            raise Starved
        return found.start() if found else len(self._buffer)

    def _name_at(self, at: int) -> tuple[str, int, str]:
        """The name that begins at `at`, where the text goes on after it, and what ended it (empty: nothing did)."""
        for end in range(at, at + LONGEST_NAME):
            mark = self._char_at(end)
            if mark in ("", ">", "<", "\n"):
                name = self._buffer[at:end].strip().strip("\"'")
                return name, end + (mark == ">"), mark
        return "", at, ""
