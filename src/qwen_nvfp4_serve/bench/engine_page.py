"""The page of engines that were measured: rates beside each other and beside the bytes, and where a step goes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from qwen_nvfp4_serve.bench.clocks import clocks_section
from qwen_nvfp4_serve.bench.engine import EngineResult, EngineRun, EngineSpec, Kernel
from qwen_nvfp4_serve.bench.measured import is_measured, weights_line
from qwen_nvfp4_serve.bench.rows import cell, number
from qwen_nvfp4_serve.bench.statistics import Spread, spread
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
BACKEND_OPTIONS = ("linear_backend", "moe_backend")  # of vllm.LLM: whose kernels compute, instead of vLLM's own choice
SCATTER = 0.05  # standard deviation over median
OVERLAP = "A kernel that starts before the one ahead has ended counts its waiting here: the times"
STEP, GRAPH = "a step, timed without the profile", "its graph, replayed with nothing between"
STAYING = "Requests reach the core one by one, and a prefill may stay in a profile of several streams: such times"


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
    where = [card or "no card", f"vLLM {result.vllm}", f"torch {result.torch}", f"weights of {weights}"]
    lines += [", ".join(where if result.code is None else [*where, f"code {result.code}"]), ""]
    lines += [] if model is None else [weights_line(model, result.runs), ""]
    lines += [core_line(result.runs), "", *rates_table(result, model), ""]
    for said in (backends_line(result.runs), scatter_line(result.runs), prefill_line(result.runs)):
        lines += [said, ""] if said else []
    lines += clocks_section({run.label: run.clocks for run in result.runs})
    for run in result.runs:
        first_longer = _longer_than_a_step(run)
        for streams, kernels in _profiles(run).items():
            title, unit = ("", "token") if streams == 1 else (f", {streams} streams", "step")
            wholes = {STEP: _step_us(run, streams), GRAPH: run.graph_us.get(streams)}
            lines += _step_lines(f"## A decode step of {run.label}{title}", unit, kernels, wholes)
            if streams == first_longer:
                said = STAYING if run.kernels_apart else OVERLAP
                lines += [f"{said} of {run.label} add up to more than a step.", ""]
    options = {run.label: run.options for run in result.runs}
    return "\n".join([*lines, "Options of vllm.LLM:", "", "```json", json.dumps(options, indent=1), "```", ""])


def _profiles(run: EngineRun) -> dict[int, tuple[Kernel, ...]]:
    """Kernels of a step by its streams, one stream first."""
    return {1: run.kernels} | dict(sorted(run.kernels_at.items()))


def _longer_than_a_step(run: EngineRun) -> int | None:
    """Streams of the first profile whose times add up to more than a step took: where kernels overlap, or of several
    streams."""
    sums = {
        streams: sum(kernel.us for kernel in kernels)
        for streams, kernels in _profiles(run).items()
        if streams in run.decode and (not run.kernels_apart or (run.core_process and streams > 1))
    }
    return next((streams for streams, us in sums.items() if us > streams / run.decode[streams].median * 1e6), None)


def core_line(runs: Sequence[EngineRun]) -> str:
    """In which process the engine's core was: one that it shares waits for the Python of the requests too."""
    places = {True: "The engine's core had a process of its own", False: "The engine's core shared the bench's process"}
    same = {run.core_process for run in runs}
    if len(same) == 1:
        return places[same.pop()] + "."
    return " ".join(f"{places[run.core_process]}: {run.label}." for run in runs)


def backends_line(runs: Sequence[EngineRun]) -> str | None:
    """Which of vLLM's kernels a configuration named, where any did: vLLM's own choice may be another."""
    places = []
    for run in runs:
        told = [f"{name} {run.options[name]}" for name in BACKEND_OPTIONS if name in run.options]
        places += [f"{run.label}: {', '.join(told)}"] if told else []
    return f"vLLM was told which of its kernels to use for {'; '.join(places)}." if places else None


def scatter_line(runs: Sequence[EngineRun]) -> str | None:
    """Which rates differ from round to round so much that their ratio says little; None where none does."""
    places = []
    for run in runs:
        rates = [
            (f"{kind} {count}", rate) for kind in ("decode", "prefill") for count, rate in getattr(run, kind).items()
        ]
        names = [name for name, rate in rates if rate.std > SCATTER * rate.median]
        if names:
            places.append(f"{', '.join(names)} of {run.label}")
    if not places:
        return None
    return (
        f"Rates that scatter, with a standard deviation above {SCATTER * 100:.0f} % of the median: {'; '.join(places)}."
    )


def prefill_line(runs: Sequence[EngineRun]) -> str | None:
    """Which streams began in more steps in one run than in another; None where none did."""
    places = [
        f"{name} of {run.label} in {min(steps)} to {max(steps)} steps"
        for run in runs
        for name, steps in run.prefill_steps.items()
        if len(set(steps)) > 1
    ]
    if not places:
        return None
    return f"Prefills are in rates and profiles where streams did not begin alike: {'; '.join(places)}."


def _step_us(run: EngineRun, streams: int) -> float | None:
    """What a step of so many streams took without the profile: what its kernels lack of it, nothing ran. None where it
    was not timed, or where kernels count their waiting."""
    return streams / run.decode[streams].median * 1e6 if run.kernels_apart and streams in run.decode else None


def _step_lines(title: str, unit: str, kernels: Sequence[Kernel], wholes: Mapping[str, float | None]) -> list[str]:
    if not kernels:
        return []
    lines = [title, "", f"| kernels | us per {unit} | calls |", "|:--|--:|--:|"]
    lines += [f"| {kind} | {us:.0f} | {calls:.0f} |" for kind, us, calls in by_kind(kernels)]
    lines += [f"| all | {sum(one.us for one in kernels):.0f} | {sum(one.calls for one in kernels):.0f} |"]
    lines += [f"| {name} | {us:.0f} | |" for name, us in wholes.items() if us is not None]
    return [*lines, ""]


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
    bound = None
    if model is not None and card is not None and is_measured(model, runs):
        bound = roofline(model, card, context)
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
