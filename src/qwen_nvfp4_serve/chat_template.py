"""Our chat template for the Qwen3.5 family, and rendering it as transformers does."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_PATH = Path(__file__).parent / "data" / "chat_template.jinja"
# Stands behind the `<` of a special token that a client wrote; the output parser takes it out again.
JOINER = "\u2060"


def neutralised(text: str, special: str) -> str:
    """`text` with each `special` in it as the template writes it, so that a tokenizer reads it as plain text."""
    return text.replace(special, f"<{JOINER}{special[1:]}")


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template: str | None = None,
    **variables: Any,
) -> str:
    """The prompt of a conversation. `template` defaults to ours; `variables` are what clients send in
    `chat_template_kwargs`, such as `enable_thinking`. Raises jinja2's TemplateError for an unknown role.
    """
    source = TEMPLATE_PATH.read_text() if template is None else template
    return _compiled(source).render(
        messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
    )


@functools.cache
def _compiled(source: str) -> Template:
    """`source` in the environment of transformers 5 (`utils/chat_template_utils.py`), as far as the family uses it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
