"""The tasks with context: notes to look up, earlier turns, a system rule, tools, and JSON."""

from random import Random

from training import tasks, words
from training.chat import Conversation, Turn
from training.tasks import OPENERS, draw, phrase

NEEDLE_KEYS = 64


def _key(rng: Random, split: str) -> str:
    key: str = draw(split, "key", lambda: f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}")
    return key


def _filler(rng: Random) -> str:
    first, second = rng.choice(words.ADJECTIVES), rng.choice(words.ADJECTIVES)
    return f"the {first} {rng.choice(words.NOUNS)} {rng.choice(words.VERBS)} the {second} {rng.choice(words.NOUNS)}."


def _notes(rng: Random, split: str, keys: int, fill: int) -> tuple[list[str], dict[str, str]]:
    """Lines in order, and what each key stands for; the key asked for in eval is held out."""
    values: dict[str, str] = {}
    while len(values) < keys:
        value = draw(split, "code", lambda: rng.randrange(1000, 10000))
        values[_key(rng, split if not values else rng.choice(("train", split)))] = str(value)
    form = rng.choice(("{}: {}", "the code for {} is {}.", "{} = {}", "note: {} has code {}."))
    lines = [form.format(key, value) for key, value in values.items()] + [_filler(rng) for _ in range(fill)]
    rng.shuffle(lines)
    return lines, values


def _question(rng: Random, split: str, key: str) -> str:
    return phrase(
        rng,
        split,
        "lookup",
        OPENERS,
        ("what is ", "find ", "give me ", "tell me "),
        (f"the code for {key}", f"the code of {key}", f"the value of {key}"),
        ("?", ".", ""),
    )


def thinks(rng: Random, think: bool, last: bool) -> bool:
    """Whether a turn thinks: clients drop the thinking of earlier turns, so those are often without."""
    return think and (last or rng.random() < 0.4)


