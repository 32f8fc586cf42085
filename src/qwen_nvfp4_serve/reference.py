"""The reference models that come with this package, and questions that each of them answers exactly.

A folder with `known_answers.json` beside its `config.json` is a reference model, wherever it lies: its chat template
is the one it was trained on, and a start is READY only when it gives a known answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from qwen_nvfp4_serve.errors import UsageError, printable

FOLDER = Path(__file__).parent / "data" / "reference"
EMBEDDED = FOLDER / "moe"  # what `MODEL=embedded` serves, in place
NAMES = ("moe", "dense")
ANSWERS = "known_answers.json"
READY_CHARS = 8  # of an answer that no broken model gives by chance
SHOWN_CHARS = 120
CHARS_PER_TOKEN = 2  # fewer than any known question has
LEAST_TOKENS = 512  # a context into which a known answer of almost every kind fits
SPARE_TOKENS = 16  # for `</think>`, tool markup and the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An answer: text and thinking without white space around them, tool calls as (name, arguments).

    reasoning is None where there is no thinking.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    def shown(self) -> str:
        """For a message: what differs from a plain text is named."""
        parts = [f"thinking {self.reasoning!r}"] if self.reasoning is not None else []
        parts += [repr(self.content)] if self.content or not self.calls else []
        parts += [f"{name}({json.dumps(arguments)})" for name, arguments in self.calls]
        return printable(", ".join(parts), SHOWN_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """A question, as OpenAI messages and tools, and what the model answers to it greedily."""

    id: str
    task: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    thinks: bool
    expected: Given

    @property
    def kind(self) -> tuple[str, bool]:
        """What it asks for: its task, with thinking or without."""
        return self.task, self.thinks

    @property
    def question(self) -> str:
        """The last message's text."""
        return str(self.messages[-1]["content"])

    @property
    def answer_chars(self) -> int:
        """Characters of the answer, at least as many as its tokens."""
        expected = self.expected
        return len(expected.content) + len(expected.reasoning or "") + len(str(expected.calls))

    @property
    def chars(self) -> int:
        """Characters of question and answer, as JSON."""
        return len(json.dumps((self.messages, self.tools))) + self.answer_chars

    @property
    def most_tokens(self) -> int:
        """What the question and all that may be answered to it take."""
        return self.chars // CHARS_PER_TOKEN + self.answer_chars + SPARE_TOKENS

    def body(self, model: str) -> dict[str, Any]:
        """The chat completion request, greedy."""
        body: dict[str, Any] = {
            "model": model,
            "messages": list(self.messages),
            "temperature": 0,
            "max_tokens": self.answer_chars + SPARE_TOKENS,
            "chat_template_kwargs": {"enable_thinking": self.thinks},
        }
        return body | ({"tools": list(self.tools)} if self.tools else {})


def read_answers(folder: Path) -> tuple[KnownAnswer, ...]:
    """The known answers beside a checkpoint, none where it has none. Raises UsageError for a file that is no list of
    them.
    """
    path = folder / ANSWERS
    try:
        return tuple(_answer(record) for record in json.loads(path.read_text()))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            str(path), seen=f"{type(error).__name__}: {error}", expected="a list of known answers"
        ) from None


def _answer(record: Mapping[str, Any]) -> KnownAnswer:
    expect, thinks = record["expect"], bool(record.get("enable_thinking", False))
    return KnownAnswer(
        id=record["id"],
        task=record["task"],
        messages=tuple(record["messages"]),
        tools=tuple(record.get("tools", ())),
        thinks=thinks,
        expected=Given(
            content=expect["content"].strip(),
            reasoning=expect["reasoning"].strip() if thinks else None,
            calls=tuple((call["name"], call["arguments"]) for call in expect.get("tool_calls", ())),
        ),
    )


def given(message: Mapping[str, Any]) -> Given:
    """What a chat completion's message says. Raises ValueError for arguments that are no JSON."""
    reasoning = message.get("reasoning")
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Given(
        content=(message.get("content") or "").strip(),
        reasoning=reasoning.strip() if reasoning is not None else None,
        calls=tuple((call["name"], json.loads(call["arguments"])) for call in calls),
    )


def joined(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas make."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        for key in ("content", "reasoning"):
            if delta.get(key) is not None:
                message[key] = message.get(key, "") + delta[key]
        for part in delta.get("tool_calls") or ():
            call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
            for key in call:
                call[key] += part["function"].get(key) or ""
    return message | {"tool_calls": [{"function": call} for _, call in sorted(calls.items())]}


def one_of_each(answers: Sequence[KnownAnswer], max_model_len: int) -> tuple[KnownAnswer, ...]:
    """One answer of each kind, the first that fits into a context of `max_model_len` tokens."""
    kinds: dict[tuple[str, bool], KnownAnswer] = {}
    for answer in answers:
        if answer.most_tokens <= max_model_len:
            kinds.setdefault(answer.kind, answer)
    return tuple(kinds.values())


def ready_answer(answers: Sequence[KnownAnswer]) -> KnownAnswer | None:
    """The cheapest one that says something: a single question, without thinking or tools; None without such."""
    plain = [answer for answer in answers if len(answer.messages) == 1 and not answer.thinks and not answer.tools]
    telling = [answer for answer in plain if len(answer.expected.content) >= READY_CHARS]
    return min(telling, key=lambda answer: answer.chars, default=None)


def served_folder(root: str | None) -> Path | None:
    """Whose answers the model gives that a server loaded from `root`, as `/v1/models` says: `root` itself if it holds
    some on this disk, else our own folder that the path's end names, since the server may run in a container. None for
    any other model.
    """
    if root and os.path.isabs(root) and os.path.isfile(os.path.join(root, ANSWERS)):
        return Path(root)
    parts = PurePosixPath(root or "").parts[-2:]
    return FOLDER / parts[1] if len(parts) == 2 and parts[0] == FOLDER.name and parts[1] in NAMES else None
