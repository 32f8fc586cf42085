"""Lines for charts: figures of a result along one axis, the other axes named only where they vary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from qwen_nvfp4_serve.bench.result import CaseResult, Result
from qwen_nvfp4_serve.bench.statistics import Metrics, Spread, spread
from qwen_nvfp4_serve.units import KIB

Axis = Literal["depth", "concurrency"]
Pick = Callable[[Metrics], Spread | None]
WORDS: dict[str, str] = {"depth": "depth {}", "prompt": "pp{}", "generate": "tg{}", "concurrency": "{} streams"}


@dataclass(frozen=True, slots=True)
class Point:
    """A figure at `x` on the axis."""

    x: int
    value: Spread


@dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of the axis, and what tells this line from its neighbours (empty for the only one)."""

    label: str
    points: tuple[Point, ...]


def requests(result: Result) -> tuple[CaseResult, ...]:
    """The cases without context loads."""
    return tuple(case for case in result.cases if case.case.phase == "request")


def lines(result: Result, axis: Axis, pick: Pick, *, ignore: tuple[str, ...] = ()) -> tuple[Line, ...]:
    """Lines of `pick` along `axis`. ignore: axes that do not change the figure; values along them are pooled."""
    found = requests(result)
    others = [name for name in WORDS if name != axis and name not in ignore]
    varying = [name for name in others if len({_value(case, name) for case in found}) > 1]
    groups: dict[tuple[int, ...], dict[int, list[Spread]]] = {}
    for case in found:
        value = pick(case.metrics)
        if value is not None:
            key = tuple(_value(case, name) for name in others)
            groups.setdefault(key, {}).setdefault(_value(case, axis), []).append(value)
    return tuple(
        Line(_label(varying, dict(zip(others, key, strict=True))), _points(by_x)) for key, by_x in groups.items()
    )


def axis_values(result: Result, axis: Axis) -> tuple[int, ...]:
    """The different values of an axis, in order."""
    return tuple(sorted({_value(case, axis) for case in requests(result)}))


def pool(values: Iterable[Spread]) -> Spread | None:
    """One spread over the values of several."""
    return spread(value for one in values for value in one.values)


def short(tokens: int) -> str:
    """`4K` for 4096, `300` for 300."""
    return f"{tokens // KIB}K" if tokens and tokens % KIB == 0 else str(tokens)


def _value(case: CaseResult, axis: str) -> int:
    return int(getattr(case.case, axis))


def _points(by_x: dict[int, list[Spread]]) -> tuple[Point, ...]:
    pooled = ((x, pool(values)) for x, values in sorted(by_x.items()))
    return tuple(Point(x, value) for x, value in pooled if value is not None)


def _label(varying: list[str], values: dict[str, int]) -> str:
    words = []
    for name in varying:
        text = str(values[name]) if name == "concurrency" else short(values[name])
        words.append("1 stream" if (name, text) == ("concurrency", "1") else WORDS[name].format(text))
    return ", ".join(words)
