"""Tool calls: which tool, which arguments, of which types, several at once, and when not to call at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from qwen_nvfp4_serve.quality.task import Call, Calls, Exam, Says, Task, Want
from qwen_nvfp4_serve.quality.words import ACTIONS, ADJECTIVES, CITIES, COLORS, NOUNS, OBJECTS

ANSWER_TOKENS = 512
ARGUMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "city": ("string", CITIES),
    "color": ("string", COLORS),
    "item": ("string", NOUNS),
    "count": ("integer", ()),
    "days": ("integer", ()),
    "size": ("integer", ()),
    "urgent": ("boolean", ()),
    "loud": ("boolean", ()),
}
# What breaks a parser: quotes, braces, new lines, characters outside ASCII, text that looks like another type.
TEXTS = (
    'He said "yes", then left.',
    "def f(x):\n    return {'a': [x, \"b\"]}\n\nprint(f(1))",
    '{"key": "value", "list": [1, 2, 3]}',
    "a < b and b > c, so <b>bold</b> & 'quoted'",
    "Zürich, 東京, São Paulo: 100 % ✓",
    "C:\\temp\\new\\table.txt",
    "007",
    "first line\nsecond line\n\nfourth line",
)
Made = tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...], Want]  # tools, messages, what is right


def call_tasks(exam: Exam) -> tuple[Task, ...]:
    """`exam.each` tasks of every kind."""
    return tuple(_task(exam, kind, number) for kind in KINDS for number in range(exam.each))


def _task(exam: Exam, kind: str, number: int) -> Task:
    name = f"tools/{kind}/{number}"
    tools, messages, want = KINDS[kind](Random(f"{exam.seed}/{name}"), number)
    return Task(
        name=name,
        family="tools",
        kind=kind,
        messages=messages,
        tools=tools,
        want=want,
        answer_tokens=ANSWER_TOKENS,
    )


def _tool(name: str, properties: dict[str, Any], about: str = "") -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    described = about or name.replace("_", " the ")
    return {"type": "function", "function": {"name": name, "description": described, "parameters": parameters}}


def _user(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _signatures(rng: Random, count: int) -> dict[str, tuple[str, str]]:
    """Tools that share no name, with two arguments each."""
    verbs, nouns = rng.sample(ACTIONS, count), rng.sample(OBJECTS, count)
    pairs = [rng.sample(list(ARGUMENTS), 2) for _ in range(count)]
    return {f"{verb}_{noun}": (first, second) for verb, noun, (first, second) in zip(verbs, nouns, pairs, strict=True)}


def _listed(signatures: dict[str, tuple[str, str]]) -> tuple[dict[str, Any], ...]:
    return tuple(
        _tool(name, {argument: {"type": ARGUMENTS[argument][0]} for argument in arguments})
        for name, arguments in signatures.items()
    )


def _call(rng: Random, name: str, arguments: tuple[str, str]) -> Call:
    values: dict[str, Any] = {}
    for argument in arguments:
        kind, pool = ARGUMENTS[argument]
        values[argument] = (
            rng.choice(pool) if pool else rng.randrange(1, 1000) if kind == "integer" else rng.random() < 0.5
        )
    return Call(name, values)


def _spoken(call: Call) -> str:
    said = [f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in call.arguments.items()]
    return f"call {call.name} with {' and '.join(said)}"


def _one(rng: Random, _: int) -> Made:
    signatures = _signatures(rng, 1)
    (call,) = (_call(rng, name, arguments) for name, arguments in signatures.items())
    return _listed(signatures), _user(f"{_spoken(call)}."), Calls((call,))


def _pick(rng: Random, _: int) -> Made:
    signatures = _signatures(rng, 4)
    name = rng.choice(list(signatures))
    call = _call(rng, name, signatures[name])
    return _listed(signatures), _user(f"{_spoken(call)}."), Calls((call,))


def _two(rng: Random, _: int) -> Made:
    signatures = _signatures(rng, 3)
    calls = tuple(_call(rng, name, signatures[name]) for name in rng.sample(list(signatures), 2))
    return _listed(signatures), _user(f"{_spoken(calls[0])}, and also {_spoken(calls[1])}."), Calls(calls)


def _nested(rng: Random, _: int) -> Made:
    size, colors = rng.choice(("small", "medium", "large")), rng.sample(COLORS, 2)
    price, city, zip_code = rng.randrange(100, 10_000) / 4, rng.choice(CITIES), str(rng.randrange(1000, 10_000))
    properties = {
        "size": {"type": "string", "enum": ["small", "medium", "large"]},
        "colors": {"type": "array", "items": {"type": "string"}},
        "price": {"type": "number"},
        "gift": {"type": "boolean"},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["city", "zip"],
        },
    }
    gift = rng.random() < 0.5
    text = (
        f"call place_order with size {size}, colors {colors[0]} and {colors[1]} in that order, price {price}, "
        f"gift {json.dumps(gift)}, and the address with city {city} and zip {zip_code}."
    )
    arguments = {"size": size, "colors": colors, "price": price, "gift": gift}
    call = Call("place_order", arguments | {"address": {"city": city, "zip": zip_code}})
    return (_tool("place_order", properties),), _user(text), Calls((call,))


def _text(rng: Random, number: int) -> Made:
    title, text = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", TEXTS[number % len(TEXTS)]
    asked = (
        f"call save_note with the title {title} and, as its text, exactly what stands between the lines of dashes, "
        f"the dashes left out:\n---\n{text}\n---"
    )
    properties = {"title": {"type": "string"}, "text": {"type": "string"}}
    return (_tool("save_note", properties),), _user(asked), Calls((Call("save_note", {"title": title, "text": text}),))


def _result(rng: Random, number: int) -> Made:
    signatures = _signatures(rng, 2)
    name = next(iter(signatures))
    call, result = _call(rng, name, signatures[name]), str(rng.randrange(100, 1000))
    told = json.dumps({"result": result}) if number % 2 else result
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    messages = (
        *_user(f"{_spoken(call)}."),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": told},
    )
    return _listed(signatures), messages, Says(result)


def _none(rng: Random, _: int) -> Made:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    return _listed(_signatures(rng, 2)), _user(f"what is {a} + {b}? no tool is needed for that."), Says(str(a + b))


KINDS: dict[str, Callable[[Random, int], Made]] = {
    "one": _one,
    "pick": _pick,
    "two": _two,
    "nested": _nested,
    "text": _text,
    "result": _result,
    "none": _none,
}
