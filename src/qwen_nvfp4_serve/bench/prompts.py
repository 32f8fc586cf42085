"""Prompts of exact length that no prefix cache has seen.

A text is a lead-in and words with a space before each. Tokenizers of the BPE family never merge across such a space, so
the tokens of a text are an overhead plus a cost per word; both are asked of the server once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from math import gcd
from random import Random

from qwen_nvfp4_serve.errors import QwenNvfp4Error

LEAD = "Text:"
FRESH_WORDS = 8  # 128^8 beginnings: two requests do not share one by chance
REPEATS = 8  # a word's cost is asked by repeating it, so that a merge across words shows as a fraction
_WORDS = """a the of in is and to for with on at by from as it or
    time year day night week month hour house home door room wall floor window table chair
    book page line word letter story song music picture color light sound voice name number list
    water river sea rain snow wind fire stone sand tree leaf flower grass field hill road
    bread milk salt sugar apple fish bird horse dog cat man woman child friend king city
    hand head face eye foot arm heart mind body life work play game team plan part
    red blue green white black dark long short high low old new young good great small
    run walk turn stand sit open close read write speak hear see know think find keep"""
WORDS: tuple[str, ...] = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request's text. context: what comes before, empty at depth 0; a system message on the chat endpoint."""

    context: str
    prompt: str

    def text(self) -> str:
        """For the completions endpoint."""
        return self.context + self.prompt

    def messages(self) -> list[dict[str, str]]:
        """For the chat endpoint, laid out as llama-benchy does."""
        system = [{"role": "system", "content": self.context}] if self.context else []
        return [*system, {"role": "user", "content": self.prompt}]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """The totals that words of given costs can add up to.

    free: from here on, every multiple of `divisor`. Schur's bound on the largest total out of reach is below the
    product of the least and the largest cost.
    """

    below: frozenset[int]
    free: int
    divisor: int
    dearest: int

    @classmethod
    def of(cls, costs: Collection[int]) -> _Sums:
        free = min(costs) * max(costs)
        below = {0}
        for total in range(1, free):
            if any(total - cost in below for cost in set(costs)):
                below.add(total)
        return cls(below=frozenset(below), free=free, divisor=gcd(*costs), dearest=max(costs))

    def __contains__(self, total: int) -> bool:
        return total % self.divisor == 0 if total >= self.free else total in self.below


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Words with their cost in tokens, and what a request costs without any word, with and without a context."""

    costs: dict[str, int]
    overhead: int
    overhead_with_context: int

    def words(self, rng: Random, tokens: int, fresh: Random | None = None) -> str:
        """Words worth `tokens` (or the nearest below that costs can sum to), each after a space.

        fresh: draws the first words instead of `rng`.
        """
        sums = _Sums.of(self.costs.values())
        pool = list(self.costs)
        left = next((total for total in range(tokens, 0, -1) if total in sums), 0)
        chosen: list[str] = []
        while left:
            source = fresh if fresh is not None and len(chosen) < FRESH_WORDS else rng
            open_to_all = (left - sums.free) // sums.dearest
            if open_to_all > 0:
                more = source.choices(pool, k=open_to_all if source is rng else 1)
            else:
                more = [source.choice([word for word in pool if left - self.costs[word] in sums])]
            chosen += more
            left -= sum(self.costs[word] for word in more)
        return "".join(f" {word}" for word in chosen)

    def prompt(self, depth: int, prompt: int, *, seed: str, fresh: str | None) -> Prompt:
        """A request of `depth + prompt` tokens, the overhead included. Equal seeds give equal words.

        fresh: what makes the beginning unlike any other; None to leave it as the seed makes it.
        """
        rng = Random(seed)
        first = Random(fresh) if fresh is not None else None
        if not depth:
            return Prompt(context="", prompt=LEAD + self.words(rng, prompt - self.overhead, first))
        context = LEAD + self.words(rng, depth - self.overhead_with_context, first)
        return Prompt(context=context, prompt="\n" + LEAD + self.words(rng, prompt))


Count = Callable[[Prompt], Awaitable[int]]


async def learn_vocabulary(count: Count) -> Vocabulary:
    """Asks `count` for the cost of every word. Raises QwenNvfp4Error when costs do not add up.

    One question suffices where every word is one token; otherwise each word is asked for.
    """
    bare = Prompt(context="", prompt=LEAD)
    overhead = await count(bare)
    everything = await count(Prompt(context="", prompt=LEAD + "".join(f" {word}" for word in WORDS)))
    if everything == overhead + len(WORDS):
        costs = dict.fromkeys(WORDS, 1)
    else:
        costs = {word: cost for word in WORDS if (cost := await _cost(count, word, overhead)) is not None}
    if not costs:
        raise QwenNvfp4Error(
            "prompt lengths cannot be calibrated",
            seen=f"{everything} tokens for {len(WORDS)} words and no steady cost per word",
            expected="a server whose token counts grow with the text",
        )
    # A word stands before the line break, as in every prompt: a break may merge with a lead-in's colon.
    word = next(iter(costs))
    with_context = await count(Prompt(context=f"{LEAD} {word}", prompt="\n" + LEAD)) - costs[word]
    return Vocabulary(costs=costs, overhead=overhead, overhead_with_context=with_context)


async def _cost(count: Count, word: str, overhead: int) -> int | None:
    """Tokens of `word` after a space; None where it has no cost of its own."""
    total = await count(Prompt(context="", prompt=LEAD + f" {word}" * REPEATS)) - overhead
    return total // REPEATS if total > 0 and total % REPEATS == 0 else None
