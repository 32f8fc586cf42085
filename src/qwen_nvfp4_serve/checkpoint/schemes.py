"""How vLLM reads one matrix: the label of its scheme, and the two ways a quantization config can be unreadable.

A label is `BF16`, `FP8`, `NVFP4 W4A4`, `NVFP4 W4A16`, or the name of another scheme (`INT4`, `MXFP8`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qwen_nvfp4_serve.checkpoint.naming import Unit, vllm_name

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
