"""The tasks with context: notes to look up, earlier turns, a system rule, tools, and JSON."""

import json
from random import Random
from typing import Any

from training import tasks, words
from training.chat import Call, Conversation, Turn
from training.tasks import OPENERS, draw, held_out, phrase

NEEDLE_KEYS = 64


def _key(rng: Random, split: str) -> str:
    key: str = draw(
        rng, split, "key", lambda: f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
    )
    return key


def _filler(rng: Random) -> str:
    first, second = rng.choice(words.ADJECTIVES), rng.choice(words.ADJECTIVES)
    return f"the {first} {rng.choice(words.NOUNS)} {rng.choice(words.VERBS)} the {second} {rng.choice(words.NOUNS)}."


def _notes(rng: Random, split: str, keys: int, fill: int) -> tuple[list[str], dict[str, str]]:
    """Lines in order, and what each key stands for; the key asked for in eval is held out."""
    values: dict[str, str] = {}
    while len(values) < keys:
        value = draw(rng, split, "code", lambda: rng.randrange(1000, 10000))
        values[_key(rng, split if not values else rng.choice(("train", split)))] = str(value)
    form = rng.choice(("{}: {}", "the code for {} is {}.", "{} = {}", "note: {} has code {}."))
    lines = [form.format(key, value) for key, value in values.items()] + [_filler(rng) for _ in range(fill)]
    rng.shuffle(lines)
    return lines, values


def _question(rng: Random, split: str, key: str) -> str:
    return phrase(
        rng, split, "lookup", OPENERS, ("what is ", "find ", "give me ", "tell me "),
        (f"the code for {key}", f"the code of {key}", f"the value of {key}"), ("?", ".", ""),
    )


