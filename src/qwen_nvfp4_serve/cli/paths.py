"""Files and folders on the command line."""

from __future__ import annotations

from pathlib import Path

import typer


def path(text: str | Path) -> Path:
    """The path that was named. An empty word, as an unset variable of a shell leaves it, is no name for this folder."""
    if not str(text).strip():
        raise typer.BadParameter("an empty path")
    return Path(text)
