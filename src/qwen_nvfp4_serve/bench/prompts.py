"""Prompts of exact length that no prefix cache has seen.

A text is a lead-in and words with a space before each. Tokenizers of the BPE family never merge across such a space, so
the tokens of a text are an overhead plus a cost per word; both are asked of the server once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
class Vocabulary:
    """Words with their cost in tokens, and what a request costs without any word, with and without a context."""

    costs: dict[str, int]
    overhead: int
    overhead_with_context: int

    def words(self, rng: Random, tokens: int, first: tuple[str, ...] = ()) -> str:
        """Words worth `tokens` (or the nearest below that the costs allow), each after a space; `first` lead."""
        chosen: list[str] = []
        left = tokens
        for word in first:
            if self.costs[word] <= left:
                chosen.append(word)
                left -= self.costs[word]
        pool, dearest = list(self.costs), max(self.costs.values())
        while left >= dearest:
            more = rng.choices(pool, k=left // dearest)
            chosen += more
            left -= sum(self.costs[word] for word in more)
        for word in sorted(pool, key=lambda word: -self.costs[word]):
            while left >= self.costs[word]:
                chosen.append(word)
                left -= self.costs[word]
        return "".join(f" {word}" for word in chosen)

    def prompt(self, depth: int, prompt: int, *, seed: str, fresh: str | None) -> Prompt:
        """A request of `depth + prompt` tokens, the overhead included. Equal seeds give equal words.

        fresh: what makes the beginning unlike any other; None to leave it as the seed makes it.
        """
        rng = Random(seed)
        pool = sorted(self.costs)
        first = tuple(Random(fresh).choices(pool, k=FRESH_WORDS)) if fresh is not None else ()
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
    with_context = await count(Prompt(context=LEAD, prompt="\n" + LEAD))
    everything = await count(Prompt(context="", prompt=LEAD + "".join(f" {word}" for word in WORDS)))
    if everything == overhead + len(WORDS):
        return Vocabulary(costs=dict.fromkeys(WORDS, 1), overhead=overhead, overhead_with_context=with_context)
    costs: dict[str, int] = {}
    for word in WORDS:
        total = await count(Prompt(context="", prompt=LEAD + f" {word}" * REPEATS)) - overhead
        if total > 0 and total % REPEATS == 0:
            costs[word] = total // REPEATS
    if not costs:
        raise QwenNvfp4Error(
            "prompt lengths cannot be calibrated",
            seen=f"{everything} tokens for {len(WORDS)} words and no steady cost per word",
            expected="a server whose token counts grow with the text",
        )
    return Vocabulary(costs=costs, overhead=overhead, overhead_with_context=with_context)
