"""`qwen-nvfp4 serve`: run the server, or print what would be run."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from qwen_nvfp4_serve import serve as serving
from qwen_nvfp4_serve.launch import shown_environment
from qwen_nvfp4_serve.settings import load_settings
from qwen_nvfp4_serve.stages import Report, Stage, reporter

ENV_FILE = Path(".env")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the exact command and environment, secrets masked, and exit."
    ),
    env_file: Path = typer.Option(
        ENV_FILE, "--env-file", readable=False, help="File with KEY=value lines; the environment wins over it."
    ),
) -> None:
    """Serve the model that .env and the environment name on an OpenAI-compatible endpoint."""
    loaded = load_settings(env_file)
    if dry_run:
        notices: list[str] = []
        prepared = serving.prepare(loaded, _collect(notices))
        for name, value in shown_environment(prepared.launch).items():
            typer.echo(f"{name}={shlex.quote(value)}")
        typer.echo(shlex.join(prepared.launch.argv))
        for notice in notices:
            typer.echo(f"# {notice}")
        return
    report = reporter(loaded.settings.log_format)
    report("preflight", "checking settings, vLLM, plugin and port")
    raise typer.Exit(serving.run(serving.prepare(loaded, report), report))


def _collect(notices: list[str]) -> Report:
    def report(stage: Stage, message: str) -> None:
        notices.append(f"{stage}: {message}")

    return report
