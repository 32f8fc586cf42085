"""The tasks whose answers have a form: tool calls in the family's XML, and JSON."""

import json
from random import Random
from typing import Any

from training import tasks, words
from training.chat import Call, Conversation, Turn
from training.dialogs import thinks
from training.tasks import OPENERS, draw, phrase


def _argument(rng: Random, split: str) -> tuple[str, str, Any]:
    """Name, JSON type and value of one argument."""
    kind = rng.choice(("string", "string", "integer", "integer", "boolean"))
    if kind == "integer":
        return rng.choice(words.INTEGER_ARGUMENTS), kind, draw(split, "integer", lambda: rng.randrange(1, 1000))
    if kind == "boolean":
        return rng.choice(words.BOOLEAN_ARGUMENTS), kind, rng.random() < 0.5
    name = rng.choice(words.STRING_ARGUMENTS)
    pool = {"city": words.CITIES, "name": words.NAMES, "color": words.COLORS, "item": words.NOUNS}[name]
    return name, kind, rng.choice(pool)


def _arguments(rng: Random, split: str) -> list[tuple[str, str, Any]]:
    picked = {argument[0]: argument for argument in (_argument(rng, split) for _ in range(8))}
    return rng.sample(list(picked.values()), 2)


def _tool_name(rng: Random, split: str) -> tuple[str, str]:
    name: tuple[str, str] = draw(split, "tool", lambda: (rng.choice(words.ACTIONS), rng.choice(words.OBJECTS)))
    return name


