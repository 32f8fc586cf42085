"""Outputs of a model made up at random: thinking, prose and tool calls, whole or damaged; and where to cut them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "api_cases.json").read_text())
TOOLS: list[dict[str, Any]] = CASES["tools"]
PARAMETERS: dict[str, object] = {tool["function"]["name"]: tool["function"].get("parameters") for tool in TOOLS}
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

Result = tuple[str, str, tuple[tuple[str, str], ...]]  # reasoning, content, (name, arguments) of each call

_WORDS = ("alpha", "beta", "x < y", "a > b", "naïve 雪", '"quoted"', "it's", "{1, 2}", "\\n", "<b>bold</b>", "`code`")
_VALUES: dict[str, tuple[str, ...]] = {
    "a": ("x", "", "two\nlines", '{"k": 1}', "  spaces  ", "\"q\" 'r' \\", "<b>", "5", "\n", "\ttab"),
    "n": ("5", "-3", "five", "", "1.0"),
    "flag": ("true", "False", "maybe"),
    "o": ('{"k": [1, {"z": "}"}]}', "{broken", "{}"),
    "l": ("[1, 2]", "[]", '["<a>"]'),
    "x": ("1.5", "nan", "2"),
}
_QUOTES = (
    "see <tool_call> here", "the `</parameter>` tag", "Example:\n<tool_call>\n<function=f>\n<parameter=a>\nq\n"
    "</parameter>\n</function>\n</tool_call>\nend", "use <function=f> now", "a </function> b", "<think>\nt\n</think>",
    "\n</parameter> mid", "<|im_end|>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Script:
    """An output. clean: no text or value in it quotes a tag, so none may be left in the result."""

    text: str
    thinking: bool
    clean: bool


def scripts(count: int, seed: int = 0) -> Iterator[Script]:
    """`count` scripts, the same for the same seed."""
    rng = Random(seed)
    for _ in range(count):
        yield _script(rng)


def _script(rng: Random) -> Script:
    quotes = rng.random() < 0.3
    thinking = rng.random() < 0.7
    parts = [_thinking(rng, quotes)] if thinking or rng.random() < 0.1 else []
    for _ in range(rng.randrange(0, 5)):
        parts.append(_call(rng, quotes) if rng.random() < 0.6 else _prose(rng, quotes))
        parts.append(rng.choice(("\n", "\n\n", "", " ")))
    text = "".join(parts)
    if rng.random() < 0.5:
        text = _damage(rng, text)
    return Script(text, thinking, clean=not quotes)


def _prose(rng: Random, quotes: bool) -> str:
    words = [rng.choice(_WORDS) for _ in range(rng.randrange(1, 6))]
    if quotes and rng.random() < 0.5:
        words.insert(rng.randrange(1, len(words) + 1), rng.choice(_QUOTES))
    return rng.choice((" ", "\n")).join(words)


def _thinking(rng: Random, quotes: bool) -> str:
    body = rng.choice(("", _prose(rng, quotes), _prose(rng, quotes) + "\n" + _call(rng, quotes)))
    return rng.choice(("", "<think>\n")) + body + rng.choice(("\n</think>\n\n", "</think>", "\n</think>\n\n", "\n"))


def _call(rng: Random, quotes: bool) -> str:
    break_ = rng.choice(("\n", "\n", "\n", ""))
    name = rng.choice(("f", "g", "Finish", "nope"))
    keys = rng.sample(list(_VALUES), rng.randrange(0, 4))
    if rng.random() < 0.1:
        return f'<tool_call>{break_}{{"name": "{name}", "arguments": {{"a": "x"}}}}{break_}</tool_call>'
    values = [(key, rng.choice(_QUOTES if quotes and rng.random() < 0.4 else _VALUES[key])) for key in keys]
    inner = "".join(f"<parameter={key}>{break_}{value}{break_}</parameter>{break_}" for key, value in values)
    return f"<tool_call>{break_}<function={name}>{break_}{inner}</function>{break_}</tool_call>"


def _damage(rng: Random, text: str) -> str:
    """Leaves out, doubles or moves tags, or cuts the end off."""
    for _ in range(rng.randrange(1, 4)):
        tag = rng.choice(TAGS)
        at = text.find(tag, rng.randrange(0, len(text) + 1))
        if at >= 0:
            end = at + len(tag)
            text = rng.choice((text[:at] + text[end:], text[:end] + text[at:], text[:at] + "\n" + text[end:] + tag))
    return text[: rng.randrange(0, len(text) + 1)] if rng.random() < 0.3 else text


def cuts(rng: Random, length: int) -> list[int]:
    """Places to cut `length` items: single ones, or bundles as speculative decoding delivers them."""
    most = rng.choice((1, 2, 3, 5, 9, 40))
    places = [0]
    while places[-1] < length:
        places.append(min(length, places[-1] + rng.randrange(1, most + 1)))
    return places


def expected(case: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """What a case of the file expects: reasoning, content, calls with parsed arguments."""
    wanted = case["expect"]
    calls = [(call["name"], call["arguments"]) for call in wanted["tool_calls"]]
    return wanted["reasoning"] or "", wanted["content"] or "", calls


def parsed(result: Result) -> tuple[str, str, list[tuple[str, Any]]]:
    """`result` with its arguments parsed, which fails on anything but JSON."""
    reasoning, content, calls = result
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


def markup_in(result: Result) -> list[str]:
    """The tags left anywhere in a result."""
    everything = "\n".join([result[0], result[1], *(text for call in result[2] for text in call)])
    return [tag for tag in TAGS if tag in everything]
