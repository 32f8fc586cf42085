"""`qwen-nvfp4 doctor`: can this host serve, and if not, what to do."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qwen_nvfp4_serve.cli.paths import path

if TYPE_CHECKING:
    from qwen_nvfp4_serve.doctor import Check, Diagnosis, Facts

EXIT_FAILED, EXIT_UNSUPPORTED = 1, 3


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    facts: Path | None = typer.Option(
        None, parser=path, help="Judge the facts of this JSON file instead of this host."
    ),
    env_file: Path | None = typer.Option(None, parser=path, help="File with KEY=value lines instead of .env."),
) -> None:
    """Check driver, card, memory, containers, disk, access, versions and settings.

    Exit code 0: all well, 1: a check failed, 2: wrong use, 3: this host cannot run what was asked.
    """
    from qwen_nvfp4_serve.doctor import diagnose

    diagnosis = diagnose(_read(facts) if facts is not None else _gather(env_file))
    if as_json:
        typer.echo(json.dumps(_as_json(diagnosis), indent=2))
    else:
        _show(diagnosis)
    raise typer.Exit(EXIT_UNSUPPORTED if diagnosis.unsupported else 0 if diagnosis.ok else EXIT_FAILED)


def _read(path: Path) -> Facts:
    from qwen_nvfp4_serve.checkpoint.source import read_json_file
    from qwen_nvfp4_serve.doctor import facts_from
    from qwen_nvfp4_serve.errors import UsageError

    given = read_json_file(path)
    if given is None:
        raise UsageError(f"facts file {path}", seen="nothing there", expected="a JSON object")
    return facts_from(given)


def _gather(named: Path | None) -> Facts:
    from qwen_nvfp4_serve.doctor.probes import gather
    from qwen_nvfp4_serve.errors import UsageError
    from qwen_nvfp4_serve.host import hub_folder
    from qwen_nvfp4_serve.models import MODEL_NAMES
    from qwen_nvfp4_serve.settings import ENV_FILE, Settings, load_settings

    env_file = named or ENV_FILE
    if named is not None and not named.exists():
        raise UsageError(f"{named} is not there", do="Name a file with KEY=value lines.")
    if named is not None and named.is_dir():
        raise UsageError(f"--env-file {named}", seen="a folder", expected="a file with KEY=value lines")
    text, fault = None, None
    with suppress(OSError):
        text = env_file.read_bytes().decode(errors="replace") if env_file.is_file() else None
    try:
        settings = load_settings(env_file).settings
    except UsageError as error:
        settings, fault = Settings(), error.sentence()  # the rest is judged with the defaults
    home = Path(settings.hf_home).expanduser() if settings.hf_home else Path.home() / ".cache" / "huggingface"
    return gather(
        env_text=text,
        env_fault=fault,
        model=settings.model,
        tensor_parallel=settings.tensor_parallel,
        device=settings.device,
        port=settings.port,
        served_names={settings.served_model_name or "", *MODEL_NAMES},
        api_key=settings.vllm_api_key.get_secret_value() if settings.vllm_api_key else None,
        cache=hub_folder(settings.hf_home),
        token=settings.hf_token.get_secret_value() if settings.hf_token else _saved_token(home),
        offline=settings.hf_hub_offline,
        environ=os.environ,
    )


def _saved_token(home: Path) -> str | None:
    """The token that `hf auth login` left, which the download will use."""
    with suppress(OSError, ValueError):
        return (home / "token").read_text().strip() or None
    return None


def _as_json(diagnosis: Diagnosis) -> dict[str, object]:
    return {"ok": diagnosis.ok, "checks": [_check_json(check) for check in diagnosis.checks]}


def _check_json(check: Check) -> dict[str, object]:
    return {entry.name: getattr(check, entry.name) for entry in fields(check) if entry.name != "unsupported"}


def _show(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    for check in diagnosis.checks:
        mark = "[green]ok   [/]" if check.ok else "[red]ERROR[/]"
        console.print(f"{mark} {check.id:18} {escape(check.says)}")
    wrong = sum(not check.ok for check in diagnosis.checks)
    console.print(
        f"{len(diagnosis.checks)} checks, {wrong} failed" if wrong else f"{len(diagnosis.checks)} checks, all well"
    )
