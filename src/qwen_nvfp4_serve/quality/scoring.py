"""Right or not, and if not, why: pure functions of what was wanted and what came."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from pydantic import ConfigDict

from qwen_nvfp4_serve.errors import printable
from qwen_nvfp4_serve.quality.answer import Answer, Failure, NoAnswer, RawCall
from qwen_nvfp4_serve.quality.degenerate import text_fault, token_fault
from qwen_nvfp4_serve.quality.task import Call, Calls, Code, Number, Prose, Says, Want, Words

Flaw = Literal["wrong", "empty", "truncated", "not parsed", "leaked markup", "degenerate", "too short"]
SHOWN_CHARS = 80
LEAST_PROSE_WORDS = 100  # of texts asked for with at least 800
MARKUP = re.compile(
    r"</?think>|</?tool_call>|</?tool_response>|<function=|</function>|<parameter=|</parameter>|<\|\w+\|>"
)
_NUMBER = re.compile(r"(?<![\d.])[-−]?\d[\d,]*(?:\.\d+)?")
_CODE = re.compile(r"(?<!\d)\d{4}(?!\d)")
_LATEX_COMMA = re.compile(r"\{,\}")


@dataclass(frozen=True, slots=True)
class Miss:
    """Why an answer does not count."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    reason: Flaw | NoAnswer
    detail: str


def score(want: Want, answer: Answer | Failure) -> Miss | None:
    """None for a right answer. A text that leaks markup or degenerates is a miss whatever else it says."""
    if isinstance(answer, Failure):
        return Miss(answer.reason, answer.detail)
    leaked = MARKUP.search(answer.content)
    if leaked:
        return Miss("leaked markup", f"{leaked.group()} in the content")
    fault = (
        token_fault(answer.tokens, answer.impossible)
        or text_fault(answer.content, is_prose=isinstance(want, Prose))
        or text_fault(answer.reasoning)
    )
    if fault:
        return Miss("degenerate", fault)
    return _nothing_said(want, answer) or _unfinished(want, answer) or _compared(want, answer)


def _nothing_said(want: Want, answer: Answer) -> Miss | None:
    """An answer with neither content nor call; where any text is right, thinking that was cut is one."""
    is_cut = answer.finish_reason == "length"
    if answer.content.strip() or answer.calls or (isinstance(want, Prose) and is_cut and answer.reasoning.strip()):
        return None
    leaked = MARKUP.search(answer.reasoning)
    if leaked:
        return Miss("leaked markup", f"{leaked.group()} in the thinking, and nothing after it")
    if is_cut and answer.reasoning:
        return Miss("truncated", f"still thinking after {answer.completion_tokens} tokens")
    return Miss("empty", f"no content and no call, finish_reason {answer.finish_reason}")


def _unfinished(want: Want, answer: Answer) -> Miss | None:
    if answer.finish_reason != "length":
        words = len(answer.content.split())
        is_short = isinstance(want, Prose) and words < LEAST_PROSE_WORDS
        return Miss("too short", f"{words} words: {_shown(answer.content)}") if is_short else None
    if isinstance(want, Prose):
        return None
    return Miss("truncated", f"cut after {answer.completion_tokens} tokens: …{_shown(answer.content[-SHOWN_CHARS:])}")


def _compared(want: Want, answer: Answer) -> Miss | None:
    match want:
        case Prose():
            return None
        case Calls():
            return _calls(want.calls, answer)
        case Number() | Code() | Says() | Words():
            if answer.calls:
                return Miss("wrong", f"called {', '.join(call.name for call in answer.calls)}")
            return _text(want, answer.content)
        case _:
            assert_never(want)


def _text(want: Number | Code | Says | Words, content: str) -> Miss | None:
    match want:
        case Number():
            return _number(want.value, content)
        case Code():
            found = set(_CODE.findall(content.replace(",", "")))
            if not found:
                return Miss("not parsed", f"no code of four digits in {_shown(content)}")
            return None if found == {want.code} else Miss("wrong", _shown(content))
        case Says():
            said = re.search(rf"(?<!\w){re.escape(want.text)}(?!\w)", content)
            return None if said else Miss("wrong", _shown(content))
        case Words():
            return _words(want.words, content)
        case _:
            assert_never(want)


def _number(value: int, content: str) -> Miss | None:
    found = _NUMBER.findall(_LATEX_COMMA.sub(",", content))
    if not found:
        return Miss("not parsed", f"no number in {_shown(content)}")
    last = found[-1].replace("−", "-").replace(",", "")
    return None if float(last) == value else Miss("wrong", _shown(content))


def _words(words: tuple[str, ...], content: str) -> Miss | None:
    found = re.findall(r"\w+", content.casefold())
    if found == list(words):
        return None
    place = next((index for index, (a, b) in enumerate(zip(words, found, strict=False)) if a != b), None)
    if place is None:
        return Miss("wrong", f"{len(found)} words instead of {len(words)}")
    return Miss("wrong", f"word {place + 1} of {len(words)} is {_shown(found[place])}, expected {words[place]}")


def _calls(wanted: tuple[Call, ...], answer: Answer) -> Miss | None:
    if not answer.calls:
        leaked = MARKUP.search(answer.reasoning)
        if leaked:
            return Miss("leaked markup", f"no call, and {leaked.group()} in the thinking")
        return Miss("wrong", f"no call: {_shown(answer.content)}")
    left = list(wanted)
    for seen in answer.calls:
        arguments = _arguments(seen)
        if arguments is None:
            return Miss("not parsed", f"arguments of {seen.name} are no JSON object: {_shown(seen.arguments)}")
        leaked = MARKUP.search(seen.arguments)
        if leaked:
            return Miss("leaked markup", f"{leaked.group()} in the arguments of {seen.name}")
        match = next((call for call in left if call.name == seen.name and is_same(call.arguments, arguments)), None)
        if match is None:
            return Miss("wrong", f"{seen.name}({_shown(seen.arguments)})")
        left.remove(match)
    return Miss("wrong", f"no call of {', '.join(call.name for call in left)}") if left else None


def _arguments(call: RawCall) -> dict[str, Any] | None:
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_same(wanted: Any, seen: Any) -> bool:
    """Equal JSON values. A boolean or a text is no number, 5 and 5.0 are the same, ends of texts are trimmed."""
    if isinstance(wanted, dict) and isinstance(seen, dict):
        return wanted.keys() == seen.keys() and all(is_same(wanted[key], seen[key]) for key in wanted)
    if isinstance(wanted, list) and isinstance(seen, list):
        return len(wanted) == len(seen) and all(is_same(*pair) for pair in zip(wanted, seen, strict=True))
    if isinstance(wanted, str) and isinstance(seen, str):
        return wanted.strip() == seen.strip()
    if isinstance(wanted, bool) or isinstance(seen, bool):
        return wanted is seen
    return isinstance(wanted, int | float) and isinstance(seen, int | float) and wanted == seen


def _shown(text: str) -> str:
    return printable(text.strip(), SHOWN_CHARS)
