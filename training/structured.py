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
    after = rng.random() < 0.5
    turns = _order(rng, split, signatures, chosen, thinks(rng, think, not after))
    if rng.random() < 0.2:
        system = Turn(role="system", content=rng.choice(("use the tools.", "you can use tools.", "help with tools.")))
        turns.insert(0, system)
    if after:
        turns += _after_tools(rng, think, len(chosen))
    return Conversation(task="tools", turns=tuple(turns), tools=listed)


def _order(
    rng: Random,
    split: str,
    signatures: dict[tuple[str, str], list[tuple[str, str, Any]]],
    chosen: list[Any],
    think: bool,
) -> list[Turn]:
    """A user's turn that wants the tools of `chosen` with values of its own, and the calls that follow."""
    requests, calls = [], []
    for name in chosen:
        filled = [(key, _value_like(rng, split, kind, key)) for key, kind, _ in signatures[name]]
        requests.append(_request(rng, split, name, filled))
        calls.append(Call("_".join(name), dict(filled)))
    joined = rng.choice((", and then ", " and also "))
    user = Turn(role="user", content=rng.choice(OPENERS) + joined.join(requests) + rng.choice((".", "")))
    thought = "call " + ", ".join(call.name for call in calls) + "." if think else None
    return [user, Turn(role="assistant", think=thought, calls=tuple(calls))]


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


def chained_tools(rng: Random, split: str, think: bool) -> Conversation:
    """Calls in turn: an order whose second call takes the number that the first gave, or a second order."""
    first, second = _tool_name(rng, split), _tool_name(rng, "train")
    while second == first:
        second = _tool_name(rng, "train")
    signatures = {first: _arguments(rng, split), second: _arguments_with_a_number(rng, split)}
    orders = list(signatures)
    others = [name for name in (_tool_name(rng, "train") for _ in range(rng.randrange(3))) if name not in signatures]
    signatures |= {name: _arguments(rng, "train") for name in others}
    listed = [tool("_".join(name), arguments) for name, arguments in signatures.items()]
    rng.shuffle(listed)
    found = draw(split, "found", lambda: rng.randrange(1, 1000))
    values = [[(key, _value_like(rng, split, kind, key)) for key, kind, _ in signatures[name]] for name in orders]
    taking = next(key for key, kind, _ in signatures[second] if kind == "integer")
    in_one = rng.random() < 0.6
    if in_one:
        spoken = [(key, "the result" if key == taking else value) for key, value in values[1]]
        values[1] = [(key, found if key == taking else value) for key, value in values[1]]
    else:
        spoken = values[1]
    asked = [_request(rng, split, first, values[0]), _request(rng, split, second, spoken)]
    calls = [Call("_".join(name), dict(filled)) for name, filled in zip(orders, values, strict=True)]
    opening = rng.choice(OPENERS)
    turns = [Turn(role="user", content=opening + (f"{asked[0]}, then {asked[1]}." if in_one else f"{asked[0]}."))]
    turns += [_call(rng, think, calls[0]), Turn(role="tool", content=_shown(rng, str(found)))]
    if not in_one:
        thought = "say the result." if thinks(rng, think, False) else None
        turns.append(Turn(role="assistant", content=f"the result is {found}.", think=thought))
        turns.append(Turn(role="user", content=rng.choice(OPENERS) + asked[1] + "."))
    turns += [_call(rng, think, calls[1]), *_after_tools(rng, think, 1)]
    if rng.random() < 0.3:  # and one more order, of one or two calls
        chosen = [rng.choice(orders) for _ in range(rng.choice((1, 2, 2)))]
        turns += _order(rng, split, signatures, chosen, thinks(rng, think, rng.random() < 0.5))
        turns += _after_tools(rng, think, len(chosen))
    return Conversation(task="chained tools", turns=tuple(turns), tools=tuple(listed))


def _arguments_with_a_number(rng: Random, split: str) -> list[tuple[str, str, Any]]:
    while True:
        arguments = _arguments(rng, split)
        if any(kind == "integer" for _, kind, _ in arguments):
            return arguments


def _call(rng: Random, think: bool, call: Call) -> Turn:
    thought = f"call {call.name}." if thinks(rng, think, rng.random() < 0.5) else None
    return Turn(role="assistant", think=thought, calls=(call,))


def _shown(rng: Random, result: str) -> str:
    return json.dumps({"result": result}) if rng.random() < 0.4 else result


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
    shown = [_shown(rng, result) for result in results]
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
