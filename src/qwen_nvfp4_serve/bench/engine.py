"""One engine configuration against another, without HTTP: what is asked, what came out, how near it is to the bytes.

The engine itself runs in `engine_worker`; here is everything that needs none: rates, roofline, kernel groups, the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from qwen_nvfp4_serve.bench.clocks import Clocks, clock_figures, clocks_section
from qwen_nvfp4_serve.bench.machine import Card
from qwen_nvfp4_serve.bench.rows import cell, number
from qwen_nvfp4_serve.bench.statistics import Spread, spread
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import match_gpu
from qwen_nvfp4_serve.planner import PlanModel, PlanRequest
from qwen_nvfp4_serve.planner.roofline import bytes_per_token
from qwen_nvfp4_serve.units import GIB

# Kinds of kernels by their names in a profile of vLLM 0.33; the first that matches counts.
KERNEL_KINDS: tuple[tuple[str, str], ...] = (
    ("compiled", r"^triton_"),  # norms, activations and gates, named after what stands beside them too
    ("GDN", r"gdn|gated_delta|fused_recurrent|causal_conv1d|chunk_|nvfp4.*DecodeParams"),
    ("attention", r"attn|attention|paged|flash::|rope|rotary|reshape_and_cache"),
    (
        "MoE",
        r"moe|expert|topk|count_and_sort|route_kernel|nvfp4.*(?:Moe|Route)Params|"
        r"^(?:gate_up|down|add_up|count_pairs|place_pairs)$",
    ),
    ("16-bit linear", r"nvfp4.*DenseParams|nvjet|dot_kernel|reduce_1Block|splitKreduce"),
    ("ours", r"qwen_nvfp4"),
    ("NVFP4 and FP8 linear", r"marlin|nvfp4|fp4|humming|scaled_mm|cutlass"),
    ("16-bit linear", r"gemm|gemv|cublas|addmm|\bmm\b|linear"),
    ("norm and activation", r"norm|silu|sigmoid|gelu"),
    ("sampling", r"sample|argmax|softmax|logits"),
    ("copy and cast", r"copy|cast|fill|memset|memcpy"),
)
OTHER_KIND = "other"
OVERLAP = "A kernel that starts before the one ahead has ended counts its waiting here: the times"
LIMIT = 2**63  # no rate, time or size comes near, and a chart can draw what is below


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What the worker measures. configurations: label -> keyword arguments of vllm.LLM, measured in this order.

    short, long: answer lengths whose difference gives the decode rate, so that prefill and scheduling cancel.
    prompt: tokens before the answer. prefills: prompt lengths of the prefill rate. depths: tokens in the cache at which
    one stream's decode rate is taken too. profile_tokens: decode steps that are profiled at each of profile_streams, 0
    for none. restarts: how often each configuration is started again, in new processes that find the caches of the
    first start, which then finds none: its caches are the run's own.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model_folder: str
    configurations: dict[str, dict[str, Any]]
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
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    label: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """All configurations of one process on one machine. vllm, torch: versions."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    spec: EngineSpec
    vllm: str
    torch: str
    cards: tuple[Card, ...] | None
    runs: tuple[EngineRun, ...]


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
        result = _RESULT.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"engine result {path}", seen=str(error).splitlines()[0]) from None
    if not result.runs:
        raise UsageError(f"engine result {path}, runs", seen="none", expected="one or more")
    for name, value, positive in _figures(result):
        if not 0 <= value < LIMIT or (positive and value == 0):  # NaN is neither
            expected = f"a number below 2^63, {'above 0' if positive else '0 or more'}"
            raise UsageError(f"engine result {path}, {name}", seen=str(value), expected=expected)
    return result


