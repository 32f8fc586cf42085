"""The text of a tool argument, read as its JSON schema says."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

Schema = Mapping[str, Any]

LONGEST_LITERAL = 10_000  # characters
DEEPEST = 16  # $ref and anyOf are followed this far; a schema may refer to itself
_ALIASES = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "map": "object", "list": "array", "tuple": "array", "none": "null",
}  # fmt: skip
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")  # Python converts no more than 4,300 digits
_WHOLE = re.compile(r"([+-]?[0-9]{1,300})\.0+")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_OF_PYTHON = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def properties_of(parameters: object) -> Schema:
    """The schemas by argument name of a function's `parameters`; empty where it declares none."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def types_of(schema: object, root: object, depth: int = 0) -> frozenset[str]:
    """The JSON types that `schema` admits; `root` is what its `$ref`s point into. Empty: it does not say."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return frozenset()
    found: set[str] = set()
    named = schema.get("type")
    for name in [named] if isinstance(named, str) else named if isinstance(named, list) else []:
        found.add(_ALIASES.get(str(name).lower(), str(name).lower()))
    if found:
        return frozenset(found)
    listed = schema.get("enum")
    values = list(listed) if isinstance(listed, list) else []
    values += [schema["const"]] if "const" in schema else []
    found |= {_OF_PYTHON.get(type(value), "null") for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found |= types_of(_resolve(reference, root), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else []:
            found |= types_of(branch, root, depth + 1)
    return frozenset(found)


def _resolve(reference: str, root: object) -> object:
    target = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def is_text(types: frozenset[str]) -> bool:
    """Whether a value is a string whatever it says, so that it can be passed on before it is complete."""
    return types <= {"string"}


def value_of(text: str, types: frozenset[str]) -> Any:
    """`text` as the first type that it can be: null, integer, number, boolean, object, array; else the text itself."""
    bare = text.strip()
    if "null" in types and bare.lower() == "null":
        return None
    if types & {"integer", "number"}:
        number = _number(bare, whole="number" not in types)
        if number is not None:
            return number
    if "boolean" in types and bare.lower() in _BOOLEANS:
        return _BOOLEANS[bare.lower()]
    wanted = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
    if wanted:
        parsed = parse_json(bare)
        parsed = parsed if isinstance(parsed, wanted) else parse_python(bare)
        if isinstance(parsed, wanted):
            return parsed
    return text


def _number(bare: str, *, whole: bool) -> int | float | None:
    if _INTEGER.fullmatch(bare):
        return int(bare)
    if match := _WHOLE.fullmatch(bare):
        return int(match[1])
    if whole:
        return None
    try:
        value = float(bare)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in bare else None


def parse_json(text: str) -> Any:
    """The JSON value of `text`; None for anything that is not JSON, NaN and infinities included."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def parse_python(text: str) -> Any:
    """The value of a Python literal as JSON has it (`{'a': True}`); None for anything else, and for long texts."""
    if len(text) > LONGEST_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(text)
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