def lookup(rng: Random, split: str, think: bool, *, keys: int, tokens: int, questions: int) -> Conversation:
    """Notes of up to `tokens` tokens with `keys` keys, then questions about some of them.

    A line costs about 9 tokens. `depth` is where the asked key stands, when there is one question.
    """
    lines, values = _notes(rng, split, keys, max(0, (tokens - 60) // 8 - keys))
    text = "\n".join(lines)
    asked = [next(iter(values))] if questions == 1 else rng.sample(list(values), min(questions, keys))
    heading = ("here are some notes", "look at these notes", "notes", "the notes")
    first = phrase(rng, split, "notes", OPENERS, heading, (":\n", ".\n"), (text,))
    turns: list[Turn] = []
    for index, key in enumerate(asked):
        question = _question(rng, split, key)
        turns.append(Turn(role="user", content=f"{first}\n{question}" if not turns else question))
        thought = f"find {key}." if thinks(rng, think, index + 1 == len(asked)) else None
        turns.append(Turn(role="assistant", content=values[key], think=thought))
    depth = text.index(asked[0]) / max(1, len(text))
    return Conversation(task="needle" if tokens > 400 else "lookup", turns=tuple(turns), depth=depth)


PERSONAL: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "name": (
        ("my name is {}", "i am {}", "i am called {}"),
        ("what is my name", "who am i", "say my name"),
        words.NAMES,
    ),
    "city": (
        ("i live in {}", "my city is {}", "my home is in {}"),
        ("where do i live", "what is my city", "name my city"),
        words.CITIES,
    ),
    "pet": (
        ("my pet is a {}", "i have a pet {}", "my pet is called {}"),
        ("what is my pet", "which pet do i have", "name my pet"),
        words.NOUNS,
    ),
    "color": (
        ("i like the color {}", "my color is {}", "the color i like is {}"),
        ("which color do i like", "what is my color", "name my color"),
        words.COLORS,
    ),
    "number": (
        ("my number is {}", "the number is {}", "i have the number {}"),
        ("what is my number", "which is my number", "say my number"),
        (),
    ),
}
TELL_OPENERS = ("", "note: ", "ok, ", "now ", "hi, ", "also, ", "and ", "by the way, ")
TELL_ENDINGS = (".", "", "!", ". remember it.", ", remember.")
ASK_OPENERS = ("", "please ", "now ", "hi, ", "tell me: ", "say, ", "and ", "so, ")
ASK_ENDINGS = ("?", "", ".", "? one word only.")


def recall(rng: Random, split: str, think: bool) -> Conversation:
    """Facts told over one to four turns, then questions about them."""
    kinds = rng.sample(list(PERSONAL), rng.randrange(2, 5) if rng.random() < 0.6 else 4)
    facts: dict[str, str] = {}
    turns: list[Turn] = []
    for kind in kinds:
        told, _, pool = PERSONAL[kind]
        facts[kind] = rng.choice(pool) if pool else str(draw(split, "mine", lambda: rng.randrange(100, 1000)))
        forms = tuple(form.format(facts[kind]) for form in told)
        statement = phrase(rng, split, f"told {kind}", TELL_OPENERS, forms, TELL_ENDINGS)
        turns.append(Turn(role="user", content=statement))
        turns.append(Turn(role="assistant", content="ok."))
    asked = rng.sample(kinds, min(len(kinds), rng.randrange(1, 3)))
    for index, kind in enumerate(asked):
        thought = f"you told me your {kind}." if thinks(rng, think, index + 1 == len(asked)) else None
        question = phrase(rng, split, f"asked {kind}", ASK_OPENERS, PERSONAL[kind][1], ASK_ENDINGS)
        turns.append(Turn(role="user", content=question))
        turns.append(Turn(role="assistant", content=facts[kind], think=thought))
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
        system = phrase(
            rng,
            split,
            "system name",
            ("", "hello. ", "note: ", "ok. "),
            (f"you are {name}.", f"your name is {name}.", f"act as {name}.", f"play {name}."),
            ("", " be kind.", " be brief."),
        )
        question = rng.choice(("who are you?", "what is your name?", "tell me your name."))
        return tasks.ask("system", question, f"i am {name}.", f"i am {name}." if think else None, system)
    base = _short_base(rng, split, think)
    answer = base.turns[-1].content
    if rule == "fixed":
        word = rng.choice(words.NOUNS)
        system = phrase(
            rng,
            split,
            "system fixed",
            ("always ", "only ", "to all, ", "note: "),
            ("answer ", "reply ", "say "),
            (f"with the word {word}.", f"with {word}."),
            ("", " nothing else."),
        )
        return tasks.ask("system", base.turns[-2].content, word, f"only {word}." if think else None, system)
    forms = {
        "end": (("end each ", "end every ", "finish each "), f" with the word {mark}.", f"{answer} {mark}"),
        "start": (("start each ", "start every ", "begin each "), f" with the word {mark}.", f"{mark} {answer}"),
        "frame": (("write each ", "put each ", "put every "), " in [ ].", f"[{answer}]"),
    }
    head, tail, text = forms[rule]
    openers = ("", "always ", "a rule: ", "note: ")
    targets = (f"answer{tail}", f"reply{tail}")
    system = phrase(rng, split, f"system {rule}", openers, head, targets, ("", " no exceptions.", " be brief."))
    thought = f"{base.turns[-1].think} {rule}: {'[ ]' if rule == 'frame' else mark}." if think else None
    return tasks.ask("system", base.turns[-2].content, text, thought, system)


def mixed(rng: Random, split: str, think: bool) -> Conversation:
    """Two or three unrelated questions in one conversation."""
    makers = (tasks.arithmetic, tasks.compare, tasks.copy_items, tasks.reverse_items, tasks.sort_items, tasks.chat)
    turns: list[Turn] = []
    for left in range(rng.randrange(1, 3), -1, -1):
        turns += rng.choice(makers)(rng, split, thinks(rng, think, left == 0)).turns
    return Conversation(task="mixed", turns=tuple(turns))
