"""`qwen-nvfp4 ready`: exit 0 if the server on this machine answers requests now, else 1. The image's health check."""

from __future__ import annotations

from pathlib import Path

import typer

from qwen_nvfp4_serve.settings import load_settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(ready)


def ready(
    env_file: Path = typer.Option(
        Path(".env"),
        "--env-file",
        readable=False,
        help="Settings of the server; its port is used. In a container: none.",
    ),
) -> None:
    """Ask the running server for one token. Exit code 0: it answered since its start and answers now; else 1."""
    from qwen_nvfp4_serve.container import in_container
    from qwen_nvfp4_serve.ready import check_ready, read_state, serving_key, state_path

    port = None if in_container() else load_settings(env_file).settings.port
    state = read_state(state_path(port))
    verdict = check_ready(state, serving_key(state))
    where = f"at {state.url}" if state else "in this container" if port is None else f"on port {port}"
    typer.echo(f"{'ready' if verdict.ready else 'not ready'} {where}: {verdict.reason}")
    raise typer.Exit(0 if verdict.ready else 1)
