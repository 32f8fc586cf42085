"""`qwen-nvfp4 patches`: what our changes to the installed vLLM are, and whether this machine needs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from rich.console import Console

from qwen_nvfp4_serve.cli.listing import print_listing
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.shims import python_path

GROUP = "qwen_nvfp4.patch_checks"
DEADLINE_S = 120
COLUMNS = ("name", "platform", "window", "state")


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("patches")(patches)


def patches(json_: Annotated[bool, typer.Option("--json", help="Print all fields as JSON.")] = False) -> None:
    """List the patches, and whether each is needed and applied in a vLLM process on this machine."""
    reports = [patch_report(point.module) for point in entry_points(group=GROUP)]
    if json_:
        typer.echo(json.dumps(reports, indent=2))
        return
    console = Console(highlight=False)
    for report in reports:
        console.print(f"vLLM {report['vllm']}", style="bold")
        rows = [[str(row[column]) for column in COLUMNS] for row in report["patches"]]
        print_listing(console, COLUMNS, rows, [str(row["reason"]) for row in report["patches"]])


def patch_report(module: str) -> dict[str, Any]:
    """What `python -m module` prints, from a process of its own with the environment that a server would have.

    Raises QwenNvfp4Error with the process's last words if it fails, as it does where a needed patch does not fit.
    """
    environment = os.environ | {
        "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise QwenNvfp4Error(
            "asking vLLM for its patches", seen="no answer", expected=f"within {DEADLINE_S} s"
        ) from None
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise QwenNvfp4Error(f"asking vLLM for its patches failed: {words[-1]}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report
