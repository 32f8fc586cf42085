"""Has a text stopped being one? Runs of one token, loops, repeated tags, broken characters, impossible probabilities.

The bounds are this project's own. Each is far beyond what the tasks' right answers hold, so that a text that is merely
dull passes: tests keep both sides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

import numpy as np

RUN_CHARACTERS, RUN_WORDS, RUN_TOKENS = 40, 16, 24  # "!!!!…" is token 0 of this family: what NaN logits decode to
RULE_RUN = 400  # of what draws lines and tables
LOOP_TIMES, LONG_LOOP_TIMES = 4, 3  # blocks in a row; of more than SHORT_LOOP words the lower number
SHORT_LOOP, LONGEST_LOOP, LEAST_LOOPED = 64, 512, 48  # words
MOST_LOOKED_AT = 65_536  # words of the end in which loops and repeats are looked for, to bound the time
TAG_TIMES = 8
WINDOW, LEAST_WORDS, MOST_SEEN = 8, 200, 0.5
MOST_CHARACTERS, MOST_FOREIGN = 15, 0.2  # of a word on average; share of letters outside ASCII
BROKEN_CHARACTERS = 3  # a cut answer may end in one or two halves

_RULE = re.compile(r"[\s\-=_*#.~|+:/\\\u2010-\u2015\u2500-\u257f]*")
_RUN = re.compile(rf"(\S)\1{{{RUN_CHARACTERS - 1},}}")
_TAGS = re.compile(rf"(<[^<>]{{1,40}}>)(?:\s*\1){{{TAG_TIMES - 1},}}")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def text_fault(text: str, *, is_prose: bool = False) -> str | None:
    """How `text` degenerates, in a few words; None if it does not.

    is_prose: it should also read like English or a program in form, and not repeat itself.
    """
    words = text.split()[-MOST_LOOKED_AT:]
    checks = (_broken(text), _tags(text), _run_of_characters(text), _run(words, RUN_WORDS, "word"), _loop(words))
    found = next((fault for fault in checks if fault), None)
    return found or ((_garbled(words) or _repeats(words)) if is_prose else None)


def token_fault(tokens: Sequence[str] | None, impossible: int) -> str | None:
    """The same of the tokens of an answer, where the server gave them with their probabilities."""
    if impossible:
        return f"{impossible} tokens without a finite probability"
    return _run(tokens or (), RUN_TOKENS, "token")


def _broken(text: str) -> str | None:
    controls = _CONTROLS.search(text)
    if controls:
        return f"control character {controls.group()!r}"
    broken = text.count("\ufffd")
    return f"{broken} broken characters" if broken >= BROKEN_CHARACTERS else None


def _tags(text: str) -> str | None:
    found = _TAGS.search(text)
    return f"{found.group(1)} {found.group().count(found.group(1))} times in a row" if found else None


def _run_of_characters(text: str) -> str | None:
    for found in _RUN.finditer(text):
        if len(found.group()) >= _limit(found.group(1), RUN_CHARACTERS):
            return f"{found.group(1)!r} {len(found.group())} times in a row"
    return None


def _run(pieces: Sequence[str], limit: int, what: str) -> str | None:
    for piece, same in groupby(pieces):
        length = sum(1 for _ in same)
        if length >= limit and length >= _limit(piece, limit):
            return f"{what} {piece[:40]!r} {length} times in a row"
    return None


def _limit(piece: str, limit: int) -> int:
    return RULE_RUN if _RULE.fullmatch(piece) else limit


def _loop(words: Sequence[str]) -> str | None:
    """A block of words that comes again at once, several times; the shortest such block.

    A text has period p over a stretch where each word equals the one p before it.
    """
    known: dict[str, int] = {}
    ids = np.array([known.setdefault(word, len(known)) for word in words], dtype=np.int64)
    for period in range(2, min(LONGEST_LOOP, len(ids) // LONG_LOOP_TIMES) + 1):
        times = LOOP_TIMES if period <= SHORT_LOOP else LONG_LOOP_TIMES
        needed = max(times * period, LEAST_LOOPED) - period
        breaks = np.flatnonzero(ids[period:] != ids[:-period])
        edges = np.concatenate(([-1], breaks, [len(ids) - period]))
        gaps = np.diff(edges) - 1
        longest = int(gaps.max())
        start = int(edges[int(gaps.argmax())]) + 1
        block = " ".join(words[start : start + period])
        if longest >= needed and not _RULE.fullmatch(block):
            return f"a block of {period} words {longest // period + 1} times in a row: {block[:60]!r}"
    return None


def _garbled(words: Sequence[str]) -> str | None:
    read = [word for word in words if not _RULE.fullmatch(word)]
    text = "".join(read)
    if len(text) > MOST_CHARACTERS * len(read):
        return f"words of {len(text) / len(read):.0f} characters on average"
    letters = [character for character in text if character.isalpha()]
    foreign = sum(not character.isascii() for character in letters) / max(1, len(letters))
    return f"{100 * foreign:.0f} % of its letters are foreign to the question" if foreign > MOST_FOREIGN else None


def _repeats(words: Sequence[str]) -> str | None:
    if len(words) < LEAST_WORDS:
        return None
    windows = [tuple(words[start : start + WINDOW]) for start in range(len(words) - WINDOW + 1)]
    seen = 1.0 - len(set(windows)) / len(windows)
    return f"{100 * seen:.0f} % of its {WINDOW}-word windows came before" if seen > MOST_SEEN else None
