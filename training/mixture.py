"""How often each task is drawn, and how long its context is as training goes on."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from training import dialogs, structured, tasks
from training.chat import Conversation, Turn

Maker = Callable[[Random, str, bool], Conversation]
CONTEXT_TOKENS = 4096
NEEDLE_TOKENS = 3700

SHORT: dict[str, tuple[float, Maker]] = {
    "arithmetic": (26, tasks.arithmetic),
    "compare": (6, tasks.compare),
    "copy": (5, tasks.copy_items),
    "reverse": (6, tasks.reverse_items),
    "sort": (12, tasks.sort_items),
    "count": (14, tasks.count_items),
    "recall": (9, dialogs.recall),
    "system": (8, dialogs.system_rule),
    "mixed": (5, dialogs.mixed),
    "tools": (10, structured.tools),
    "chained tools": (7, structured.chained_tools),
    "json": (6, structured.json_schema),
    "chat": (4, tasks.chat),
}
_NAMES = tuple(SHORT)
_WEIGHTS = tuple(weight for weight, _ in SHORT.values())
LOOKUP_SHARE = 0.09
NEEDLE_SHARE = 0.018
ASKED_SHARE = 0.03  # questions in plain words that want a tool, as the smoke test of any model asks


NEUTRAL_SYSTEM = ("you are a helpful assistant.", "You are a helpful assistant.", "answer the question.", "be brief.")


def _varied(rng: Random, conversation: Conversation) -> Conversation:
    """Now and then a system message without a rule, or a capital at the start: neither changes an answer."""
    turns = conversation.turns
    if turns[0].role == "user" and rng.random() < 0.15:
        turns = (replace(turns[0], content=turns[0].content[:1].upper() + turns[0].content[1:]), *turns[1:])
    if turns[0].role == "user" and rng.random() < 0.1:
        turns = (Turn(role="system", content=rng.choice(NEUTRAL_SYSTEM)), *turns)
    return replace(conversation, turns=turns)


def training_example(rng: Random, progress: float) -> Conversation:
    """One varied training conversation; see `_drawn`."""
    return _varied(rng, _drawn(rng, progress))


def _drawn(rng: Random, progress: float) -> Conversation:
    """One training conversation; `progress` runs from 0 to 1 and lengthens the notes."""
    think = rng.random() < 0.45
    roll = rng.random()
    if roll < NEEDLE_SHARE:
        longest = int(500 + (NEEDLE_TOKENS - 500) * min(1.0, progress / 0.35))
        tokens = rng.randrange(420, longest + 1)
        keys = min(dialogs.NEEDLE_KEYS, rng.randrange(8, 65), tokens // 10)
        return dialogs.lookup(rng, "train", think, keys=keys, tokens=tokens, questions=rng.randrange(1, 13))
    if roll < NEEDLE_SHARE + LOOKUP_SHARE:
        keys = rng.randrange(1, 17)
        return dialogs.lookup(
            rng, "train", think, keys=keys, tokens=rng.randrange(0, 300), questions=rng.randrange(1, 4)
        )
    if roll > 1 - ASKED_SHARE:
        return structured.asked_tools(rng, "train", think)
    return SHORT[rng.choices(_NAMES, _WEIGHTS)[0]][1](rng, "train", think)


def evaluation_examples(count: int, seed: int) -> list[Conversation]:
    """`count` held-out conversations of every task and thinking mode, and needles of three lengths."""
    rng = Random(seed)
    examples = []
    for name in _NAMES:
        for think in (False, True):
            examples += [SHORT[name][1](rng, "eval", think) for _ in range(count)]
    for think in (False, True):
        examples += [dialogs.lookup(rng, "eval", think, keys=16, tokens=200, questions=1) for _ in range(count)]
        for tokens in (1000, 2000, NEEDLE_TOKENS):
            examples += [
                dialogs.lookup(rng, "eval", think, keys=dialogs.NEEDLE_KEYS, tokens=tokens, questions=1)
                for _ in range(max(1, count // 2))
            ]
    for think in (False, True):
        examples += [structured.asked_tools(rng, "eval", think) for _ in range(count)]
    return examples
