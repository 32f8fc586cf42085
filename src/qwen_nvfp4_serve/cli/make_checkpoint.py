"""`qwen-nvfp4 make-checkpoint`: write a synthetic Qwen3.5 checkpoint."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.synthetic import (
    ARCHITECTURES,
    STYLES,
    Architecture,
    CheckpointSpec,
    Kind,
    Precision,
    write_checkpoint,
)
from qwen_nvfp4_serve.units import MIB

_DEFAULT_PRESET = {Kind.MOE: "embedded", Kind.DENSE: "embedded-dense"}
_STYLE_HELP = "; ".join(f"{style.name}: {style.like}" for style in STYLES)


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("make-checkpoint")(make_checkpoint)


def make_checkpoint(
    dest: Annotated[Path, typer.Argument(help="Folder to write; must be new or empty.")],
    *,
    style: Annotated[str, typer.Option(help=_STYLE_HELP)] = "ct-w4a4",
    kind: Annotated[Kind, typer.Option(help="Small model of this kind, when no preset is named.")] = Kind.MOE,
    preset: Annotated[str | None, typer.Option(help="Dimensions: " + ", ".join(ARCHITECTURES))] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="One dimension, such as hidden=512.")] = None,
    seed: Annotated[int, typer.Option(help="Decides the weights, the same in every style.")] = 0,
    mtp: Annotated[bool, typer.Option(help="Write the MTP tensors.")] = True,
    vision: Annotated[bool, typer.Option(help="Write the vision tower.")] = False,
    dequantized: Annotated[bool, typer.Option(help="Write, in BF16, what the quantized checkpoint means.")] = False,
    unequal_scales: Annotated[bool, typer.Option(help="A global scale for each matrix, also in fused groups.")] = False,
    gdn: Annotated[Precision | None, typer.Option(help="GDN in another precision than the style's.")] = None,
    lm_head: Annotated[Precision | None, typer.Option(help="lm_head in another precision than the style's.")] = None,
    shard_mib: Annotated[int, typer.Option(min=1, help="Begin a new file beyond this size.")] = 4096,
    overwrite: Annotated[bool, typer.Option(help="Replace the folder.")] = False,
) -> None:
    """Write a random Qwen3.5 checkpoint that serves and says nothing sensible."""
    name = preset or _DEFAULT_PRESET[kind]
    if name not in ARCHITECTURES:
        raise UsageError("preset", seen=name, expected="one of " + ", ".join(ARCHITECTURES))
    spec = CheckpointSpec(
        architecture=changed_architecture(ARCHITECTURES[name], change or []),
        style=style,
        seed=seed,
        mtp=mtp,
        vision=vision,
        dequantized=dequantized,
        unequal_scales=unequal_scales,
        gdn=gdn,
        lm_head=lm_head,
        shard_bytes=shard_mib * MIB,
    )
    folder = write_checkpoint(dest, spec, overwrite=overwrite)
    size_mib = sum(path.stat().st_size for path in folder.iterdir()) / MIB
    Console().print(f"{folder}: {name}, {style}, {size_mib:.1f} MiB", soft_wrap=True)


def changed_architecture(dims: Architecture, changes: list[str]) -> Architecture:
    """`dims` with each `name=number` of `changes` applied. Raises UsageError naming a wrong dimension or value."""
    known = [field.name for field in dataclasses.fields(Architecture) if field.name != "kind"]
    values: dict[str, int] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise UsageError("--set", seen=change, expected=f"{close[0] if close else 'one of ' + ', '.join(known)}=N")
        if not text.isdecimal():
            raise UsageError("--set", seen=change, expected=f"{name}= and a whole number")
        values[name] = int(text)
    return dataclasses.replace(dims, **values)  # type: ignore[arg-type]
