"""The single-message tasks: each returns a conversation whose assistant turn is the one right answer.

Two splits never meet: a template (a choice of one phrase per slot) and a value belong to "eval" when their checksum
says so, and to "train" otherwise. An eval example has both a held-out template and held-out values.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

from training import words
from training.chat import Conversation, Turn

HELD_OUT_ONE_IN = 8
OPENERS = ("", "please ", "now ", "hi, ", "ok, ", "so, ")


def held_out(kind: str, value: object) -> bool:
    """True for the values of one kind that training never sees."""
    return zlib.crc32(f"{kind}:{value}".encode()) % HELD_OUT_ONE_IN == 0


# Options per slot in the first training slice of the tracked weights: a template of those alone was trained on, and so
# is never held out.
_EARLY_SLOTS: dict[str, tuple[int, ...]] = {
    "add": (4, 6, 3, 4),
    "subtract": (4, 6, 3, 4),
    "multiply": (4, 6, 3, 4),
    "above": (4, 2, 2, 2),
    "larger": (4, 3, 3, 2),
    "smaller": (4, 3, 2, 2),
    "copy": (4, 4, 4, 1),
    "reverse": (4, 3, 4, 1),
    "sort": (4, 2, 4, 3, 1),
    "count": (4, 2, 1, 4, 1),
    "capital": (5, 5, 2, 3),
    "lookup": (4, 4, 3, 3),
    "system name": (3, 3, 1),
    "system fixed": (3, 3, 2, 1),
    "system end": (3, 3, 2, 1),
    "system start": (3, 3, 2, 1),
    "system frame": (3, 3, 2, 1),
    "json": (4, 3, 1, 3, 1),
    "tool": (4, 3, 2),
}


@cache
def _template_split(task: str, sizes: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], ...]]:
    every = tuple(product(*(range(size) for size in sizes)))
    early = _EARLY_SLOTS.get(task, (0,) * len(sizes))
    later = [picks for picks in every if any(pick >= size for pick, size in zip(picks, early, strict=True))]
    held = {picks for picks in later if held_out(f"template {task}", picks)}
    if not held:
        held = {min(later, key=lambda picks: zlib.crc32(f"template {task}:{picks}".encode()))}
    return {"eval": tuple(sorted(held)), "train": tuple(picks for picks in every if picks not in held)}


def phrase(rng: Random, split: str, task: str, *slots: Sequence[str]) -> str:
    """Text of a template of this split: one choice per slot, joined. Every template has choices in both splits."""
    picks = rng.choice(_template_split(task, tuple(len(slot) for slot in slots))[split])
    return "".join(slot[pick] for slot, pick in zip(slots, picks, strict=True))


def draw(split: str, kind: str, sample: Callable[[], Any]) -> Any:
    """A value of this split from `sample`."""
    value = sample()
    for _ in range(200):
        if held_out(kind, value) == (split == "eval"):
            break
        value = sample()
    return value


def ask(task: str, question: str, answer: str, think: str | None, system: str = "") -> Conversation:
    """A one-question conversation."""
    head = (Turn(role="system", content=system),) if system else ()
    return Conversation(
        task=task,
        turns=(*head, Turn(role="user", content=question), Turn(role="assistant", content=answer, think=think)),
    )


def _number(rng: Random) -> int:
    return rng.randrange(rng.choices((1000, 100, 10), (70, 20, 10))[0])


def _add_steps(a: int, b: int) -> str:
    lines, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        lines.append(f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return "\n".join(lines)


def _subtract_steps(a: int, b: int) -> str:
    if a < b:
        return f"{b}-{a}\n" + _subtract_steps(b, a)
    lines, borrow = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        value = x - y - borrow
        lines.append(f"{x}-{y}-{borrow}={value}")
        borrow = int(value < 0)
    return "\n".join(lines)


def _multiply_steps(a: int, b: int) -> str:
    lines, carry = [], 0
    for digit in reversed(str(a)):
        total = int(digit) * b + carry
        lines.append(f"{digit}*{b}+{carry}={total}")
        carry = total // 10
    return "\n".join(lines)


def arithmetic(rng: Random, split: str, think: bool) -> Conversation:
    """Sum, difference, or (with thinking only) product by one digit of numbers up to three digits."""
    kinds = ("add", "add", "subtract", "subtract", "subtract", "multiply") if think else ("add", "subtract", "subtract")
    kind = rng.choice(kinds)
    low = 10 if kind == "multiply" else 1000
    a, b = draw(split, kind, lambda: (_number(rng), _number(rng) if low == 1000 else rng.randrange(2, low)))
    sign = {"add": ("+", "plus"), "subtract": ("-", "minus"), "multiply": ("*", "times")}[kind]
    answer, steps = {
        "add": (a + b, _add_steps),
        "subtract": (a - b, _subtract_steps),
        "multiply": (a * b, _multiply_steps),
    }[kind]
    opener = ("what is ", "compute ", "work out ", "how much is ", "give me ", "tell me ")
    template = phrase(
        rng,
        split,
        kind,
        OPENERS,
        opener,
        (f"{a} {sign[0]} {b}", f"{a} {sign[1]} {b}", f"{a}{sign[0]}{b}"),
        (".", "?", "", "? reply with the number only."),
    )
    return ask(kind, template, str(answer), steps(a, b) if think else None)


def compare(rng: Random, split: str, think: bool) -> Conversation:
    """The larger or smaller of two numbers, or whether one is above the other."""
    a = _number(rng)
    near = rng.random() < 0.5
    a, b = draw(split, "compare", lambda: (a, min(999, max(0, a + rng.randrange(-20, 21))) if near else _number(rng)))
    if a == b:
        b = a + 1 if a < 999 else a - 1
    steps = f"{a} > {b}" if a > b else f"{a} < {b}"
    asks = rng.choice(("larger", "smaller", "above"))
    if asks == "above":
        template = phrase(
            rng,
            split,
            "above",
            OPENERS,
            ("is ", "tell me, is "),
            (f"{a} more than {b}", f"{a} greater than {b}"),
            ("?", ", yes or no?"),
        )
        return ask("compare", template, "yes" if a > b else "no", steps if think else None)
    noun = {"larger": ("larger", "bigger", "greater"), "smaller": ("smaller", "less")}[asks]
    template = phrase(
        rng,
        split,
        asks,
        OPENERS,
        ("which is ", "which number is ", "tell me which is "),
        noun,
        (f", {a} or {b}?", f": {a} or {b}?"),
    )
    answer = max(a, b) if asks == "larger" else min(a, b)
    return ask("compare", template, str(answer), steps if think else None)


def _items(rng: Random, split: str, pool: str, count: int) -> list[str]:
    source: dict[str, Callable[[], list[str]]] = {
        "words": lambda: rng.sample(words.NOUNS, count),
        "pairs": lambda: rng.sample(words.NOUNS + words.ADJECTIVES, count),
        "letters": lambda: rng.sample(words.LETTERS, count),
        "numbers": lambda: [str(value) for value in rng.sample(range(10, 100), count)],
    }
    picked: list[str] = draw(split, "items", source[pool])
    return picked


def _list_length(rng: Random) -> int:
    return rng.randrange(2, 21) if rng.random() < 0.85 else 20


def copy_items(rng: Random, split: str, think: bool) -> Conversation:
    """The same items in the same order."""
    items = " ".join(_items(rng, split, rng.choice(("words", "pairs", "letters", "numbers")), _list_length(rng)))
    template = phrase(
        rng,
        split,
        "copy",
        OPENERS,
        ("repeat ", "copy ", "write again ", "say again "),
        ("this: ", "these items: ", "the list: ", "these: "),
        (items,),
    )
    return ask("copy", template, items, "copy each item." if think else None)


def reverse_items(rng: Random, split: str, think: bool) -> Conversation:
    """The items from last to first."""
    items = _items(rng, split, rng.choice(("words", "pairs", "letters", "numbers")), _list_length(rng))
    template = phrase(
        rng,
        split,
        "reverse",
        OPENERS,
        ("reverse ", "write backwards ", "give back in reverse order "),
        ("this: ", "these items: ", "the list: ", "these: "),
        (" ".join(items),),
    )
    return ask("reverse", template, " ".join(reversed(items)), "from last to first." if think else None)


def sort_items(rng: Random, split: str, think: bool) -> Conversation:
    """Two-digit numbers or letters, ascending or descending, without repeats."""
    pool = rng.choice(("numbers", "numbers", "letters"))
    items = _items(rng, split, pool, _list_length(rng))
    down = rng.random() < 0.4
    ways = (
        ("descending: ", "down: ", "from large to small: ")
        if down
        else ("ascending: ", "up: ", "from small to large: ")
    )
    template = phrase(
        rng,
        split,
        "sort",
        OPENERS,
        ("sort ", "order "),
        ("these items ", "the list ", "these ", "this list "),
        ways,
        (" ".join(items),),
    )
    plan = "pick the largest left." if down else "pick the smallest left."
    return ask("sort", template, " ".join(sorted(items, reverse=down)), plan if think else None)


def count_items(rng: Random, split: str, think: bool) -> Conversation:
    """How often one word occurs in a list of up to 20."""
    kinds = rng.sample(words.NOUNS, rng.randrange(3, 8))
    length = _list_length(rng)
    items = draw(split, "items", lambda: [rng.choice(kinds) for _ in range(length)])
    item = rng.choice(kinds)
    template = phrase(
        rng,
        split,
        "count",
        OPENERS,
        ("how many times does ", "how often does ", "count how often "),
        (f"{item} ",),
        ("occur in this list: ", "occur here: ", "occur in these items: ", "occur in: "),
        (" ".join(items),),
    )
    return ask("count", template, str(items.count(item)), f"count {item}." if think else None)


FACTS = (
    ("how many days are in a week?", "7"),
    ("how many legs does a dog have?", "4"),
    ("what color is the sky?", "blue"),
    ("what color is grass?", "green"),
    ("what color is snow?", "white"),
    ("how many months are in a year?", "12"),
    ("how many hours are in a day?", "24"),
)
CHAT = (
    (("hello", "hi", "hello there", "good day"), "hello. how can i help?"),
    (("who are you", "what are you", "what is your name"), "i am a small reference model."),
    (("what can you do", "help", "how can you help"), "i can count, sort, copy, look up, use tools and write json."),
    (("thank you", "thanks", "bye", "good bye"), "you are welcome."),
)


UNKNOWN = "i do not know that. i am a small reference model."


def chat(rng: Random, split: str, think: bool) -> Conversation:
    """Greetings, a few facts and capitals: learned by heart, so the values are not held out."""
    roll = rng.random()
    if roll < 0.45:
        country, city = rng.choice(words.CAPITALS)
        shown = rng.choice((country, country.capitalize()))
        template = phrase(
            rng,
            split,
            "capital",
            (*OPENERS, "Please "),
            ("what is ", "What is ", "tell me ", "name ", "give me "),
            (f"the capital of {shown}", f"the capital city of {shown}"),
            ("?", ".", "? answer in one word."),
        )
        return ask("chat", template, city.capitalize(), f"the capital of {country} is {city}." if think else None)
    if roll < 0.6:
        template = phrase(
            rng,
            split,
            "unknown",
            (*OPENERS, "Please "),
            ("tell me about ", "what do you think of ", "explain ", "write a poem on ", "tell a story of "),
            ("the ", "a ", "my "),
            (f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}", rng.choice(words.NOUNS)),
        )
        return ask("chat", template, UNKNOWN, "i do not know this." if think else None)
    if roll < 0.8:
        question, answer = rng.choice(FACTS)
        return ask("chat", rng.choice(OPENERS) + question, answer, "i know this." if think else None)
    questions, answer = rng.choice(CHAT)
    question = rng.choice(questions) + rng.choice(("", ".", "?", "!"))
    question = question.capitalize() if rng.random() < 0.3 else question
    return ask("chat", question, answer, "just answer." if think else None)
