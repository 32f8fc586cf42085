"""Figures that others published, to be drawn beside ours; never ours, always with their card and source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import ConfigDict, TypeAdapter

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.units import KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published number: tokens/s of one stream at `depth` tokens of context, None where the source does not say."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    test: Literal["decode", "prefill"]
    depth: int | None
    tokens_per_s: float

    @property
    def where(self) -> str:
        """The depth in words: `at 4K`, `at 7.7K`, `depth not stated`."""
        if self.depth is None:
            return "depth not stated"
        if self.depth % KIB == 0:
            return f"at {self.depth // KIB}K"
        return f"at {self.depth / 1000:g}K" if self.depth >= 1000 else f"at {self.depth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one party published of one stack. speculation: draft tokens or method, None for none. note: caveats."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    title: str
    model: str
    card: str
    engine: str
    weights: str
    speculation: str | None
    measured_by: str
    source: str
    note: str
    figures: tuple[Figure, ...]

    def of(self, test: str) -> tuple[Figure, ...]:
        """The figures of one test, those without a depth last."""
        return tuple(
            sorted(
                (figure for figure in self.figures if figure.test == test),
                key=lambda figure: (figure.depth is None, figure.depth or 0),
            )
        )


@cache
def published() -> tuple[Published, ...]:
    """Every entry of `data/published.json`."""
    text = resources.files("qwen_nvfp4_serve").joinpath("data", "published.json").read_bytes()
    return TypeAdapter(tuple[Published, ...]).validate_json(text)


def find_published(names: Sequence[str]) -> tuple[Published, ...]:
    """Entries by name; raises UsageError naming those there are."""
    known = {entry.name: entry for entry in published()}
    for name in names:
        if name not in known:
            raise UsageError("--against", seen=name, expected=", ".join(known))
    return tuple(known[name] for name in names)


def figure(name: str) -> float:
    """The number behind `seed_35b.decode_4k`; raises UsageError when there is none."""
    entry, _, wanted = name.partition(".")
    for found in find_published([entry])[0].figures:
        if found.name == wanted:
            return found.tokens_per_s
    raise UsageError(f"published figure {name}", seen=wanted or "no figure", expected="a name in data/published.json")