def _figures(result: EngineResult) -> Iterator[tuple[str, float, bool]]:
    """Every figure that a page divides by or a chart draws: where it stands, what it is, whether it is above 0."""
    for name in ("streams", "prefills", "depths"):
        yield from ((f"spec.{name}", value, True) for value in getattr(result.spec, name))
    for place, run in enumerate(result.runs):
        where = f"runs.{place}"
        for kind, rates in (("decode", run.decode), ("prefill", run.prefill)):
            for count, value in rates.items():
                yield f"{where}.{kind}", count, True
                yield f"{where}.{kind}.{count}.median", value.median, True
                yield f"{where}.{kind}.{count}.std", value.std, False
        for depth, behind in run.depths.items():
            yield f"{where}.depths", depth, True
            yield f"{where}.depths.{depth}.prefill", behind.prefill, True
            yield f"{where}.depths.{depth}.decode", behind.decode, True
        yield f"{where}.load_s", run.load_s, False
        yield from ((f"{where}.restart_s", value, False) for value in run.restart_s)
        for size in ("model_bytes", "reserved_bytes"):
            if getattr(run, size) is not None:
                yield f"{where}.{size}", getattr(run, size), False
        yield from ((f"{where}.clocks.{name}", value, False) for name, value in clock_figures(run.clocks))
        yield from ((f"{where}.kernels_at", streams, True) for streams in run.kernels_at)
        for name, kernels in _profiles(run).items():
            for kernel in kernels:
                yield f"{where}.{name}, {kernel.name}", kernel.us, False
                yield f"{where}.{name}, {kernel.name}", kernel.calls, False


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


def roofline(model: PlanModel, card_name: str, context: int, *, kv_dtype: str = "fp8") -> float | None:
    """Tokens/s of one stream if a step read its bytes at the card's bandwidth and did nothing else; None when the card
    is not in the table. context: tokens in the cache."""
    row = match_gpu(card_name)
    if row is None:
        return None
    request = PlanRequest(model=model, gpu=row, kv_dtype="bfloat16" if kv_dtype == "bfloat16" else "fp8")
    return row.bandwidth_bytes_per_s / bytes_per_token(request, context)


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, pattern in KERNEL_KINDS if re.search(pattern, kernel, re.IGNORECASE)), OTHER_KIND)


def by_kind(kernels: Sequence[Kernel]) -> tuple[tuple[str, float, float], ...]:
    """Kind, microseconds and calls per token, the dearest first."""
    sums: dict[str, tuple[float, float]] = {}
    for kernel in kernels:
        us, calls = sums.get(kind_of(kernel.name), (0.0, 0.0))
        sums[kind_of(kernel.name)] = (us + kernel.us, calls + kernel.calls)
    return tuple(sorted(((kind, us, calls) for kind, (us, calls) in sums.items()), key=lambda row: -row[1]))


def engine_markdown(result: EngineResult, model: PlanModel | None) -> str:
    """The page: rates of each configuration beside the first, the share of the roofline, where a step goes."""
    card = result.cards[0].name if result.cards else None
    lines = [f"# Engine: {' against '.join(run.label for run in result.runs)}", ""]
    weights = Path(result.spec.model_folder).name
    lines += [f"{card or 'no card'}, vLLM {result.vllm}, torch {result.torch}, weights of {weights}", ""]
    lines += [_core_line(result.runs), "", *rates_table(result, model), ""]
    lines += clocks_section({run.label: run.clocks for run in result.runs})
    for run in result.runs:
        lines += _step_lines(f"## A decode step of {run.label}", "token", run.kernels)
        for streams, kernels in sorted(run.kernels_at.items()):
            lines += _step_lines(f"## A decode step of {run.label}, {streams} streams", "step", kernels)
        if _profiles_overlap(run):
            lines += [f"{OVERLAP} of {run.label} add up to more than a step.", ""]
    options = {run.label: run.options for run in result.runs}
    return "\n".join([*lines, "Options of vllm.LLM:", "", "```json", json.dumps(options, indent=1), "```", ""])


def _profiles_overlap(run: EngineRun) -> bool:
    """True if a profile's times add up to more than a step took."""
    found = {1: run.kernels} | run.kernels_at
    sums = {
        streams: sum(kernel.us for kernel in kernels) for streams, kernels in found.items() if streams in run.decode
    }
    return not run.kernels_apart and any(
        us > streams / run.decode[streams].median * 1e6 for streams, us in sums.items()
    )


