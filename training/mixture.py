"""How often each task is drawn, and how long its context is as training goes on."""

from collections.abc import Callable
from random import Random

from training import dialogs, tasks
from training.chat import Conversation

Maker = Callable[[Random, str, bool], Conversation]
CONTEXT_TOKENS = 4096
NEEDLE_TOKENS = 3700

SHORT: dict[str, tuple[float, Maker]] = {
    "arithmetic": (20, tasks.arithmetic),
    "compare": (6, tasks.compare),
    "copy": (4, tasks.copy_items),
    "reverse": (6, tasks.reverse_items),
    "sort": (12, tasks.sort_items),
    "count": (8, tasks.count_items),
    "recall": (6, dialogs.recall),
    "system": (7, dialogs.system_rule),
    "tools": (9, dialogs.tools),
    "json": (5, dialogs.json_schema),
    "chat": (3, tasks.chat),
}
_NAMES = tuple(SHORT)
_WEIGHTS = tuple(weight for weight, _ in SHORT.values())
LOOKUP_SHARE = 0.09
NEEDLE_SHARE = 0.02


def training_example(rng: Random, progress: float) -> Conversation:
    """One training conversation; `progress` runs from 0 to 1 and lengthens the notes."""
    think = rng.random() < 0.5
    roll = rng.random()
    if roll < NEEDLE_SHARE:
        longest = int(500 + (NEEDLE_TOKENS - 500) * min(1.0, progress / 0.35))
        tokens = rng.randrange(420, longest + 1)
        keys = min(dialogs.NEEDLE_KEYS, rng.randrange(8, 65), tokens // 10)
        return dialogs.lookup(rng, "train", think, keys=keys, tokens=tokens, questions=rng.randrange(1, 13))
    if roll < NEEDLE_SHARE + LOOKUP_SHARE:
        keys = rng.randrange(1, 17)
        return dialogs.lookup(rng, "train", think, keys=keys, tokens=rng.randrange(0, 300), questions=rng.randrange(1, 4))
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
    return examples