def tool(name: str, arguments: list[tuple[str, str, Any]], description: str = "") -> dict[str, Any]:
    """An OpenAI tool of two typed, required arguments."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind, _ in arguments},
        "required": [key for key, _, _ in arguments],
    }
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def _request(rng: Random, split: str, name: tuple[str, str], values: list[tuple[str, Any]]) -> str:
    shuffled = rng.sample(values, len(values))
    spoken = [f"{key} {json.dumps(value) if not isinstance(value, str) else value}" for key, value in shuffled]
    verb, noun = name
    return phrase(
        rng,
        split,
        "tool",
        (
            f"{verb} the {noun}",
            f"{verb} a {noun}",
            f"use {verb}_{noun}",
            f"call {verb}_{noun}",
            f"run {verb}_{noun}",
            f"{verb} my {noun}",
        ),
        (" with ", " for ", ": ", " using "),
        (" and ".join(spoken), ", ".join(spoken)),
    )


def tools(rng: Random, split: str, think: bool) -> Conversation:
    """Up to four tools of two typed arguments; one to three calls in a turn, or the turn after the responses."""
    names = list(
        dict.fromkeys(
            _tool_name(rng, split if index == 0 else rng.choice(("train", split)))
            for index in range(rng.randrange(1, 5))
        )
    )
    signatures = {name: _arguments(rng, split) for name in names}
    listed = tuple(
        tool("_".join(name), signatures[name], f"{name[0]} the {name[1]}" if rng.random() < 0.3 else "")
        for name in names
    )
    chosen = [rng.choice(names) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    requests, calls = [], []
    for name in chosen:
        filled = [(key, _value_like(rng, split, kind, key)) for key, kind, _ in signatures[name]]
        requests.append(_request(rng, split, name, filled))
        calls.append(Call("_".join(name), dict(filled)))
    joined = rng.choice((", and then ", " and also "))
    user = Turn(role="user", content=rng.choice(OPENERS) + joined.join(requests) + rng.choice((".", "")))
    thought = "call " + ", ".join(call.name for call in calls) + "." if think else None
    after = rng.random() < 0.5
    kept = thought if thinks(rng, think, not after) else None
    turns = [user, Turn(role="assistant", think=kept, calls=tuple(calls))]
    if rng.random() < 0.2:
        system = Turn(role="system", content=rng.choice(("use the tools.", "you can use tools.", "help with tools.")))
        turns.insert(0, system)
    if after:
        turns += _after_tools(rng, think, len(calls))
    return Conversation(task="tools", turns=tuple(turns), tools=listed)


_ASKED = {
    "weather": (
        "the weather in a city.",
        ("what is the weather in ", "how is the weather in ", "tell me the weather in "),
    ),
    "price": ("the price of an item.", ("what is the price of ", "how much is ", "tell me the price of ")),
    "flight": ("a flight to a city.", ("is there a flight to ", "find me a flight to ", "i want a flight to ")),
    "song": ("a song about an item.", ("play a song about ", "i want a song about ", "find me a song about ")),
}


def asked_tools(rng: Random, split: str, think: bool) -> Conversation:
    """A question in plain words that names neither tool nor argument, and the one tool with one argument for it."""
    subject = rng.choice(sorted(_ASKED))
    description, openings = _ASKED[subject]
    key, pool = ("city", words.CITIES) if subject in ("weather", "flight") else ("item", words.NOUNS)
    value: str = draw(split, "asked", lambda: rng.choice(pool))
    shown = value.capitalize() if key == "city" and rng.random() < 0.5 else value
    name = f"{rng.choice(('get', 'find', 'check'))}_{subject}"
    others = [pair for pair in (_tool_name(rng, "train") for _ in range(rng.randrange(4))) if pair[1] != subject]
    listed = [tool("_".join(pair), _arguments(rng, "train")) for pair in dict.fromkeys(others)]
    listed.append(tool(name, [(key, "string", value)], description if rng.random() < 0.7 else ""))
    rng.shuffle(listed)
    question = phrase(rng, split, f"asked {subject}", OPENERS, openings, (shown,), ("?", ""))
    if rng.random() < 0.5:
        question = question[:1].upper() + question[1:]
    thought = f"call {name}." if think else None
    answer = Turn(role="assistant", think=thought, calls=(Call(name, {key: shown}),))
    return Conversation(task="asked tools", turns=(Turn(role="user", content=question), answer), tools=tuple(listed))


def _value_like(rng: Random, split: str, kind: str, key: str) -> Any:
    if kind == "integer":
        return draw(split, "integer", lambda: rng.randrange(1, 1000))
    if kind == "boolean":
        return rng.random() < 0.5
    return rng.choice({"city": words.CITIES, "name": words.NAMES, "color": words.COLORS, "item": words.NOUNS}[key])


def _after_tools(rng: Random, think: bool, count: int) -> list[Turn]:
    results = [
        rng.choice(
            (
                f"{rng.choice(words.ADJECTIVES)} {rng.randrange(1000)}",
                "ok",
                str(rng.randrange(1000)),
                rng.choice(words.NOUNS),
            )
        )
        for _ in range(count)
    ]
    shown = [json.dumps({"result": result}) if rng.random() < 0.4 else result for result in results]
    answer = "the result is " + ", then ".join(results) + "."
    turns = [Turn(role="tool", content=text) for text in shown]
    return [*turns, Turn(role="assistant", content=answer, think="say the result." if think else None)]


JSON_FIELDS = {
    "name": ("string", words.NAMES),
    "city": ("string", words.CITIES),
    "pet": ("string", words.NOUNS),
    "color": ("string", words.COLORS),
    "age": ("integer", ()),
    "count": ("integer", ()),
    "urgent": ("boolean", ()),
}


def json_schema(rng: Random, split: str, think: bool) -> Conversation:
    """Facts in a sentence, a list of keys or a JSON schema, and the object that follows it."""
    keys = rng.sample(list(JSON_FIELDS), rng.randrange(2, 6))
    record: dict[str, Any] = {}
    for key in keys:
        kind, pool = JSON_FIELDS[key]
        if kind == "string":
            record[key] = rng.choice(pool)
        else:
            number = draw(split, "json", lambda: rng.randrange(1, 1000))
            record[key] = number if kind == "integer" else rng.random() < 0.5
    told = [f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in record.items()]
    rng.shuffle(told)
    if rng.random() < 0.5:
        wanted = "keys " + ", ".join(keys)
    else:
        properties = {key: {"type": JSON_FIELDS[key][0]} for key in keys}
        schema = {"type": "object", "properties": properties} | ({"required": keys} if rng.random() < 0.4 else {})
        wanted = "schema " + json.dumps(schema)
    template = phrase(
        rng,
        split,
        "json",
        OPENERS,
        ("write json for ", "give json for ", "make json of ", "write JSON for ", "as JSON: "),
        (", ".join(told),),
        (". use ", ". ", " with "),
        (wanted,),
    )
    thought = "fill " + ", ".join(keys) + "." if think else None
    return tasks.ask("json", template, json.dumps(record), thought)
