"""What admission found, and who therefore serves how many tokens. Values and pure functions; no torch."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qwen_nvfp4_serve.errors import QwenNvfp4Error

# A call of M tokens is decided by the first of these that is not less; beyond the last one, by the last.
TIMED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
WITHOUT_LIMIT = 2**31 - 1
NVFP4_BITS, BF16_BITS = 4, 16


class Verdict(enum.Enum):
    """What admission says of one candidate for one shape. NOT_READY is no judgement: it is asked again next time."""

    ADMITTED = "admitted"
    UNSUPPORTED = "unsupported"
    WRONG = "wrong"
    CRASHED = "crashed"
    HUNG = "hung"
    NOT_READY = "not ready"


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A weight of n output rows and k input columns, as one card holds it; or the routed experts of a block.

    experts, top_k: how many there are and how many a token elects; 0 for a linear layer. Then n is the gate and up rows
    of an expert, twice its intermediate size, and k the hidden size. bits: of a weight, NVFP4's or BF16's.
    """

    n: int
    k: int
    experts: int = 0
    top_k: int = 0
    bits: int = NVFP4_BITS

    def __str__(self) -> str:
        weight = f"[{self.n}, {self.k}]" + (" in BF16" if self.bits == BF16_BITS else "")
        return f"{self.experts} experts {weight}, {self.top_k} a token" if self.experts else weight


# The numbers of a Shape with what stands for one that is not given.
NUMBERS = {"n": 0, "k": 0, "experts": 0, "top_k": 0, "bits": NVFP4_BITS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One candidate for one shape. reason: why not, "" when admitted. times_us: (tokens, microseconds of a call)."""

    candidate: str
    shape: Shape
    verdict: Verdict
    reason: str = ""
    times_us: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Calls of at most `until` tokens, and more than the span before takes, go to `candidate`."""

    until: int
    candidate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All findings of one admission. facts: what they hold for (card, driver, versions, sources)."""

    facts: Mapping[str, str]
    findings: tuple[Finding, ...]
    took_s: float

    @property
    def final(self) -> bool:
        """False while a candidate was not ready: then the next start asks again."""
        return all(finding.verdict is not Verdict.NOT_READY for finding in self.findings)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """In the order in which they were asked for."""
        return tuple(dict.fromkeys(finding.shape for finding in self.findings))

    def of(self, shape: Shape, allowed: Collection[str] | None = None) -> tuple[Finding, ...]:
        """What was found for `shape`, of the candidates in `allowed`; all of them when None."""
        return tuple(f for f in self.findings if f.shape == shape and (allowed is None or f.candidate in allowed))


def serving(table: Table, shape: Shape, allowed: Collection[str] | None = None) -> tuple[Span, ...]:
    """The fastest admitted candidate for each number of tokens, neighbours merged.

    Empty where no candidate is left for some number of tokens: such a layer stays with vLLM's own kernel.
    """
    times = {f.candidate: dict(f.times_us) for f in table.of(shape, allowed) if f.verdict is Verdict.ADMITTED}
    spans: list[Span] = []
    for tokens in TIMED_TOKENS:
        able = {name: row[tokens] for name, row in times.items() if tokens in row}
        if not able:
            return ()
        fastest = min(able, key=lambda name: able[name])
        if spans and spans[-1].candidate == fastest:
            spans.pop()
        spans.append(Span(tokens, fastest))
    return (*spans[:-1], Span(WITHOUT_LIMIT, spans[-1].candidate))


def left_out(table: Table, shape: Shape, allowed: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
    """Candidates that serve no number of tokens of `shape`, each with its reason; slow ones included."""
    serves = {span.candidate for span in serving(table, shape, allowed)}
    found = table.of(shape, allowed)
    best = {
        tokens: min(dict(f.times_us)[tokens] for f in found if tokens in dict(f.times_us))
        for tokens in TIMED_TOKENS
        if any(tokens in dict(f.times_us) for f in found)
    }
    for finding in found:
        if finding.verdict is not Verdict.ADMITTED:
            yield finding.candidate, f"{finding.verdict.value}: {finding.reason}"
        elif finding.candidate not in serves:
            ratios = [us / best[tokens] for tokens, us in finding.times_us if tokens in best]
            yield finding.candidate, f"slow: {min(ratios):.2f} to {max(ratios):.2f} times the best time at every M"


def summary(table: Table, allowed: Collection[str] | None = None) -> list[str]:
    """One line for each shape: who serves which M, and who was left out and why."""
    lines = []
    for shape in table.shapes:
        spans, low, parts = serving(table, shape, allowed), 1, []
        for span in spans:
            parts.append(f"M>={low} {span.candidate}" if span.until == WITHOUT_LIMIT else _range(low, span))
            low = span.until + 1
        rejected = "; ".join(f"{name} {reason}" for name, reason in left_out(table, shape, allowed))
        lines.append(f"{shape}: {', '.join(parts) or 'vLLM'}" + (f" (left out: {rejected})" if rejected else ""))
    return lines


def _range(low: int, span: Span) -> str:
    return f"M={low} {span.candidate}" if low == span.until else f"M={low}..{span.until} {span.candidate}"


def to_json(table: Table) -> dict[str, Any]:
    """JSON values from which `from_json` makes the same table."""
    return {
        "facts": dict(table.facts),
        "took_s": table.took_s,
        "findings": [finding_to_json(finding) for finding in table.findings],
    }


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """JSON values of one finding."""
    return {
        "candidate": finding.candidate,
        **asdict(finding.shape),
        "verdict": finding.verdict.value,
        "reason": finding.reason,
        "times_us": [list(pair) for pair in finding.times_us],
    }


def finding_from_json(value: Mapping[str, Any]) -> Finding:
    """The inverse of `finding_to_json`. Raises QwenNvfp4Error for what is not one."""
    try:
        times: Sequence[Sequence[Any]] = value["times_us"]
        return Finding(
            candidate=str(value["candidate"]),
            shape=Shape(*(int(value.get(number, default)) for number, default in NUMBERS.items())),
            verdict=Verdict(value["verdict"]),
            reason=str(value["reason"]),
            times_us=tuple((int(tokens), float(us)) for tokens, us in times),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise QwenNvfp4Error("a finding of kernel admission", seen=repr(error), expected="one written by us") from None


def from_json(value: Mapping[str, Any]) -> Table:
    """The inverse of `to_json`. Raises QwenNvfp4Error for what is not one."""
    try:
        return Table(
            facts={str(k): str(v) for k, v in value["facts"].items()},
            findings=tuple(finding_from_json(item) for item in value["findings"]),
            took_s=float(value["took_s"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise QwenNvfp4Error("a table of kernel admission", seen=repr(error), expected="one written by us") from None
