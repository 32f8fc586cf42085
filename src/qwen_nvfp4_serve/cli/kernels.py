"""`qwen-nvfp4 kernels`: which NVFP4 kernel serves how many tokens on this machine's card, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from qwen_nvfp4_serve.dims import dims_from_config
from qwen_nvfp4_serve.errors import UnsupportedHostError
from qwen_nvfp4_serve.host import Gpu, detect_gpus
from qwen_nvfp4_serve.kernels import build
from qwen_nvfp4_serve.kernels.admission import (
    BF16,
    BF16_SPEC,
    EXPERTS,
    EXPERTS_LIMITS,
    EXPERTS_SPEC,
    Table,
    admit,
    store,
    summary,
)
from qwen_nvfp4_serve.kernels.admission.shapes import bf16_shapes, experts_shapes, linear_shapes
from qwen_nvfp4_serve.kernels.admission.table import to_json
from qwen_nvfp4_serve.preflight import read_config
from qwen_nvfp4_serve.serve import cache_dir
from qwen_nvfp4_serve.settings import load_settings


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("kernels")(kernels)


def kernels(
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="Folder with a config.json: admit kernels for this model now, on the first card."),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Cards that the model is split over.")] = 1,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the kernel tables kept in the cache, and whether each holds for the card and software of this machine.

    A table is made when a server starts with NVFP4_BACKEND=hybrid, or here with --config.
    """
    cards, directory = detect_gpus(), cache_dir(load_settings(Path(".env")).settings) / store.FOLDER
    if config is not None:
        dims = dims_from_config(read_config(config, "Name a model's folder with --config."))
        if not cards:
            raise UnsupportedHostError(
                "no NVIDIA card to admit kernels on", do="Run this on the machine with the card."
            )
        admit(linear_shapes(dims, tensor_parallel), card=cards[0], directory=directory)
        sixteen = bf16_shapes(dims, tensor_parallel)
        admit(sixteen, card=cards[0], directory=directory, names=BF16, spec=BF16_SPEC)
        if shapes := experts_shapes(dims, tensor_parallel):
            spec, limits = EXPERTS_SPEC, EXPERTS_LIMITS
            admit(shapes, card=cards[0], directory=directory, names=EXPERTS, spec=spec, limits=limits)
    found = report(cards, store.kept(directory))
    if json_:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for library, path in found["libraries"].items():
        console.print(f"kernel library {library}: {path or 'not built (scripts/build-kernels)'}", markup=False)
    if not found["tables"]:
        console.print(f"no kernel table in {directory}: start with NVFP4_BACKEND=hybrid, or give --config")
    for table in found["tables"]:
        facts = table["facts"]
        holds = "holds here" if table["holds"] else "made under other conditions"
        software = f"driver {facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}"
        console.print(f"\n{facts['card']}, {software}: {holds}", markup=False)
        for line in table["summary"]:
            console.print(f"  {line}", markup=False)


def report(cards: tuple[Gpu, ...], tables: tuple[Table, ...]) -> dict[str, Any]:
    """The built libraries, and the tables with what each says and whether it would be used on one of `cards`."""
    found = {library.name: build.find(library) for library in build.LIBRARIES}
    here = [store.facts(card) for card in cards]
    return {
        "libraries": {name: str(path) if path else None for name, path in found.items()},
        "tables": [
            {
                **to_json(table),
                "final": table.final,
                "holds": table.final and any(facts.items() <= table.facts.items() for facts in here),
                "summary": summary(table),
            }
            for table in tables
        ],
    }
