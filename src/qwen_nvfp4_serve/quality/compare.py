"""Two results question by question: what changed, in which direction, and whether chance alone would do as much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_nvfp4_serve.bench.drawing import COLOURS, FAULT, OTHERS, new_figure, plain, save
from qwen_nvfp4_serve.bench.report import markdown_table, one_cell
from qwen_nvfp4_serve.errors import UsageError, printable
from qwen_nvfp4_serve.quality.result import Outcome, Result
from qwen_nvfp4_serve.quality.task import FAMILIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVEL = 0.05  # a difference that chance makes more rarely than this is called more than chance
HEADERS = ("what", "pairs", "both right", "only first", "only second", "neither", "chance")
SAID_CHARS = 100
# Settings that change what is asked, or how much room an answer has; others may differ and are named.
ASKED = ("set", "seed", "think_tokens", "long_tokens")


@dataclass(frozen=True, slots=True)
class Pair:
    """One question's two outcomes."""

    first: Outcome
    second: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Pairs of one kind, counted.

    chance: how often a coin would split the changed pairs as unevenly or more (McNemar's test, exact and two-sided);
    1 when none changed.
    """

    name: str
    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def pairs(self) -> int:
        """All of them."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def chance(self) -> float:
        """See the class."""
        return sign_test(self.only_first, self.only_second)

    @property
    def cells(self) -> tuple[str, ...]:
        """Beside HEADERS."""
        counts = (self.pairs, self.both, self.only_first, self.only_second, self.neither)
        return (self.name, *map(str, counts), f"{self.chance:.2g}" if self.only_first + self.only_second else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two results side by side. unpaired: questions that only one of them has. other_prompts: pairs whose requests
    differ, as needles do between two tokenizers. same_words: pairs in which both wrote exactly the same."""

    pairs: tuple[Pair, ...]
    unpaired: int
    other_prompts: int
    same_words: int
    whole: Contrast
    kinds: tuple[Contrast, ...]

    @property
    def sentence(self) -> str:
        """What the comparison comes to."""
        seen, size = self.whole, self.whole.pairs
        counts = (
            f"{seen.both + seen.only_first} of {size} right in the first, {seen.both + seen.only_second} in the second"
        )
        if not seen.only_first + seen.only_second:
            bound = min(100.0, 300.0 / size)  # the rule of three: none of n, so below 3/n at 95 %
            return (
                f"No difference: {counts}, and the same ones. With {size} pairs, a change of up to "
                f"{bound:.1f} % of the answers could still go unseen."
            )
        turned = f"{seen.only_first} right only in the first, {seen.only_second} only in the second"
        odds = f"Chance alone would turn them as unevenly in {_percent(seen.chance)} of such comparisons"
        if seen.chance >= LEVEL:
            return f"No more than chance: {counts}; {turned}. {odds}."
        better = "second" if seen.only_second > seen.only_first else "first"
        return f"More than chance, the {better} is better: {counts}; {turned}. {odds}."


def compare(first: Result, second: Result) -> Comparison:
    """Pairs of equal questions. Raises UsageError when the settings ask different things or no question is in both."""
    different = [
        f"{name} {getattr(first.exam, name)} and {getattr(second.exam, name)}"
        for name in ASKED
        if getattr(first.exam, name) != getattr(second.exam, name)
    ]
    if different:
        raise UsageError(
            "these runs cannot be compared",
            seen="; ".join(different),
            expected="equal settings",
            do="Run one of them again with the other's settings.",
        )
    others = {(one.task, one.thinking): one for one in second.outcomes}
    pairs = tuple(
        Pair(one, others[(one.task, one.thinking)]) for one in first.outcomes if (one.task, one.thinking) in others
    )
    if not pairs:
        raise UsageError("these runs cannot be compared", seen="no question that both asked", expected="some")
    families = [family for family in FAMILIES if any(pair.first.family == family for pair in pairs)]
    modes = list(dict.fromkeys(pair.first.thinking for pair in pairs))
    kinds = tuple(
        contrast(f"{family}, thinking {mode}", found)
        for family in families
        for mode in modes
        if (found := [pair for pair in pairs if (pair.first.family, pair.first.thinking) == (family, mode)])
    )
    return Comparison(
        pairs=pairs,
        unpaired=len(first.outcomes) + len(second.outcomes) - 2 * len(pairs),
        other_prompts=sum(pair.first.prompt != pair.second.prompt for pair in pairs),
        same_words=sum(pair.first.said == pair.second.said for pair in pairs),
        whole=contrast("all", pairs),
        kinds=kinds,
    )


def contrast(name: str, pairs: Iterable[Pair]) -> Contrast:
    """The four counts of some pairs."""
    places = [(pair.first.right, pair.second.right) for pair in pairs]
    return Contrast(
        name=name,
        both=places.count((True, True)),
        only_first=places.count((True, False)),
        only_second=places.count((False, True)),
        neither=places.count((False, False)),
    )


def sign_test(one: int, other: int) -> float:
    """Two-sided exact probability that a fair coin splits `one + other` tosses as unevenly or more."""
    tosses = one + other
    tail = sum(math.comb(tosses, heads) for heads in range(min(one, other) + 1))
    return float(min(1.0, 2 * tail / 2**tosses))


def differences(first: Result, second: Result) -> tuple[tuple[str, str, str], ...]:
    """What else differs, in words: name, first, second."""
    settings = [entry.name for entry in fields(first.exam) if entry.name not in ASKED]
    found = [
        ("model", first.server.model, second.server.model),
        ("context (tokens)", str(first.server.max_model_len), str(second.server.max_model_len)),
        ("card", str(first.machine.card_name), str(second.machine.card_name)),
        ("vLLM", str(first.server.vllm), str(second.server.vllm)),
        ("cache", _cache(first), _cache(second)),
        ("kernels", *_kernels(first, second)),
        ("host", str(first.machine.cpu), str(second.machine.cpu)),
        ("state", first.stopped or "complete", second.stopped or "complete"),
        *((name, str(getattr(first.exam, name)), str(getattr(second.exam, name))) for name in settings),
    ]
    return tuple(row for row in found if row[1] != row[2])


def warnings(found: Comparison) -> tuple[str, ...]:
    """Sentences for what weakens the comparison."""
    notes = []
    if found.unpaired:
        notes.append(f"{found.unpaired} answers have no partner in the other run and were left out")
    if found.other_prompts:
        notes.append(
            f"{found.other_prompts} of {found.whole.pairs} pairs were asked in different words (needles are, where "
            "tokenizers differ): they compare the same length and depth, not the same text"
        )
    return tuple(notes)


def comparison_markdown(first: Result, second: Result, found: Comparison, *, chart: str | None = None) -> str:
    """The page: verdict, counts, what differs, every question whose outcome changed."""
    labels = one_cell(first.label), one_cell(second.label)
    lines = [f"# {labels[1]} against {labels[0]}", "", found.sentence, ""]
    lines += [f"First: {labels[0]}. Second: {labels[1]}.", ""]
    lines += [
        f"- {name} differs: {one_cell(here)} and {one_cell(there)}" for name, here, there in differences(first, second)
    ]
    lines += [f"- {note}" for note in warnings(found)]
    lines += [f"- both wrote exactly the same in {found.same_words} of {found.whole.pairs} pairs", ""]
    lines.append(markdown_table(HEADERS, [one.cells for one in (*found.kinds, found.whole)], right=len(HEADERS) - 1))
    lines.append(
        "chance: how often tosses of a coin would split the changed pairs as unevenly or more (McNemar's exact test). "
        "Of several rows, one in twenty falls below 0.05 by itself: the verdict is that of the last row.\n"
    )
    lines += [f"![comparison]({chart})\n"] if chart else []
    changed = [pair for pair in found.pairs if pair.first.right is not pair.second.right]
    if changed:
        lines += ["## Changed", "", _changed(changed)]
    return "\n".join(lines)


def draw_comparison(first: Result, second: Result, found: Comparison, folder: Path) -> Path:
    """Writes quality-compare.png and .svg: how the pairs of each kind split."""
    folder.mkdir(parents=True, exist_ok=True)
    contrasts = (*found.kinds, found.whole)
    title = f"{second.label} against {first.label}"
    footer = f"{first.label}: {first.server.model} · {second.label}: {second.server.model} · {found.whole.pairs} pairs"
    figure, (axes,) = new_figure(title, footer, columns=1, height=1.9 + 0.42 * len(contrasts))
    _splits(axes, contrasts, (first.label, second.label))
    return save(figure, folder, "quality-compare")[0]


def _splits(axes: Axes, contrasts: Sequence[Contrast], labels: tuple[str, str]) -> None:
    parts = (
        ("both right", "both", "#CFE3F2"),
        (plain(f"only {labels[0]}"), "only_first", FAULT),
        (plain(f"only {labels[1]}"), "only_second", COLOURS[2]),
        ("neither", "neither", OTHERS),
    )
    starts = [0.0] * len(contrasts)
    for name, attribute, colour in parts:
        for place, one in enumerate(contrasts):
            count = int(getattr(one, attribute))
            width = 100.0 * count / one.pairs
            axes.barh(place, width, left=starts[place], height=0.62, color=colour, label=None if place else name)
            if width >= 3:
                dark = attribute in ("only_first", "only_second")
                middle = starts[place] + width / 2
                axes.text(middle, place, str(count), ha="center", va="center", fontsize=8.5, color="w" if dark else "k")
            starts[place] += width
    axes.set_yticks(range(len(contrasts)), labels=[f"{one.name} ({one.pairs})" for one in contrasts], fontsize=8.5)
    axes.set_ylim(len(contrasts) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(visible=False)
    axes.set_xlabel("pairs, %")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(parts), fontsize=8.5, borderaxespad=0.2)


def _changed(pairs: Sequence[Pair]) -> str:
    head = ("question", "thinking", "first", "second")
    rows = [(pair.first.task, pair.first.thinking, _told(pair.first), _told(pair.second)) for pair in pairs]
    return markdown_table(head, rows)


def _told(outcome: Outcome) -> str:
    if outcome.miss is None:
        return "right"
    return printable(f"{outcome.miss.reason}: {outcome.miss.detail}", SAID_CHARS)


def _percent(share: float) -> str:
    return "less than 0.1 %" if share < 0.001 else f"{100 * share:.2g} %"


def _cache(result: Result) -> str:
    cache = result.server.cache or {}
    return ", ".join(f"{name} {cache[name]}" for name in ("cache_dtype", "block_size") if name in cache) or "unknown"


def _kernels(first: Result, second: Result) -> tuple[str, str]:
    """The lines of each log that the other lacks; two equal texts where a log was not given."""
    here, there = first.server.kernels, second.server.kernels
    if here is None or there is None:
        return ("unknown", "unknown")
    only = [[line for line in one if line not in other] for one, other in ((here, there), (there, here))]
    return ("; ".join(only[0]) or "nothing of its own", "; ".join(only[1]) or "nothing of its own")
