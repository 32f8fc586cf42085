"""Result files: they appear whole or not at all, and what is read back is checked against its record."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from qwen_nvfp4_serve.errors import UsageError

Record = TypeVar("Record")

PAGE = "README.md"
# A line of every page that bench writes under that name: of a run, of a comparison, of engines.
PAGE_LINES = ("Measured on: **", "![comparison](compare.png)", "Options of vllm.LLM:")


def write_whole(path: Path, data: bytes) -> None:
    """Writes the whole file or nothing: it appears under its name only when it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_record(adapter: TypeAdapter[Record], file: Path, command: str) -> Record:
    """The record in a JSON file that `command` wrote. Raises UsageError saying what is wrong with it."""
    expected = f"a file that `{command}` wrote"
    try:
        return adapter.validate_json(file.read_bytes(), strict=True)
    except OSError as error:
        raise UsageError(f"result {file}", seen=error.strerror, expected=expected) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"result {file}", seen=f"{where}: {first['msg']}", expected=expected) from None


def check_page(folder: Path) -> None:
    """Raises UsageError where the page would replace a README.md that bench did not write, as a project's own."""
    page = folder / PAGE
    if page.is_file() and not any(line in page.read_text(errors="replace") for line in PAGE_LINES):
        seen, expected = f"a {PAGE} that bench did not write", "a folder without one"
        raise UsageError(f"--out {folder}", seen=seen, expected=expected, do="Name another folder.")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Makes the folder of `--out`, and turns a failure to write in it into a UsageError. A folder that it made and that
    nothing was written to is gone after a failure."""
    made: list[Path] = []
    try:
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        with suppress(OSError):  # one that is not empty, or was never made, and so those above it
            for one in made:
                one.rmdir()
        if not isinstance(error, OSError):
            raise
        raise UsageError(f"--out {folder}", seen=error.strerror, expected="a folder that can be written") from None