def _core_line(runs: Sequence[EngineRun]) -> str:
    """In which process the engine's core was: one that it shares waits for the Python of the requests too."""
    places = {True: "The engine's core had a process of its own", False: "The engine's core shared the bench's process"}
    same = {run.core_process for run in runs}
    if len(same) == 1:
        return places[same.pop()] + "."
    return " ".join(f"{places[run.core_process]}: {run.label}." for run in runs)


def _step_lines(title: str, unit: str, kernels: Sequence[Kernel]) -> list[str]:
    if not kernels:
        return []
    lines = [title, "", f"| kernels | us per {unit} | calls |", "|:--|--:|--:|"]
    lines += [f"| {kind} | {us:.0f} | {calls:.0f} |" for kind, us, calls in by_kind(kernels)]
    return [*lines, f"| all | {sum(one.us for one in kernels):.0f} | {sum(one.calls for one in kernels):.0f} |", ""]


def rates_table(result: EngineResult, model: PlanModel | None) -> list[str]:
    """Lines of a Markdown table: every figure of each configuration beside the first's; empty where none was taken."""
    spec, runs, first = result.spec, result.runs, result.runs[0]
    rows: list[tuple[str, list[str]]] = []
    for streams in spec.streams:
        cells = [_beside(run.decode.get(streams), first.decode.get(streams)) for run in runs]
        rows.append((f"decode, {streams} stream{'s' if streams > 1 else ''}, t/s", cells))
    for tokens in spec.prefills:
        rows.append(
            (f"prefill {tokens}, t/s", [_beside(run.prefill.get(tokens), first.prefill.get(tokens)) for run in runs])
        )
    for depth in spec.depths:
        for kind in ("prefill", "decode"):
            rates = [getattr(run.depths.get(depth), kind, None) for run in runs]
            cells = [_one_beside(rate, rates[0] if place else None) for place, rate in enumerate(rates)]
            rows.append((f"prefill of {depth}, t/s" if kind == "prefill" else f"decode behind {depth}, t/s", cells))
    context = short_context(spec)
    card = result.cards[0].name if result.cards else None
    bound = roofline(model, card, context) if model is not None and card is not None else None
    if bound is not None:
        shares = [f"{run.decode[1].median / bound:.1%}" if 1 in run.decode else "" for run in runs]
        rows.append((f"share of the byte roofline, {number(bound)} t/s at {context} tokens", shares))
    rows += _resident_rows(runs) + _start_rows(runs)
    table = [f"| | {' | '.join(run.label for run in runs)} |", "|:--|" + "--:|" * len(runs)]
    return table + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]


def short_context(spec: EngineSpec) -> int:
    """Tokens in the cache halfway through what gives the decode rates by streams."""
    return spec.prompt + (spec.short + spec.long) // 2


def _resident_rows(runs: Sequence[EngineRun]) -> list[tuple[str, list[str]]]:
    rows = []
    for name, sizes in (
        ("weights in memory, GiB", [run.model_bytes for run in runs]),
        ("all that the process holds, KV pool included, GiB", [run.reserved_bytes for run in runs]),
    ):
        if any(size is not None for size in sizes):
            rows.append((name, ["" if size is None else f"{size / GIB:.2f}" for size in sizes]))
    return rows


def _start_rows(runs: Sequence[EngineRun]) -> list[tuple[str, list[str]]]:
    name = "start from empty caches, s" if all(run.cold for run in runs) else "load, s"
    if any(run.side_by_side for run in runs):
        name = f"{name.removesuffix(', s')}, beside other engines' starts, s"
    rows = [(name, [f"{run.load_s:.0f}" for run in runs])]
    again = [spread(run.restart_s) for run in runs]
    if any(again):
        rows.append(("start from the caches of the first, s", [f"{one.median:.0f}" if one else "" for one in again]))
    return rows


def _beside(value: Spread | None, first: Spread | None) -> str:
    if value is None or first is None:
        return ""
    ratio = "" if value is first else f" ({value.median / first.median:.2f}x)"
    return cell(value) + ratio


def _one_beside(rate: float | None, first: float | None) -> str:
    if rate is None:
        return ""
    return number(rate) + ("" if first is None else f" ({rate / first:.2f}x)")
