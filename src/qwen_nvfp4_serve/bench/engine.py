"""One engine configuration against another, without HTTP: what is asked and what came out.

The engine itself runs in `engine_worker`, and `engine_page` shows what it left; here is what both need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from qwen_nvfp4_serve.bench.clocks import Clocks, clock_figures
from qwen_nvfp4_serve.bench.machine import Card
from qwen_nvfp4_serve.bench.statistics import Spread, spread
from qwen_nvfp4_serve.errors import UsageError

LIMIT = 2**63  # no rate, time or size comes near, and a chart can draw what is below
RATES = {"decode": "streams", "prefill": "prefills", "depths": "depths"}  # of a run -> its keys, of the spec
SPREAD = ("median", "mean", "std", "low", "high")
BACKEND, BACKENDS = "nvfp4_backend", ("stock", "hybrid")  # of a configuration; patches look at it when they load
COUNT_LIMIT = 2**31  # no prompt, answer or number of streams comes near
LEAST_RATE = 1e-6  # tokens/s: what is slower is no rate, and a ratio to it no number
ROUNDING = 1e-9  # of the highest value: what another order of adding up may change


def _shown(label: str) -> str:
    if not label or not label.isprintable() or "|" in label:
        raise ValueError("not a word of printable characters without |, as the head of a column is")
    return label


def _commit(code: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{7,40}", code):
        raise ValueError("no commit: 7 to 40 digits of 0-9a-f")
    return code


Label = Annotated[str, AfterValidator(_shown)]
Code = Annotated[str, AfterValidator(_commit)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What the worker measures. configurations: label -> keyword arguments of vllm.LLM, measured in this order; beside
    them BACKEND says whose kernels compute NVFP4 layers, whatever the environment says.

    short, long: answer lengths whose difference gives the decode rate, so that prefill and scheduling cancel.
    prompt: tokens before the answer. prefills: prompt lengths of the prefill rate. depths: tokens in the cache at which
    one stream's decode rate is taken too. profile_tokens: decode steps that are profiled at each of profile_streams, 0
    for none. restarts: how often each configuration is started again, in new processes that find the caches of the
    first start, which then finds none: its caches are the run's own.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model_folder: str
    configurations: dict[Label, dict[str, Any]]
    streams: tuple[int, ...] = (1, 2, 4, 8)
    prompt: int = 128
    short: int = 16
    long: int = 272
    prefills: tuple[int, ...] = (8192,)
    depths: tuple[int, ...] = ()
    rounds: int = 3
    profile_tokens: int = 64
    profile_streams: tuple[int, ...] = (1,)
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of a decode step, per step: of one stream that is per token."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    us: float
    calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthRates:
    """One stream behind a long prompt, tokens/s: of the whole prompt, and of the answer after it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One configuration. decode: streams -> tokens/s of all together. prefill: prompt tokens -> tokens/s.

    depths: tokens in the cache -> rates behind them. used_bytes: of the card after the measurement, None on a CPU.
    kernels: of one stream's step. kernels_at: streams -> of a step of them all. model_bytes: what the engine counts as
    loaded weights. reserved_bytes: what the allocator of the engine's process holds at last, KV pool included.
    kernels_apart: no moment counts for two kernels, though one may start before the one ahead has ended.
    core_process: the engine's core had a process of its own, as in a server. cold: no start before had filled a cache.
    side_by_side: other engines started at the same time, so that load_s compares with nothing. restart_s: load_s of new
    processes, from the caches of the first. clocks: measurement, as `decode 8` -> what the card did meanwhile.
    prefill_steps: measurement of several streams, as `decode 8` or `profile 8` -> in how many steps they began, of each
    of its runs: where that differs, prefills do not cancel. graph_us: streams -> microseconds of a replay of the graph
    that decodes them, without the host between, the head and sampling.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    label: Label
    options: dict[str, str]
    load_s: float
    decode: dict[int, Spread]
    prefill: dict[int, Spread]
    depths: dict[int, DepthRates]
    used_bytes: int | None
    kernels: tuple[Kernel, ...]
    kernels_at: dict[int, tuple[Kernel, ...]] = field(default_factory=dict)
    model_bytes: int | None = None
    reserved_bytes: int | None = None
    core_process: bool = False
    kernels_apart: bool = False
    cold: bool = False
    side_by_side: bool = False
    restart_s: tuple[float, ...] = ()
    clocks: dict[str, Clocks] = field(default_factory=dict)
    prefill_steps: dict[Label, tuple[int, ...]] = field(default_factory=dict)
    graph_us: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """All configurations of one process on one machine. vllm, torch: versions. code: our commit that ran, None where
    nobody said."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    spec: EngineSpec
    vllm: str
    torch: str
    cards: tuple[Card, ...] | None
    runs: tuple[EngineRun, ...]
    code: Code | None = None


_SPEC: TypeAdapter[EngineSpec] = TypeAdapter(EngineSpec)
_RESULT: TypeAdapter[EngineResult] = TypeAdapter(EngineResult)


def check_spec(spec: EngineSpec) -> EngineSpec:
    """The spec as it is. Raises UsageError naming a field of which nothing could be measured."""
    least: dict[str, tuple[Sequence[int], int]] = {
        "streams": (spec.streams, 1),
        "prefills": (spec.prefills, 1),
        "depths": (spec.depths, 1),
        "rounds": ((spec.rounds,), 1),
        "profile_tokens": ((spec.profile_tokens,), 0),
        "profile_streams": (spec.profile_streams, 1),
        "restarts": ((spec.restarts,), 0),
        "configurations": ((len(spec.configurations),), 1),
        "long": ((spec.long,), spec.short + 1),
    }
    for name, (values, bound) in least.items():
        if min(values, default=bound) < bound:
            raise UsageError(f"engine bench, {name}", seen=str(min(values)), expected=f"{bound} or more")
    for label, options in spec.configurations.items():
        if (backend := options.get(BACKEND, "stock")) not in BACKENDS:
            expected, do = " or ".join(BACKENDS), "Choose among vLLM's kernels by its linear_backend and moe_backend."
            raise UsageError(f"engine bench, {BACKEND} of {label}", seen=str(backend), expected=expected, do=do)
    return spec


def read_spec(text: str) -> EngineSpec:
    """A spec from JSON. Raises UsageError naming the field that is wrong."""
    try:
        return check_spec(_SPEC.validate_json(text))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"engine bench, {where}", seen=first["msg"], expected="a field of EngineSpec") from None


def dump_spec(spec: EngineSpec) -> bytes:
    """The spec as JSON."""
    return _SPEC.dump_json(spec, indent=1)


def dump_engine(result: EngineResult) -> bytes:
    """The result as JSON."""
    return _RESULT.dump_json(result, indent=1) + b"\n"


def read_engine(path: Path) -> EngineResult:
    """A result from a file that the worker wrote. Raises UsageError naming a field that no page can show."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"engine result {path}", seen=error.strerror) from None
    return parse_engine(data, path)


