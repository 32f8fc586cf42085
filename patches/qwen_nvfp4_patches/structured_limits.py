"""A structured output that would take too long to compile is refused before it reaches the engine.

The engine compiles in one thread on a small machine, in time that grows with the square of the size, and nothing ends
it: one schema of 30,000 properties holds up every structured output of the server for hours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch
from qwen_nvfp4_patches.processes import serves_http

PARAMETERS = ("self", "model_config", "structured_outputs_config", "tokenizer")
# Measured with xgrammar 0.2.8 on two busy cores: 1,000 properties compile in 0.9 s, 2,000 in 4.2 s, 10,000 in 34 s;
# 10,000 choices (159,000 characters of grammar) in 11 s; an enum of 10,000 values in 0.3 s.
MOST_SCHEMAS = 2_000
NO_BACKEND = (
    "The JSON schema combines keywords that neither xgrammar nor llguidance can enforce, such as patternProperties "
    "beside properties. Leave them out, and check the answer for them."
)
# What llguidance says of keywords that it does not know, after xgrammar has refused the schema (llguidance 1.x).
UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
MOST_CHOICES = 2_000
MOST_CHARACTERS = {"json": 262_144, "structural_tag": 262_144, "regex": 32_768, "grammar": 65_536}


def fault_of(asked: Any) -> str | None:
    """Why `asked`, a StructuredOutputsParams, is too large; None if it is not."""
    for name, most in MOST_CHARACTERS.items():
        value = getattr(asked, name)
        text = value if isinstance(value, str) else json.dumps(value)
        if value is not None and len(text) > most:
            return _sentence(name, len(text), most, "characters")
    if asked.choice is not None:
        characters = sum(len(str(choice)) for choice in asked.choice)
        if len(asked.choice) > MOST_CHOICES:
            return _sentence("choice", len(asked.choice), MOST_CHOICES, "choices")
        if characters > MOST_CHARACTERS["grammar"]:
            return _sentence("choice", characters, MOST_CHARACTERS["grammar"], "characters")
    for name in ("json", "structural_tag"):
        value = getattr(asked, name)
        count = sum(1 for _ in _objects(_parsed(value)))
        if count > MOST_SCHEMAS:
            return _sentence(name, count, MOST_SCHEMAS, "objects, subschemas included")
    return None


def _clearer(error: Exception) -> Exception:
    """`error`, or one that says in words which keywords of the schema are the trouble."""
    from vllm.exceptions import VLLMValidationError

    found = UNKNOWN_KEYS.search(str(error))
    if found is None:
        return error
    keys = ", ".join(word.strip(' "') for word in found.group(1).split(","))
    says = f"The JSON schema uses {keys}, which neither xgrammar nor llguidance can enforce. "
    says += "Leave it out, and check the answer for it."
    clearer: Exception = VLLMValidationError(says, parameter="structured_outputs")
    return clearer


def _sentence(name: str, seen: int, most: int, unit: str) -> str:
    return f"The structured output ({name}) has {seen:,} {unit}; at most {most:,} can be compiled in reasonable time."


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None  # reported by vLLM's own checks


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects in `value`, however deep."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def limiting(original: Any) -> Any:
    """SamplingParams._validate_structured_outputs that looks at the size first, and does not fall back on Outlines,
    which indexes the whole vocabulary and is then ended by vLLM's timeout: 500.
    """

    def _validate_structured_outputs(self: Any, *values: Any, **named: Any) -> None:
        from vllm.exceptions import VLLMValidationError

        asked = self.structured_outputs
        fault = fault_of(asked) if asked is not None else None
        if fault is not None:
            raise VLLMValidationError(fault, parameter="structured_outputs")
        try:
            original(self, *values, **named)
        except VLLMValidationError as error:
            raise _clearer(error) from None
        if asked is not None and asked._backend == "outlines" and asked._backend_was_auto:
            raise VLLMValidationError(NO_BACKEND, parameter="structured_outputs")

    return _validate_structured_outputs


def _needed() -> Need:
    if not serves_http():
        return Need(False, "this process serves no HTTP")
    from vllm import envs

    if hasattr(envs, "VLLM_GRAMMAR_COMPILATION_TIMEOUT_S"):
        return Need(False, "vLLM ends a compilation that takes too long")
    return Need(True, "vLLM compiles a schema of any size, and every other one waits")


def _apply() -> None:
    from vllm.sampling_params import SamplingParams

    seams.replace_function(SamplingParams, "_validate_structured_outputs", limiting, PARAMETERS)


PATCH = Patch(
    name="structured-limits",
    platform=None,
    changes="SamplingParams._validate_structured_outputs refuses schemas, choices, patterns and grammars that are "
    "too large, and schemas that only Outlines could compile, and names the keywords that no backend enforces",
    why="one schema of some thousand properties holds up every structured output of the server; one for Outlines "
    "ends as 500",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/structured_output/backend_xgrammar.py",
    remove_when="vLLM bounds the time of every compilation, as it does for regular expressions",
    needed=_needed,
    apply=_apply,
)
