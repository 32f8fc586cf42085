"""`qwen-nvfp4 inspect`: what a checkpoint really is, before it is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from qwen_nvfp4_serve.units import gib

if TYPE_CHECKING:
    from qwen_nvfp4_serve.checkpoint import Fault, Report


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(inspect)


def inspect(
    checkpoint: str = typer.Argument(metavar="PATH|REPO", help="Checkpoint folder, hub id or catalogue name."),
    revision: str | None = typer.Option(None, help="Hub revision. Unset: the catalogue's, else main."),
    speculative_tokens: int = typer.Option(0, min=0, help="Draft tokens that will be asked for."),
    vision: bool = typer.Option(False, help="The vision tower will be used."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Read config and safetensors headers of a checkpoint (no weights), and say what is wrong with it.

    Exit code 0: no error, 1: errors that would stop `serve`, 2: wrong use.
    """
    report = _report(checkpoint, revision, speculative_tokens=speculative_tokens, vision=vision)
    if as_json:
        typer.echo(json.dumps(_as_json(report), indent=2))
    else:
        _show(report)
    raise typer.Exit(1 if report.errors else 0)


def _report(given: str, revision: str | None, *, speculative_tokens: int, vision: bool) -> Report:
    from qwen_nvfp4_serve.checkpoint import inspect_folder, inspect_source, knows_type
    from qwen_nvfp4_serve.models import resolve_model
    from qwen_nvfp4_serve.reference import EMBEDDED

    ref = resolve_model(given)
    if ref.repo is None:
        return inspect_folder(ref.path or EMBEDDED, speculative_tokens=speculative_tokens, vision=vision)
    from qwen_nvfp4_serve.cli.defaults import hub_token
    from qwen_nvfp4_serve.hub import open_repo

    source = open_repo(ref.repo, revision=revision or ref.revision, token=hub_token())
    known = knows_type(str(source.config.get("model_type")))
    return inspect_source(source, speculative_tokens=speculative_tokens, vision=vision, knows_type=known)


def _as_json(report: Report) -> dict[str, object]:
    return {
        "precision": dict(report.precision.by_class),
        "exceptions": [
            {"module": module, "precision": label, "layers": [layer for layer in layers if layer >= 0]}
            for module, label, layers in report.precision.exceptions
        ],
        "errors": [asdict(fault) for fault in report.errors],
        "warnings": [asdict(fault) for fault in report.warnings],
        "mtp": report.mtp,
        "vision": report.vision,
        "kv_scales": {"declared": report.kv_scales_declared, "shipped": report.kv_scales_shipped},
        "bytes_per_token": report.bytes_per_token,
        "size_bytes": report.size_bytes,
    }


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape

    from qwen_nvfp4_serve.cli.listing import print_listing

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(report.place)}[/]: {gib(report.size_bytes)}")
    rows = [*report.precision.by_class.items()]
    rows += [(f"{module} in {len(layers)} layers", label) for module, label, layers in report.precision.exceptions]
    print_listing(console, ("module", "as vLLM will see it"), rows)
    mtp, vision = ("yes" if there else "no" for there in (report.mtp, report.vision))
    read = "unknown" if report.bytes_per_token is None else gib(report.bytes_per_token)
    console.print(f"drafter {mtp}, vision {vision}, weights read for one token {read}")
    for colour, mark, faults in (("red", "error", report.errors), ("yellow", "warning", report.warnings)):
        for fault in faults:
            console.print(_line(colour, mark, fault))
    if not report.errors and not report.warnings:
        console.print("[green]nothing wrong found[/]")


def _line(colour: str, mark: str, fault: Fault) -> str:
    from rich.markup import escape

    return f"[{colour}]{mark}[/] {escape(f'[{fault.code}] {fault.says}.')} {escape(fault.do)}"