def parse_engine(data: bytes, path: Path) -> EngineResult:
    """The same of what is in that file, or shall be."""
    try:
        result = _RESULT.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"engine result {path}, {where}", seen=first["msg"], expected="what a bench wrote") from None
    if not result.runs:
        raise UsageError(f"engine result {path}, runs", seen="none", expected="one or more")
    for name, count in _counts(result):
        _check_number(f"engine result {path}, {name}", count, 1, COUNT_LIMIT)
    for name, value, least in _figures(result):
        _check_number(f"engine result {path}, {name}", value, least, LIMIT)
    for name, missing in _missing(result):
        raise UsageError(f"engine result {path}, {name}", seen=f"none of {missing}", expected="all that its spec names")
    for name, said in _spreads(result):
        _check_spread(f"engine result {path}, {name}", said)
    return result


def _check_spread(where: str, said: Spread) -> None:
    """Raises UsageError where a figure is not what its own values come to."""
    found = spread(said.values)
    if found is None:
        raise UsageError(f"{where}.values", seen="none", expected="one or more")
    for name in SPREAD:
        seen, expected = getattr(said, name), getattr(found, name)
        if abs(seen - expected) > ROUNDING * found.high:
            raise UsageError(f"{where}.{name}", seen=str(seen), expected=f"{expected}, as its values say")


