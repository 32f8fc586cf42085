"""Words on the command line that are wrong, as one sentence of ours."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import ValidationError

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.settings_faults import KV_NVFP4_POLICY

# What typer raises for them; its own name for this class moved between releases.
WrongWords: type[Exception] = typer.BadParameter.__mro__[1]
KINDS = {"int": "a whole number", "float": "a number", "bool": "yes or no"}
LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def wrong_use(error: Any) -> UsageError:
    """The error for a refused option, argument or command: which one, what was seen, what would be right.

    error: one of WrongWords, which typer does not export.
    """
    do = f"See {error.ctx.command_path if error.ctx else 'qwen-nvfp4'} --help."
    cause = error.__cause__
    if isinstance(cause, ValidationError):
        name, seen = max(error.param.opts, key=len), str(cause.errors()[0]["input"])
        if name == "--kv-cache-dtype" and "nvfp4" in seen.lower():
            do = KV_NVFP4_POLICY
        return UsageError(name, seen=repr(seen), expected=_expected(cause), do=do)
    what, _, hint = error.format_message().partition(". ")
    return UsageError(what.rstrip("."), do=f"{hint} {do}".strip())


def _expected(cause: ValidationError) -> str:
    fault = cause.errors()[0]
    kind = next((words for start, words in KINDS.items() if fault["type"].startswith(start)), None)
    limits = [f"{word} {fault.get('ctx', {})[key]}" for key, word in LIMITS.items() if key in fault.get("ctx", {})]
    if kind or limits:
        return kind or " and ".join(limits)
    return fault["msg"].removeprefix("Value error, ").rpartition(" is not ")[2].rstrip(".")
