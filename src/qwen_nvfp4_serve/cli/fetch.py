"""`qwen-nvfp4 fetch`: download a checkpoint, so that a later start does not wait or fail for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qwen_nvfp4_serve.units import gib

if TYPE_CHECKING:
    from rich.console import Console

    from qwen_nvfp4_serve.fetch import Progress

LINE_EVERY_S = 10.0  # between lines when nobody watches a terminal


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(fetch)


def fetch(
    model: str | None = typer.Argument(None, help="Catalogue name or hub id. Unset: what serve would take here."),
    revision: str | None = typer.Option(None, help="Hub revision. Unset: REVISION, the catalogue's, or main."),
    env_file: Path | None = typer.Option(None, help="File with KEY=value lines instead of .env."),
) -> None:
    """Download a checkpoint into the hub cache; run it again after any interruption, it goes on where it stopped."""
    from rich.console import Console

    from qwen_nvfp4_serve.cli.defaults import default_model, settings_of
    from qwen_nvfp4_serve.errors import UsageError
    from qwen_nvfp4_serve.fetch import fetch as download
    from qwen_nvfp4_serve.host import hub_folder
    from qwen_nvfp4_serve.models import resolve_model

    settings = settings_of(env_file)
    ref = resolve_model(default_model(settings) if model is None else model)
    if ref.path is not None:
        what = f"{ref.path} is a folder on this disk: nothing to download"
        raise UsageError(what, do=f"To check it, type: qwen-nvfp4 inspect {ref.path}")
    if ref.repo is None:
        why = "" if model or settings.model else " is what serve takes here (no card), and"
        typer.echo(f"nothing to download: {ref.given}{why} comes with this package")
        return
    console = Console(highlight=False, soft_wrap=True)
    watched = console.is_terminal
    found = download(
        ref.repo,
        cache=hub_folder(settings.hf_home),
        revision=revision or settings.revision or ref.revision,
        token=settings.hf_token.get_secret_value() if settings.hf_token else None,
        offline=settings.hf_hub_offline,
        on_progress=lambda progress: _show(console, ref.repo or "", progress, watched=watched),
        interval_s=1.0 if watched else LINE_EVERY_S,
    )
    if found.notice:
        console.print(f"[yellow]! {found.notice}[/]")
    console.print(f"{ref.repo} at {found.commit[:12]} is complete: {gib(found.downloaded_bytes)} downloaded")
    typer.echo(str(found.folder))


def _show(console: Console, repo: str, progress: Progress, *, watched: bool) -> None:
    """One line, redrawn on a terminal."""
    left = "" if progress.eta_s is None else f", {_duration(progress.eta_s)} left"
    done, total = gib(progress.done_bytes), gib(progress.total_bytes)
    line = f"download {repo}: {done} of {total}, {progress.rate_bytes_per_s / 1e6:.0f} MB/s{left}"
    console.print(line.ljust(console.width - 1), end="\r" if watched else "\n")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