def lookup(rng: Random, split: str, think: bool, *, keys: int, tokens: int, questions: int) -> Conversation:
    """Notes of up to `tokens` tokens with `keys` keys, then questions about some of them.

    A line costs about 9 tokens. `depth` is where the asked key stands, when there is one question.
    """
    lines, values = _notes(rng, split, keys, max(0, (tokens - 60) // 8 - keys))
    text = "\n".join(lines)
    asked = [next(iter(values))] if questions == 1 else rng.sample(list(values), min(questions, keys))
    first = phrase(rng, split, "notes", ("here are some notes.\n", "look at these notes:\n", "notes:\n"), (text,))
    turns: list[Turn] = []
    for key in asked:
        question = _question(rng, split, key)
        turns.append(Turn(role="user", content=f"{first}\n{question}" if not turns else question))
        turns.append(Turn(role="assistant", content=values[key], think=f"find {key}." if think else None))
    depth = text.index(asked[0]) / max(1, len(text))
    return Conversation(task="needle" if tokens > 400 else "lookup", turns=tuple(turns), depth=depth)


PERSONAL = {
    "name": (("my name is {}.", "i am {}."), ("what is my name?", "who am i?"), words.NAMES),
    "city": (("i live in {}.", "my city is {}."), ("where do i live?", "what is my city?"), words.CITIES),
    "pet": (("my pet is a {}.", "i have a pet {}."), ("what is my pet?", "which pet do i have?"), words.NOUNS),
    "color": (("i like the color {}.", "my color is {}."), ("which color do i like?", "what is my color?"), words.COLORS),
    "number": (("my number is {}.", "note my number, {}."), ("what is my number?", "which is my number?"), ()),
}


def recall(rng: Random, split: str, think: bool) -> Conversation:
    """Facts told over one to four turns, then questions about them."""
    kinds = rng.sample(list(PERSONAL), rng.randrange(2, 5) if rng.random() < 0.6 else 4)
    facts: dict[str, str] = {}
    turns: list[Turn] = []
    for kind in kinds:
        told, _, pool = PERSONAL[kind]
        facts[kind] = rng.choice(pool) if pool else str(draw(rng, split, "mine", lambda: rng.randrange(100, 1000)))
        statement = phrase(rng, split, f"tell {kind}", (*OPENERS, "note: ", "ok, "), tuple(t.format(facts[kind]) for t in told))
        turns.append(Turn(role="user", content=statement))
        turns.append(Turn(role="assistant", content="ok."))
    for kind in rng.sample(kinds, min(len(kinds), rng.randrange(1, 3))):
        question = phrase(rng, split, f"ask {kind}", (*OPENERS, "tell me: ", "say, "), PERSONAL[kind][1])
        turns.append(Turn(role="user", content=question))
        turns.append(Turn(role="assistant", content=facts[kind], think=f"you told me your {kind}." if think else None))
    return Conversation(task="recall", turns=tuple(turns))


def _short_base(rng: Random, split: str, think: bool) -> Conversation:
    choice = rng.randrange(3)
    if choice == 0:
        return tasks.compare(rng, split, think)
    if choice == 1:
        return tasks.chat(rng, split, think)
    return lookup(rng, split, think, keys=rng.randrange(2, 6), tokens=0, questions=1)


def system_rule(rng: Random, split: str, think: bool) -> Conversation:
    """A rule in the system message that changes every answer: a mark at an end, a frame, a fixed reply, a name."""
    rule = rng.choice(("end", "start", "frame", "fixed", "name"))
    mark = rng.choice(words.MARKS)
    if rule == "name":
        name = rng.choice(words.NAMES)
        system = phrase(rng, split, "system name", ("", "hello. ", "note: "), (f"you are {name}.", f"your name is {name}.", f"act as {name}."))
        question = rng.choice(("who are you?", "what is your name?", "tell me your name."))
        return tasks.ask("system", question, f"i am {name}.", f"i am {name}." if think else None, system)
    base = _short_base(rng, split, think)
    answer = base.turns[-1].content
    if rule == "fixed":
        word = rng.choice(words.NOUNS)
        system = phrase(
            rng, split, "system fixed", ("always ", "only ", "to all, "), ("answer ", "reply ", "say "), (f"with the word {word}.", f"with {word}.")
        )
        return tasks.ask("system", base.turns[-2].content, word, f"only {word}." if think else None, system)
    forms = {
        "end": (("end each ", "end every ", "finish each "), f" with the word {mark}.", f"{answer} {mark}"),
        "start": (("start each ", "start every ", "begin each "), f" with the word {mark}.", f"{mark} {answer}"),
        "frame": (("write each ", "put each ", "put every "), " in [ ].", f"[{answer}]"),
    }
    head, tail, text = forms[rule]
    system = phrase(rng, split, f"system {rule}", ("", "always ", "a rule: "), head, (f"answer{tail}", f"reply{tail}"))
    thought = f"{base.turns[-1].think} {rule}: {'[ ]' if rule == 'frame' else mark}." if think else None
    return tasks.ask("system", base.turns[-2].content, text, thought, system)


def _argument(rng: Random, split: str) -> tuple[str, str, Any]:
    """Name, JSON type and value of one argument."""
    kind = rng.choice(("string", "string", "integer", "integer", "boolean"))
    if kind == "integer":
        return rng.choice(words.INTEGER_ARGUMENTS), kind, draw(rng, split, "integer", lambda: rng.randrange(1, 1000))
    if kind == "boolean":
        return rng.choice(words.BOOLEAN_ARGUMENTS), kind, rng.random() < 0.5
    name = rng.choice(words.STRING_ARGUMENTS)
    pool = {"city": words.CITIES, "name": words.NAMES, "color": words.COLORS, "item": words.NOUNS}[name]
    return name, kind, rng.choice(pool)


def _arguments(rng: Random, split: str) -> list[tuple[str, str, Any]]:
    picked = {argument[0]: argument for argument in (_argument(rng, split) for _ in range(8))}
    return rng.sample(list(picked.values()), 2)


def _tool_name(rng: Random, split: str) -> tuple[str, str]:
    name: tuple[str, str] = draw(rng, split, "tool", lambda: (rng.choice(words.ACTIONS), rng.choice(words.OBJECTS)))
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
        rng, split, "tool", (f"{verb} the {noun}", f"{verb} a {noun}", f"use {verb}_{noun}", f"call {verb}_{noun}"),
        (" with ", " for ", ": "), (" and ".join(spoken), ", ".join(spoken)),
    )


def tools(rng: Random, split: str, think: bool) -> Conversation:
    """Up to four tools of two typed arguments; one to three calls in a turn, or the turn after the responses."""
    names = list({_tool_name(rng, split if index == 0 else rng.choice(("train", split))) for index in range(rng.randrange(1, 5))})
    signatures = {name: _arguments(rng, split) for name in names}
    listed = tuple(
        tool("_".join(name), signatures[name], f"{name[0]} the {name[1]}" if rng.random() < 0.3 else "") for name in names
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
    turns = [user, Turn(role="assistant", think=thought, calls=tuple(calls))]
    if rng.random() < 0.2:
        system = Turn(role="system", content=rng.choice(("use the tools.", "you can use tools.", "help with tools.")))
        turns.insert(0, system)
    if rng.random() < 0.5:
        turns += _after_tools(rng, think, len(calls))
    return Conversation(task="tools", turns=tuple(turns), tools=listed)


def _value_like(rng: Random, split: str, kind: str, key: str) -> Any:
    if kind == "integer":
        return draw(rng, split, "integer", lambda: rng.randrange(1, 1000))
    if kind == "boolean":
        return rng.random() < 0.5
    return rng.choice({"city": words.CITIES, "name": words.NAMES, "color": words.COLORS, "item": words.NOUNS}[key])


def _after_tools(rng: Random, think: bool, count: int) -> list[Turn]:
    results = [
        rng.choice((f"{rng.choice(words.ADJECTIVES)} {rng.randrange(1000)}", "ok", str(rng.randrange(1000)), rng.choice(words.NOUNS)))
        for _ in range(count)
    ]
    shown = [json.dumps({"result": result}) if rng.random() < 0.4 else result for result in results]
    answer = "the result is " + ", then ".join(results) + "."
    turns = [Turn(role="tool", content=text) for text in shown]
    return [*turns, Turn(role="assistant", content=answer, think="say the result." if think else None)]


JSON_FIELDS = {
    "name": ("string", words.NAMES), "city": ("string", words.CITIES), "pet": ("string", words.NOUNS),
    "color": ("string", words.COLORS), "age": ("integer", ()), "count": ("integer", ()), "urgent": ("boolean", ()),
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
            number = draw(rng, split, "json", lambda: rng.randrange(1, 1000))
            record[key] = number if kind == "integer" else rng.random() < 0.5
    told = [f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in record.items()]
    rng.shuffle(told)
    if rng.random() < 0.5:
        wanted = "keys " + ", ".join(keys)
    else:
        properties = {key: {"type": JSON_FIELDS[key][0]} for key in keys}
        wanted = "schema " + json.dumps({"type": "object", "properties": properties})
    template = phrase(
        rng, split, "json", OPENERS, ("write json for ", "give json for ", "make json of "), (", ".join(told),),
        (". use ", ". ", " with "), (wanted,),
    )
    thought = "fill " + ", ".join(keys) + "." if think else None
    return tasks.ask("json", template, json.dumps(record), thought)


def split_is_clean(conversation: Conversation) -> bool:
    """True when the first asked key of a lookup is held out; used by tests."""
    question = conversation.turns[-2].content
    words_asked = question.rstrip("?.").split()[-2:]
    return held_out("key", " ".join(words_asked))
