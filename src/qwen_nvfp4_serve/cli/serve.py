"""`qwen-nvfp4 serve`: run the server, or print what would be run."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from types import FrameType

import typer

from qwen_nvfp4_serve import serve as serving
from qwen_nvfp4_serve.launch import shown_command, shown_environment
from qwen_nvfp4_serve.settings import ENV_FILE, load_settings
from qwen_nvfp4_serve.stages import Report, Stage, reporter


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the exact command and environment, secrets masked, and exit."
    ),
    env_file: Path | None = typer.Option(
        None, "--env-file", readable=False, help="File with KEY=value lines instead of .env; the environment wins."
    ),
) -> None:
    """Serve the model that .env and the environment name on an OpenAI-compatible endpoint."""
    loaded = load_settings(env_file or ENV_FILE, required=env_file is not None)
    if dry_run:
        notices: list[str] = []
        prepared = serving.prepare(loaded, _collect(notices))
        for name, value in shown_environment(prepared.launch).items():
            typer.echo(f"{name}={shlex.quote(value)}")
        typer.echo(shown_command(prepared.launch))
        for notice in notices:
            typer.echo(f"# {notice}")
        return
    report = reporter(loaded.settings.log_format)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        report("preflight", f"checking settings, vLLM, plugin and port {loaded.settings.port}")
        code = serving.run(serving.prepare(loaded, report, ask_hub=True), report)
    except StopRequest:
        report("stopped", "before the server was started")
        code = 0
    raise typer.Exit(code)


class StopRequest(BaseException):
    """A signal asked for the end before the supervisor took over; what was being written is cleaned up."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise StopRequest


def _collect(notices: list[str]) -> Report:
    def report(stage: Stage, message: str) -> None:
        notices.append(f"{stage}: {message}")

    return report
