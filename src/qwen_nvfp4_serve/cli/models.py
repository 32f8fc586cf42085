"""`qwen-nvfp4 models`: the names that MODEL accepts."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from qwen_nvfp4_serve.models import MODELS


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(models)


def models() -> None:
    """List the models in the catalogue."""
    table = Table("MODEL", "checkpoint", "format", "note")
    for row in MODELS:
        table.add_row(row.name, row.repo or "in this package", row.quantization, row.note)
    Console().print(table)
