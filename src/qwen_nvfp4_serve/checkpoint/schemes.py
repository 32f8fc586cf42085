"""How vLLM reads one matrix: the label of its scheme, and the two ways a quantization config can be unreadable.

A label is `BF16`, `FP8`, `NVFP4 W4A4`, `NVFP4 W4A16`, or the name of another scheme (`INT4`, `MXFP8`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from qwen_nvfp4_serve.checkpoint.naming import Unit, vllm_name
from qwen_nvfp4_serve.checkpoint.patience import SlowMatchError, matches

PLAIN = "BF16"


@dataclass
class SplitError(Exception):
    """A unit whose parts the config treats differently; `reason` says which."""

    unit: str
    reason: str


@dataclass
class SchemeError(Exception):
    """A config that vLLM refuses or would misread as a whole: fault code, the names concerned, the sentence."""

    code: str
    names: tuple[str, ...]
    says: str


class Resolver(Protocol):
    """A quantization config as vLLM applies it."""

    @property
    def declares_kv_scales(self) -> bool:
        """True when the config asks for a quantized KV cache."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Modules whose algorithm vLLM does not know, and so would leave unquantized without a word."""

    def scheme(self, unit: Unit) -> str:
        """The label for `unit`. Raises SplitError when its parts would differ."""


@dataclass(frozen=True, slots=True)
class Unquantized:
    """No quantization config: everything is BF16."""

    declares_kv_scales: bool = False
    unknown: tuple[str, ...] = ()

    def scheme(self, unit: Unit) -> str:  # noqa: ARG002
        """BF16."""
        return PLAIN


class Patterns:
    """A list of names and of expressions that begin with `re:`, asked for the first entry that matches a name."""

    __slots__ = ("_expressions", "_places")

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises re.error for an expression that is none."""
        self._places: dict[str, int] = {}
        for entry in entries:
            self._places.setdefault(entry, len(self._places))
        self._expressions = [
            (place, re.compile(entry[3:]), entry) for entry, place in self._places.items() if entry.startswith("re:")
        ]

    def first(self, name: str) -> str | None:
        """The first entry that is `name` or whose expression matches its beginning.

        Raises SchemeError for an expression that takes too long to say (see `patience`).
        """
        exact = self._places.get(name)
        for place, expression, entry in self._expressions:
            if exact is not None and exact < place:
                break
            if matched(expression, entry, name):
                return entry
        return None if exact is None else name


def matched(expression: re.Pattern[str], entry: str, name: str) -> bool:
    """Whether the expression of `entry` matches the beginning of `name`. Raises SchemeError if it takes too long."""
    try:
        return matches(expression, name)
    except SlowMatchError:
        says = f"pattern {entry!r} takes for ever on {name}, in vLLM too"
        raise SchemeError("slow-pattern", (entry,), says) from None


def mapped(name: str, *, text_only: bool) -> str:
    """An entry of a config under vLLM's names; regular expressions stay as they are."""
    return name if name.startswith("re:") else vllm_name(name, text_only=text_only)


def name_list(value: object, key: str) -> list[str]:
    """`value` as a list of strings, None as an empty one. Raises SchemeError naming `key`."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemeError("config", (key,), f"{key} is not a list of names")
    return value