def _spreads(result: EngineResult) -> Iterator[tuple[str, Spread]]:
    """Every rate that was taken several times, and where it stands."""
    for place, run in enumerate(result.runs):
        for kind, rates in (("decode", run.decode), ("prefill", run.prefill)):
            yield from ((f"runs.{place}.{kind}.{count}", value) for count, value in rates.items())


def _check_number(where: str, value: float, least: float, limit: int) -> None:
    if not least <= value < limit:  # as NaN is neither
        raise UsageError(where, seen=str(value), expected=f"{least:g} or more, below 2^{limit.bit_length() - 1}")


def _counts(result: EngineResult) -> Iterator[tuple[str, int]]:
    """Every number of tokens, streams or rounds, and where it stands."""
    yield from ((f"spec.{name}", getattr(result.spec, name)) for name in ("prompt", "short", "long", "rounds"))
    for name in RATES.values():
        yield from ((f"spec.{name}", count) for count in getattr(result.spec, name))
    for place, run in enumerate(result.runs):
        for kind in RATES:
            yield from ((f"runs.{place}.{kind}", count) for count in getattr(run, kind))
        for name, steps in run.prefill_steps.items():
            yield from ((f"runs.{place}.prefill_steps.{name}", count) for count in steps)


def _missing(result: EngineResult) -> Iterator[tuple[str, int]]:
    """Every rate that should be there and is not."""
    for place, run in enumerate(result.runs):
        for kind, name in RATES.items():
            counts = getattr(result.spec, name)
            yield from ((f"runs.{place}.{kind}", count) for count in counts if count not in getattr(run, kind))


def _figures(result: EngineResult) -> Iterator[tuple[str, float, float]]:
    """Every figure that a page says or divides by, or a chart draws: where it stands, what it is, the least it is."""
    for place, card in enumerate(result.cards or ()):
        values = {name: getattr(card, name) for name in Card.__slots__}
        yield from ((f"cards.{place}.{name}", one, 0) for name, one in values.items() if isinstance(one, float))
    for where, rates in _spreads(result):
        yield from ((f"{where}.{name}", getattr(rates, name), 0 if name == "std" else LEAST_RATE) for name in SPREAD)
        yield from ((f"{where}.values.{place}", value, LEAST_RATE) for place, value in enumerate(rates.values))
    for place, run in enumerate(result.runs):
        yield from ((f"runs.{place}.{name}", value, least) for name, value, least in _run_figures(run))


def _run_figures(run: EngineRun) -> Iterator[tuple[str, float, float]]:
    """The same of one run but for its spreads, from its own field on."""
    for depth, behind in run.depths.items():
        yield f"depths.{depth}.prefill", behind.prefill, LEAST_RATE
        yield f"depths.{depth}.decode", behind.decode, LEAST_RATE
    yield "load_s", run.load_s, 0
    yield from (("restart_s", value, 0) for value in run.restart_s)
    for size in ("model_bytes", "reserved_bytes"):
        if getattr(run, size) is not None:
            yield size, getattr(run, size), 0
    yield from ((f"clocks.{name}", value, 0) for name, value in clock_figures(run.clocks))
    yield from ((f"kernels_at.{streams}", streams, 2) for streams in run.kernels_at)  # `kernels` are of one
    for name, kernels in _profiles(run).items():
        for kernel in kernels:
            yield f"{name}, {kernel.name}", kernel.us, 0
            yield f"{name}, {kernel.name}", kernel.calls, 0


def _profiles(run: EngineRun) -> dict[str, tuple[Kernel, ...]]:
    """Every profile by the field that holds it."""
    return {"kernels": run.kernels} | {f"kernels_at.{streams}": kernels for streams, kernels in run.kernels_at.items()}


def decode_rates(spec: EngineSpec, streams: int, short_s: Sequence[float], long_s: Sequence[float]) -> Spread:
    """Tokens/s of all streams from pairs of a short and a long run. Raises UsageError when long runs are no longer."""
    tokens = streams * (spec.long - spec.short)
    gaps = [long - short for short, long in zip(short_s, long_s, strict=True)]
    found = spread(tokens / gap for gap in gaps if gap > 0)
    if found is None or min(gaps) <= 0:
        seen = f"{min(gaps):.4f} s between {spec.long} and {spec.short} tokens"
        raise UsageError("decode rate", seen=seen, expected="time to pass", do="Ask for longer answers.")
    return found
