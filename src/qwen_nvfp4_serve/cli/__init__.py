"""The `qwen-nvfp4` command. This package alone prints, parses arguments and exits; each command is one module."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import NoReturn

try:
    import typer

    from qwen_nvfp4_serve import __version__
    from qwen_nvfp4_serve.errors import QwenNvfp4Error
except KeyboardInterrupt:  # it takes long enough for Ctrl-C to come here
    sys.exit(130)

COMMANDS = (
    "serve",
    "ready",
    "smoke",
    "models",
    "plan",
    "inspect",
    "doctor",
    "fetch",
    "patches",
    "kernels",
    "bench",
    "quality",
    "make_checkpoint",
)
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130

app = typer.Typer(
    name="qwen-nvfp4",
    help="Serve Qwen3.5 in NVFP4 with vLLM on one Blackwell card, or a small model on a CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Options that come before the command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: runs one command and exits with its code; an error we know is one line on standard error."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _run() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows a question mark
    try:
        for name in _named(sys.argv[1:]):
            importlib.import_module(f"qwen_nvfp4_serve.cli.{name}").register(app)
        code = app(standalone_mode=False)
    except QwenNvfp4Error as error:
        _fail(error)
    except OSError as error:  # of standard output, mostly: a full disk
        place = f": {error.filename}" if error.filename else ""
        _fail(QwenNvfp4Error(f"{error.strerror or error}{place}"))
    except Exception as error:
        from qwen_nvfp4_serve.cli.wrong_use import WrongWords, wrong_use

        if not isinstance(error, WrongWords):
            raise
        _fail(wrong_use(error))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: QwenNvfp4Error) -> NoReturn:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {_escape(str(error))}")
    sys.exit(error.exit_code)


def _named(words: Sequence[str]) -> tuple[str, ...]:
    """The module of the command in `words`, else all: what `serve` imports would take longer than `plan` runs."""
    command = next((word.replace("-", "_") for word in words if not word.startswith("-")), None)
    return (command,) if command in COMMANDS else COMMANDS


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
