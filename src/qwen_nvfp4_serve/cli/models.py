"""`qwen-nvfp4 models`: the names that MODEL accepts."""

from __future__ import annotations

import typer
from rich.console import Console

from qwen_nvfp4_serve.cli.listing import print_listing
from qwen_nvfp4_serve.models import MODELS


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(models)


def models() -> None:
    """List the models in the catalogue."""
    rows = [(row.name, row.repo or "in this package", row.quantization) for row in MODELS]
    print_listing(Console(highlight=False), ("MODEL", "checkpoint", "format"), rows, [row.note for row in MODELS])
