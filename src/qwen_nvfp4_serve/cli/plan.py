"""`qwen-nvfp4 plan`: does it fit, with which settings, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from qwen_nvfp4_serve.units import GIB, gib

if TYPE_CHECKING:
    from qwen_nvfp4_serve.planner import Plan, PlanModel, PlanRequest

BAR_WIDTH = 60
# part of PlanBytes -> label and colour of the bar
PARTS = {
    "weights": ("weights", "blue"),
    "embeddings": ("embeddings, head", "cyan"),
    "kv_pool": ("KV cache", "green"),
    "state": ("recurrent state", "yellow"),
    "graphs": ("CUDA graphs", "magenta"),
    "workspaces": ("workspaces", "red"),
    "vision": ("vision tower", "bright_blue"),
    "mtp": ("drafter", "bright_magenta"),
    "headroom": ("left free", "white"),
}


class KvCacheDtype(StrEnum):
    """Values of --kv-cache-dtype."""

    fp8 = "fp8"
    bfloat16 = "bfloat16"


class GdnPrefill(StrEnum):
    """Values of --gdn-prefill."""

    triton = "triton"
    flashinfer = "flashinfer"


class StateDtype(StrEnum):
    """Values of --state-dtype."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


def plan(
    *,
    model: str | None = typer.Option(
        None, help="Catalogue name, checkpoint folder or hub id. Unset: MODEL, else what serve takes on such a machine."
    ),
    gpu: str | None = typer.Option(None, help="Card: rtx-5090, rtx-pro-6000, gb10, h200, …"),
    context: int | None = typer.Option(None, help="Tokens of the longest request. Unset: the largest that fits."),
    seqs: int | None = typer.Option(None, help="Requests decoded at once."),
    kv_pool_gib: float | None = typer.Option(None, help="Cache pool per card, GiB. Unset: what the card has left."),
    kv_cache_dtype: KvCacheDtype = typer.Option(KvCacheDtype.fp8, help="Precision of the KV cache."),
    prefix_caching: bool = typer.Option(True, help="Reuse the cache of equal prompt prefixes."),
    speculative_tokens: int = typer.Option(0, help="Draft tokens a step from the MTP layer."),
    tensor_parallel: int = typer.Option(1, help="Cards to split the model over."),
    gdn_prefill: GdnPrefill | None = typer.Option(None, help="GDN prefill backend. Unset: what vLLM picks."),
    state_dtype: StateDtype | None = typer.Option(None, help="Precision of the recurrent state."),
    max_num_batched_tokens: int | None = typer.Option(None, help="Tokens of one prefill chunk."),
    vision: bool = typer.Option(False, help="Count the vision tower."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Plan memory, contexts and settings for a model on a card, without a download or a GPU.

    Exit code 0: it fits (or no card was named), 1: it does not, 2: wrong use.
    """
    from qwen_nvfp4_serve.cli.defaults import default_model, settings_of
    from qwen_nvfp4_serve.gpus import find_gpu
    from qwen_nvfp4_serve.planner import PlanRequest, alternatives
    from qwen_nvfp4_serve.planner import plan as make_plan
    from qwen_nvfp4_serve.room import memory_warning

    for_card = gpu is not None or kv_pool_gib is not None
    request = PlanRequest(
        model=_plan_model(default_model(settings_of(None), for_card=for_card) if model is None else model),
        gpu=find_gpu(gpu) if gpu is not None else None,
        context=context,
        seqs=seqs,
        batched_tokens=max_num_batched_tokens,
        kv_pool_bytes=None if kv_pool_gib is None else _bytes(kv_pool_gib),
        kv_dtype=kv_cache_dtype.value,
        prefix_caching=prefix_caching,
        speculative_tokens=speculative_tokens,
        tensor_parallel=tensor_parallel,
        gdn_prefill=gdn_prefill.value if gdn_prefill else None,
        state_dtype=state_dtype.value if state_dtype else None,
        vision=vision,
    )
    planned = make_plan(request if for_card or model is not None else _here(request))
    if planned.on_cpu and (warning := memory_warning(planned.request.model, planned.pool_bytes or 0)):
        planned = replace(planned, notices=(*planned.notices, warning))
    instead = alternatives(planned) if planned.fits is False else ()
    if as_json:
        typer.echo(json.dumps(_as_json(planned, instead), indent=2))
    else:
        _show(planned, instead)
    raise typer.Exit(1 if planned.fits is False else 0)


def _here(request: PlanRequest) -> PlanRequest:
    """`request` as `serve` would plan it on this machine, where that is on the CPU; as it is otherwise."""
    from qwen_nvfp4_serve.capacity import cpu_request
    from qwen_nvfp4_serve.cli.defaults import is_cpu_run, settings_of
    from qwen_nvfp4_serve.planner.weights import weight_bytes
    from qwen_nvfp4_serve.room import ALL_BF16

    settings = settings_of(None)
    if not is_cpu_run(settings):
        return request
    serving = cpu_request(settings, request.model)
    model = replace(request.model, weights=weight_bytes(request.model.dims, ALL_BF16))
    settled = ("context", "seqs", "batched_tokens", "gdn_prefill", "attention", "kv_pool_bytes")
    unset = {name: getattr(serving, name) for name in settled if getattr(request, name) is None}
    return replace(request, model=model, **unset)


def _bytes(size_gib: float) -> int:
    from qwen_nvfp4_serve.errors import UsageError

    if not 2**-20 <= size_gib <= 2**20:
        raise UsageError("--kv-pool-gib", seen=f"{size_gib:g}", expected="from 0.000001 to 1,048,576 GiB")
    return round(size_gib * GIB)


def _plan_model(given: str) -> PlanModel:
    """The model as the planner sees it: from the catalogue, a folder's files, or a hub repository's headers."""
    from qwen_nvfp4_serve.models import resolve_model
    from qwen_nvfp4_serve.planner import PlanModel
    from qwen_nvfp4_serve.reference import EMBEDDED

    ref = resolve_model(given)
    if ref.row is not None and ref.row.dims is not None:
        return PlanModel.from_row(ref.row, ref.row.dims)
    from qwen_nvfp4_serve.checkpoint import inspect_folder, inspect_source, plan_model

    if ref.row is not None:
        return plan_model(inspect_folder(EMBEDDED), ref.row.name)
    if ref.path is not None:
        return plan_model(inspect_folder(ref.path), ref.path.resolve().name)
    from qwen_nvfp4_serve.cli.defaults import hub_token
    from qwen_nvfp4_serve.hub import open_repo

    return plan_model(inspect_source(open_repo(ref.repo or given, token=hub_token())), given)


def _as_json(planned: Plan, instead: tuple[str, ...]) -> dict[str, object]:
    from qwen_nvfp4_serve.planner import JSON_KEYS

    values: dict[str, object] = {key: getattr(planned, key) for key in JSON_KEYS}
    values["bytes"] = asdict(planned.bytes)
    values["roofline_tokens_per_s"] = asdict(planned.roofline_tokens_per_s)
    values["reasons"] = [*planned.reasons, *instead]
    return values


def _show(planned: Plan, instead: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    where = f" on {planned.gpu}" if planned.gpu else " on this machine's CPU" if planned.on_cpu else ""
    verdict = {True: "[green]fits[/]", False: "[red]does not fit[/]", None: "[yellow]not decided[/]"}[planned.fits]
    console.print(f"[bold]{planned.model}[/]{where}: {verdict}")
    if planned.fits and planned.bytes.headroom is not None and console.color_system:  # its colours are all it says
        console.print(_bar(planned))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(planned):
        table.add_row(name, value)
    console.print(table)
    for reason in planned.reasons:
        console.print(f"[dim]- {reason}[/]")
    for notice in planned.notices:
        console.print(f"[yellow]! {notice}[/]")
    for sentence in instead:
        console.print(f"[green]> {sentence}[/]")


def _rows(planned: Plan) -> list[tuple[str, str]]:
    unknown, roof = "-", planned.roofline_tokens_per_s
    used = planned.gpu_memory_utilization
    rows = [
        ("context", f"{planned.max_model_len:,} tokens"),
        ("block", f"{planned.block_size_tokens:,} tokens, {planned.blocks_per_request:,} blocks a request"),
        ("pool", unknown if planned.pool_blocks is None else f"{planned.pool_blocks:,} blocks"),
        ("pool tokens", unknown if planned.pool_tokens is None else f"{planned.pool_tokens:,}"),
        ("concurrency", unknown if planned.concurrency is None else f"{planned.concurrency:.2f} full contexts"),
        ("sequences", f"{planned.max_num_seqs:,}"),
        ("batched tokens", f"{planned.max_num_batched_tokens:,}"),
        ("utilization", unknown if used is None else f"{used:.3f}"),
    ]
    if roof.at_4k is not None and roof.at_context is not None:
        rows.append(("bandwidth bound", f"{roof.at_4k:,.0f} tokens/s at 4K, {roof.at_context:,.0f} at the context"))
    for part, (label, colour) in PARTS.items():
        size = getattr(planned.bytes, part)
        if size:
            rows.append((f"[{colour}]■[/] {label}", gib(size)))
    return rows


def _bar(planned: Plan) -> str:
    """One line of BAR_WIDTH blocks; every part that is there gets at least one."""
    sizes = {part: getattr(planned.bytes, part) or 0 for part in PARTS}
    total = sum(sizes.values()) or 1
    cells = {part: max(1, round(BAR_WIDTH * size / total)) if size else 0 for part, size in sizes.items()}
    widest = max(cells, key=lambda part: cells[part])
    cells[widest] += BAR_WIDTH - sum(cells.values())
    return "".join(f"[{PARTS[part][1]}]{'█' * count}[/]" for part, count in cells.items() if count > 0)
