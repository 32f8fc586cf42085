"""`qwen-nvfp4 smoke`: ask a running server what it must answer and what it must refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from qwen_nvfp4_serve.settings import ENV_FILE, load_settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(smoke)


def smoke(
    base_url: str = typer.Option("", "--base-url", help="Endpoint to ask; by default the one that the settings serve."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    env_file: Path | None = typer.Option(
        None, "--env-file", readable=False, help="Settings of the server instead of .env; its key is used."
    ),
) -> None:
    """Check a running server: right requests answered, wrong ones refused. Exit code 1 if anything fails."""
    from qwen_nvfp4_serve.smoke import connect, run_checks

    settings = load_settings(env_file or ENV_FILE, required=env_file is not None).settings
    key = settings.vllm_api_key.get_secret_value() if settings.vllm_api_key else None
    server = connect(base_url or f"http://127.0.0.1:{settings.port}/v1", key)
    checks = run_checks(server)
    ok = all(check.ok for check in checks)
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        typer.echo(json.dumps({"ok": ok, "base_url": server.base_url, "model": server.model, "checks": rows}, indent=1))
    else:
        table = Table(title=f"{server.model} at {server.base_url}")
        for column in ("check", "", "seen", "seconds"):
            table.add_column(column, overflow="fold")
        for check in checks:
            table.add_row(
                check.name, "ok" if check.ok else "[red]FAIL[/]", check.seen.replace("[", "\\["), f"{check.seconds:.2f}"
            )
        Console().print(table)
    raise typer.Exit(0 if ok else 1)
