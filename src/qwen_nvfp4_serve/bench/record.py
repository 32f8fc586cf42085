"""The record of a card: vLLM's own kernels against ours, both model sizes, from `engine-<size>-<card>.json` alone."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qwen_nvfp4_serve.bench.clocks import cap_line, unrecorded_line
from qwen_nvfp4_serve.bench.engine import EngineResult, dump_engine, parse_engine, read_engine
from qwen_nvfp4_serve.bench.engine_page import (
    backends_line,
    core_line,
    engine_markdown,
    prefill_line,
    rates_table,
    scatter_line,
    short_context,
)
from qwen_nvfp4_serve.bench.files import write_whole
from qwen_nvfp4_serve.bench.landscape import bounds_beside, entries
from qwen_nvfp4_serve.bench.measured import measured_model, weights_line
from qwen_nvfp4_serve.bench.report import markdown_table
from qwen_nvfp4_serve.bench.rows import number
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import GpuRow, find_gpu, match_gpu
from qwen_nvfp4_serve.models import find_model
from qwen_nvfp4_serve.planner import PlanModel

MODELS = {"35b": "qwen3.5-35b-a3b", "27b": "qwen3.5-27b"}
SIZES = {"35b": "35B-A3B", "27b": "27B"}
LABELS = ("stock", "ours")
ALIKE = ("core_process", "side_by_side", "kernels_apart")  # fields of runs whose figures compare
BESIDE = "rtx-5090"  # the card that most others published for


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The engines of one model size on one card. size: a key of SIZES, as in file names."""

    size: str
    model: PlanModel
    result: EngineResult

    @property
    def title(self) -> str:
        """The size in words."""
        return SIZES[self.size]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStream:
    """What one stream reached on the card: tokens/s behind so many tokens of context; None where not measured."""

    label: str
    depth: int
    decode: float | None
    prefill: float | None


def file_of(folder: Path, size: str, card: GpuRow) -> Path:
    """Where the engines of one size are kept."""
    return folder / f"engine-{size}-{card.name}.json"


def read_card_record(
    folder: Path, card: GpuRow, taken: Mapping[str, EngineResult] | None = None
) -> tuple[Recorded, ...]:
    """What there is of a card, `taken` instead of the file of its size. Raises UsageError where there is nothing, or a
    file is of another card."""
    found = []
    for size in SIZES:
        file = file_of(folder, size, card)
        result = (taken or {}).get(size)
        if result is None:
            if not file.exists():
                continue
            result = read_engine(file)
            _check_part(file, result, card, LABELS)
        found.append(Recorded(size=size, model=_plan_model(size, result), result=result))
    if not found:
        expected = " or ".join(file_of(folder, size, card).name for size in SIZES)
        raise UsageError(f"record in {folder}", seen="no engine of this card", expected=expected)
    return tuple(found)


def read_visit(visit: Path, card: GpuRow, size: str | None = None, code: str | None = None) -> dict[str, EngineResult]:
    """The files `engine-<size>-<label>.json` of a visit to a card, joined into one result a size.

    size: only this one is looked at, where a visit ended before another was whole. code: the commit that was measured.
    Raises UsageError where the folder is missing, the visit has nothing at all, one engine of a size alone, or of one
    size what is not of one machine, one version and one workload.
    """
    if size is not None and size not in SIZES:
        raise UsageError("size", seen=size, expected=" or ".join(SIZES))
    if not visit.is_dir():
        raise UsageError(f"visit {visit}", seen="no such folder", expected="the one that a visit to a card left")
    taken = {}
    for one, title in SIZES.items():
        if size not in (None, one):
            continue
        files = {label: visit / f"engine-{one}-{label}.json" for label in LABELS}
        parts = {label: (file, read_engine(file)) for label, file in files.items() if file.exists()}
        for label, (file, part) in parts.items():
            _check_part(file, part, card, (label,))
        if len(parts) == 1:
            raise UsageError(
                f"visit {visit}, {title}",
                seen=f"{next(iter(parts))} alone",
                expected=f"{' and '.join(LABELS)} of one visit, since figures of two do not compare",
            )
        if parts:
            taken[one] = replace(_joined(tuple(parts.values()), MODELS[one]), code=code)
    if not taken:
        expected = "engine-<size>-<label>.json, as a visit to a card leaves them"
        raise UsageError(f"visit {visit}", seen="no engine", expected=expected)
    return taken


