"""A refused value in our words: the knob, what was seen, what would be right, and where to change it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from qwen_nvfp4_serve.errors import UsageError

KV_NVFP4_POLICY = (
    "An NVFP4 KV cache is refused by our policy: vLLM accepts it on SM12x, but wrong text was reported "
    "and nobody we trust has verified it."
)
SHOWN_CHARACTERS = 60
KINDS = {int: "a whole number", float: "a number", bool: "1 or 0"}


def explain(error: ValidationError, fields: Mapping[str, FieldInfo], in_environment: Collection[str]) -> UsageError:
    """One error for all faults; with a single one, its parts apart. A secret's value is never shown."""
    faults = [_fault(fault, fields, in_environment) for fault in error.errors()]
    return faults[0] if len(faults) == 1 else UsageError(" ".join(f"{fault.sentence()}" for fault in faults))


def _fault(fault: ErrorDetails, fields: Mapping[str, FieldInfo], in_environment: Collection[str]) -> UsageError:
    name = str(fault["loc"][0]).upper()
    field = fields[name]
    is_secret = "SecretStr" in str(field.annotation)
    where = "the environment, which wins over .env" if name in in_environment else ".env"
    do = f"Change {name} in {where}."
    near = get_close_matches(str(fault["input"]).lower(), _choices(field), n=1)
    if name == "KV_CACHE_DTYPE" and "nvfp4" in str(fault["input"]).lower():
        do = f"{KV_NVFP4_POLICY} {do}"
    elif near:
        do = f"Did you mean {near[0]}? {do}"
    return UsageError(
        name,
        seen="a secret" if is_secret else repr(fault["input"])[:SHOWN_CHARACTERS],
        expected=_expected(field) or fault["msg"].removeprefix("Value error, ").removeprefix("expected "),
        do=do,
    )


def _expected(field: FieldInfo) -> str:
    """`a whole number from 1 to 65535`, `fp8 or bfloat16`; empty for a text, whose own check says what it wants."""
    if choices := _choices(field):
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    kind = next((words for of, words in KINDS.items() if of in _types(field.annotation)), "")
    limits = _range(field)
    return kind + (" " if limits.startswith("from") else ", " if limits else "") + limits if kind else ""


def _choices(field: FieldInfo) -> list[str]:
    return [value for value in get_args(field.annotation) if isinstance(value, str)]


def _types(annotation: Any) -> tuple[Any, ...]:
    """The types in `int | None`, and in an `Annotated` one; `bool` counts as itself alone."""
    found = get_args(annotation) or (annotation,)
    return tuple(inner for part in found for inner in (get_args(part) or (part,)))


def _range(field: FieldInfo) -> str:
    least = next((f"{limit.ge}" for limit in field.metadata if isinstance(limit, Ge)), None)
    most = next((f"{limit.le}" for limit in field.metadata if isinstance(limit, Le)), None)
    above = next((f"{limit.gt}" for limit in field.metadata if isinstance(limit, Gt)), None)
    below = next((f"{limit.lt}" for limit in field.metadata if isinstance(limit, Lt)), None)
    if least is not None and most is not None:
        return f"from {least} to {most}"
    words = (("at least", least), ("more than", above), ("at most", most), ("less than", below))
    return " and ".join(f"{word} {limit}" for word, limit in words if limit is not None)
