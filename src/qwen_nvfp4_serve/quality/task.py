"""One question with one right answer, and the settings that say which questions a run asks."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from pydantic import ConfigDict

from qwen_nvfp4_serve.errors import UsageError

Family = Literal["needle", "arithmetic", "tools", "long"]
Thinking = Literal["off", "on", "default"]
FAMILIES: tuple[Family, ...] = get_args(Family)
THINKING: tuple[Thinking, ...] = get_args(Thinking)
SET: Final = 1  # raised whenever equal settings would ask something else, so that old results are not compared
LEAST_LENGTH = 256  # a needle's question and a few lines
MAX_EACH, MAX_CONCURRENCY = 1000, 256


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that is expected: the tool's name and its arguments as JSON values."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Number:
    """The last number of the answer is `value`."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Code:
    """The answer has this code of four digits, and no other."""

    code: str

    def __str__(self) -> str:
        return self.code


@dataclass(frozen=True, slots=True)
class Calls:
    """Exactly these calls, in any order, with equal typed arguments."""

    calls: tuple[Call, ...]

    def __str__(self) -> str:
        return ", ".join(f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in self.calls)


@dataclass(frozen=True, slots=True)
class Says:
    """No call, and an answer that has `text` in it as a word of its own."""

    text: str

    def __str__(self) -> str:
        return f"an answer with {self.text}, no call"


@dataclass(frozen=True, slots=True)
class Words:
    """Exactly these words in this order; case, punctuation and line breaks do not count."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Prose:
    """A text that neither degenerates nor ends before it began."""

    def __str__(self) -> str:
        return "a long text"


Want = Number | Code | Calls | Says | Words | Prose


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One request. name: unique within a run but for the thinking, and the same in every run with these settings.

    messages, tools: as the OpenAI API takes them. answer_tokens: room for the answer itself, thinking aside.
    length: tokens of the prompt that were aimed at, depth: where the needle stands in percent; of needles alone.
    """

    name: str
    family: Family
    kind: str
    messages: tuple[dict[str, Any], ...]
    want: Want
    answer_tokens: int
    tools: tuple[dict[str, Any], ...] = ()
    length: int | None = None
    depth: int | None = None

    @property
    def question(self) -> str:
        """The last line that the user wrote."""
        asked = next(message["content"] for message in reversed(self.messages) if message["role"] == "user")
        return str(asked).rstrip().rpartition("\n")[2]

    @property
    def fingerprint(self) -> str:
        """Equal for equal requests: 16 hex digits of the SHA-256 of messages and tools."""
        text = json.dumps([self.messages, self.tools], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """Every setting of a run.

    lengths: of needle prompts in tokens; depths: where the needle stands, in percent; needles: tasks at each of both.
    each: tasks of each kind of the other families. think_tokens: room for thinking, long_tokens: longest long answer.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    set: int = SET
    seed: int = 0
    families: tuple[Family, ...] = FAMILIES
    thinking: tuple[Thinking, ...] = ("off", "on")
    lengths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    needles: int = 2
    each: int = 8
    think_tokens: int = 4096
    long_tokens: int = 1024
    concurrency: int = 8
    timeout_s: float = 600.0


FULL = Exam()
QUICK = Exam(lengths=(1024, 4096), depths=(0, 50, 100), needles=1, each=2, think_tokens=2048, long_tokens=512)


def check_exam(exam: Exam) -> None:
    """Raises UsageError naming the option that is wrong."""
    for option, names in (("--families", exam.families), ("--thinking", exam.thinking)):
        known = FAMILIES if option == "--families" else THINKING
        if not names or set(names) - set(known) or len(set(names)) != len(names):
            seen = ",".join(names) or "nothing"
            raise UsageError(option, seen=seen, expected=f"some of {','.join(known)}, each once")
    bounds: dict[str, tuple[tuple[int, ...], int, int]] = {
        "--lengths": (exam.lengths, LEAST_LENGTH, 2**24),
        "--depths": (exam.depths, 0, 100),
        "--needles": ((exam.needles,), 1, MAX_EACH),
        "--each": ((exam.each,), 1, MAX_EACH),
        "--think-tokens": ((exam.think_tokens,), 0, 2**20),
        "--long-tokens": ((exam.long_tokens,), 64, 2**20),
        "--concurrency": ((exam.concurrency,), 1, MAX_CONCURRENCY),
        "--seed": ((exam.seed,), 0, 2**32),
    }
    for option, (values, least, most) in bounds.items():
        if not values or min(values) < least or max(values) > most or len(set(values)) != len(values):
            seen = ",".join(str(value) for value in values) or "nothing"
            several = "different numbers, each " if len(values) != 1 else "a number "
            raise UsageError(option, seen=seen, expected=f"{several}from {least} to {most}")
    if not (math.isfinite(exam.timeout_s) and exam.timeout_s > 0):
        raise UsageError("--timeout-s", seen=f"{exam.timeout_s:g}", expected="more than 0")