def write_card_record(folder: Path, card: GpuRow, taken: Mapping[str, EngineResult] | None = None) -> tuple[Path, ...]:
    """Writes the page of every size, the charts and `<card>.md`, and first what a visit found of a size (`read_visit`),
    if it is given; returns the results and pages. All is made before anything is replaced. Raises UsageError."""
    from qwen_nvfp4_serve.bench.record_charts import draw_record

    taken = taken or {}
    record = read_card_record(folder, card, taken)
    files = {file_of(folder, size, card): dump_engine(result) for size, result in taken.items()}
    for size, result in taken.items():
        _check_readable(file_of(folder, size, card), files[file_of(folder, size, card)], result)
    for one in record:
        page = file_of(folder, one.size, card).with_suffix(".md")
        files[page] = engine_markdown(one.result, one.model).encode()
    files[folder / f"{card.name}.md"] = record_markdown(record, card).encode()
    with tempfile.TemporaryDirectory() as charts:
        draw_record(record, card, Path(charts))
        drawn = {folder / chart.name: chart.read_bytes() for chart in sorted(Path(charts).iterdir())}
    for file, data in (files | drawn).items():
        write_whole(file, data)
    return tuple(files)


def record_markdown(record: Sequence[Recorded], card: GpuRow) -> str:
    """The page: each size with its chart and table, then one stream beside what others published for another card."""
    lines = [f"# {card.title}: vLLM's own kernels and ours", ""]
    lines += [
        "Decode and prefill of `vllm.LLM` on dummy weights of the real shapes, without HTTP, FP8 KV cache, no drafts;",
        "medians of several rounds with their standard deviation, one behind long prompts. `stock` is vLLM's kernels,",
        "`ours` those of `NVFP4_BACKEND=hybrid`. Generated from the JSON beside it: `qwen-nvfp4 bench record`.",
        "",
    ]
    visits = visits_line(record)
    lines += [visits, ""] if visits else []
    for one in record:
        page = f"engine-{one.size}-{card.name}.md"
        lines += [f"## {one.title}", "", f"Measured on: {measured_on(one.result)}.", ""]
        lines += [weights_line(one.model, one.result.runs), "", core_line(one.result.runs), ""]
        lines += [f"![{one.title}]({card.name}-{one.size}.png)", ""]
        if costs_known(one.result):
            lines += [f"![memory and start]({card.name}-{one.size}-costs.png)", ""]
        lines += [*rates_table(one.result, one.model), ""]
        clocks = {run.label: run.clocks for run in one.result.runs}
        said_of_clocks = (cap_line(clocks), unrecorded_line(clocks))
        said_of_runs = (backends_line(one.result.runs), scatter_line(one.result.runs), prefill_line(one.result.runs))
        for said in (*said_of_runs, *said_of_clocks):
            lines += [said, ""] if said else []
        lines += [f"Options, and every kind of kernel of a decode step: [{page}]({page}).", ""]
    other = find_gpu(BESIDE)
    lines += [f"## One stream, beside what others published for the {other.title}", ""]
    lines += [
        "Another card with other bandwidth, other weights and engines: not measured by this project, and no race.",
        "Bounds are of published checkpoints, and of the weights measured here where none of those has their bytes.",
        f"Caveats and sources: [{other.name}.md]({other.name}.md).",
        "",
        f"![beside]({card.name}-beside.png)",
        "",
    ]
    head = ("model", "what", "context", "decode, t/s", "prefill, t/s", "card", "measured by")
    return "\n".join([*lines, markdown_table(head, _beside_rows(record, card, other))])


def visits_line(record: Sequence[Recorded]) -> str | None:
    """That sizes are of several visits, each with its code; None where all are of one code."""
    codes = {one.title: one.result.code for one in record}
    if len(set(codes.values())) < 2:
        return None
    places = [f"{title} of code {code or 'that its file does not name'}" for title, code in codes.items()]
    return f"Each size is of a visit of its own: {', '.join(places)}. Figures compare within a size alone."


def measured_on(result: EngineResult) -> str:
    """Card, driver, clock, power limit, versions and code of a result, as its file has them."""
    card = result.cards[0] if result.cards else None
    words = [] if card is None else [f"**{card.name}**"]
    if card is not None and card.driver is not None:
        words.append(f"driver {card.driver}")
    if card is not None and card.sm_clock_mhz is not None:
        words.append(f"SM {card.sm_clock_mhz:.0f} MHz")
    if card is not None and card.power_limit_w is not None:
        words.append(f"{card.power_limit_w:.0f} W")
    words += [f"vLLM {result.vllm}", f"torch {result.torch}"]
    return ", ".join(words if result.code is None else [*words, f"code {result.code}"])


def costs_known(result: EngineResult) -> bool:
    """True where a run knows what it holds in memory, and how long it takes to start when nothing else does."""
    return any(
        run.model_bytes is not None and (run.restart_s or (run.cold and not run.side_by_side)) for run in result.runs
    )


