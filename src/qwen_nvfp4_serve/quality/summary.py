"""Counts of right answers and reasons for the others, with what chance alone allows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qwen_nvfp4_serve.quality.result import Outcome, Result
from qwen_nvfp4_serve.quality.task import FAMILIES, Family, Thinking

Z_95 = 1.959964  # standard normal, 97.5 %
HEADERS = ("what", "thinking", "right", "%", "95 % between", "missed")


@dataclass(frozen=True, slots=True)
class Tally:
    """Right answers of those asked, and how often each reason made a miss, most frequent first."""

    right: int
    asked: int
    reasons: tuple[tuple[str, int], ...]

    @property
    def percent(self) -> float:
        """Right answers in percent; 0 of none."""
        return 100.0 * self.right / self.asked if self.asked else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share of right answers, in percent."""
        return wilson(self.right, self.asked)

    @property
    def missed(self) -> str:
        """The reasons in words: `3 wrong, 1 truncated`."""
        return ", ".join(f"{count} {reason}" for reason, count in self.reasons)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. kind: empty for a whole family, and both empty for everything."""

    family: Family | None
    kind: str
    thinking: Thinking | None
    tally: Tally

    @property
    def name(self) -> str:
        """`arithmetic: sum`."""
        if self.family is None:
            return "all"
        return f"{self.family}: {self.kind}" + (" tokens" if self.family == "needle" else "")

    @property
    def cells(self) -> tuple[str, ...]:
        """Beside HEADERS."""
        low, high = self.tally.interval
        return (
            self.name,
            self.thinking or "",
            f"{self.tally.right}/{self.tally.asked}",
            f"{self.tally.percent:.0f}",
            f"{low:.0f} and {high:.0f}",
            self.tally.missed,
        )


def tally(outcomes: Iterable[Outcome]) -> Tally:
    """The counts of some outcomes."""
    seen = tuple(outcomes)
    reasons = Counter(outcome.miss.reason for outcome in seen if outcome.miss is not None)
    return Tally(sum(outcome.right for outcome in seen), len(seen), tuple(reasons.most_common()))


def wilson(right: int, asked: int) -> tuple[float, float]:
    """95 % interval of a share, in percent (Wilson 1927); everything from 0 to 100 when nothing was asked."""
    if not asked:
        return (0.0, 100.0)
    share, square = right / asked, Z_95**2
    middle = (share + square / (2 * asked)) / (1 + square / asked)
    half = Z_95 / (1 + square / asked) * math.sqrt(share * (1 - share) / asked + square / (4 * asked**2))
    return (max(0.0, 100.0 * (middle - half)), min(100.0, 100.0 * (middle + half)))


def rows(result: Result) -> tuple[Row, ...]:
    """A row for each kind and thinking mode, in the order asked, and one for all."""
    keys = list(dict.fromkeys((one.family, one.kind, one.thinking) for one in result.outcomes))
    keys.sort(key=lambda key: FAMILIES.index(key[0]))
    kinds = [Row(*key, tally(_of(result.outcomes, *key))) for key in keys]
    return (*kinds, Row(None, "", None, tally(result.outcomes)))


def needle_grid(
    outcomes: Sequence[Outcome], thinking: Thinking
) -> tuple[tuple[int, ...], tuple[int, ...], dict[tuple[int, int], Tally]]:
    """Lengths, depths, and the counts at each of both, of needles in one thinking mode."""
    cells: dict[tuple[int, int], list[Outcome]] = {}
    for one in outcomes:
        if one.thinking == thinking and one.length is not None and one.depth is not None:
            cells.setdefault((one.length, one.depth), []).append(one)
    lengths = tuple(sorted({length for length, _ in cells}))
    depths = tuple(sorted({depth for _, depth in cells}))
    return lengths, depths, {place: tally(found) for place, found in cells.items()}


def _of(outcomes: Sequence[Outcome], family: Family, kind: str, thinking: Thinking) -> Iterable[Outcome]:
    return (one for one in outcomes if (one.family, one.kind, one.thinking) == (family, kind, thinking))