def one_stream(result: EngineResult) -> tuple[OneStream, ...]:
    """Rates of one stream of every run, the short context first."""
    found = []
    for run in result.runs:
        if 1 in run.decode:
            context = short_context(result.spec)
            found.append(OneStream(label=run.label, depth=context, decode=run.decode[1].median, prefill=None))
        found += [
            OneStream(label=run.label, depth=depth, decode=rates.decode, prefill=rates.prefill)
            for depth, rates in sorted(run.depths.items())
        ]
    return tuple(found)


def _beside_rows(record: Sequence[Recorded], card: GpuRow, other: GpuRow) -> list[tuple[str, ...]]:
    rows = []
    for one in record:
        for seen in one_stream(one.result):
            rates = ["" if rate is None else number(rate) for rate in (seen.decode, seen.prefill)]
            where = f"{seen.depth:,} tokens"
            rows.append((one.title, f"**{seen.label}**", where, *rates, card.title, "this project"))
        for entry in entries(other, one.title):
            for depth in sorted({figure.depth for figure in entry.figures}, key=lambda depth: (depth is None, depth)):
                found = {
                    figure.test: f"{figure.tokens_per_s:,.10g}" for figure in entry.figures if figure.depth == depth
                }
                where = "not stated" if depth is None else f"{depth:,} tokens"
                rates = [found.get("decode", ""), found.get("prefill", "")]
                rows.append((one.title, entry.title, where, *rates, other.title, entry.measured_by))
        for bound in bounds_beside(other, one.title, one.model):
            name = f"bound of {bound.model} by bandwidth, {bound.bytes_per_token / 1e9:.1f} GB a step"
            where = f"{bound.depth:,} tokens"
            rows.append((one.title, name, where, number(bound.tokens_per_s), "", other.title, "computed"))
    return rows


def _joined(parts: Sequence[tuple[Path, EngineResult]], model: str) -> EngineResult:
    """One result of several that differ in their configurations only; the model's folder is called by its name."""
    (_, first), *others = parts
    for file, part in others:
        for name, here, there in (
            ("workload", replace(first.spec, configurations={}), replace(part.spec, configurations={})),
            ("vLLM", first.vllm, part.vllm),
            ("torch", first.torch, part.torch),
            ("card", _card_name(first), _card_name(part)),
            ("driver", _of_card(first, "driver"), _of_card(part, "driver")),
            ("power limit", _of_card(first, "power_limit_w"), _of_card(part, "power_limit_w")),
            *((f"{name} of its runs", _of_runs(first, name), _of_runs(part, name)) for name in ALIKE),
        ):
            if here != there:
                raise UsageError(f"{file.name}, {name}", seen=str(there), expected=f"{here}, as the file before it")
    configurations = {label: options for _, part in parts for label, options in part.spec.configurations.items()}
    runs = tuple(
        replace(run, options={name: value for name, value in run.options.items() if name != "model"})
        for _, part in parts
        for run in part.runs
    )
    return replace(first, spec=replace(first.spec, model_folder=model, configurations=configurations), runs=runs)


def _of_runs(result: EngineResult, name: str) -> str:
    return " and ".join(sorted({str(getattr(run, name)) for run in result.runs}))


def _of_card(result: EngineResult, name: str) -> object:
    return getattr(result.cards[0], name) if result.cards else None


def _check_part(file: Path, result: EngineResult, card: GpuRow, labels: Sequence[str]) -> None:
    """Raises UsageError where a file is not of the card, or its engines are others than those of its place."""
    name = _card_name(result)
    if name is None or match_gpu(name) != card:
        raise UsageError(f"{file.name}, card", seen=name or "none", expected=card.title)
    if not result.spec.streams:  # a start that only took its time measures none, and is no record
        raise UsageError(f"{file.name}, spec.streams", seen="none", expected="one or more")
    for what, found in (
        ("label of its runs", [run.label for run in result.runs]),
        ("spec.configurations", list(result.spec.configurations)),
    ):
        if found != list(labels):
            raise UsageError(f"{file.name}, {what}", seen=", ".join(found), expected=", ".join(labels))


def _check_readable(file: Path, data: bytes, result: EngineResult) -> None:
    if parse_engine(data, file) != result:
        seen = "an option or a figure that JSON does not hold"
        raise UsageError(f"record {file}", seen=seen, expected="what can be read again as it is")


def _card_name(result: EngineResult) -> str | None:
    return result.cards[0].name if result.cards else None


def _plan_model(size: str, result: EngineResult) -> PlanModel:
    row = find_model(MODELS[size])
    if row is None:
        raise ValueError(f"{MODELS[size]} is not in the table")
    return measured_model(row, result.runs)
