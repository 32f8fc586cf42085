"""Where admission tables are kept, and what makes one valid: card, driver, versions, sources, shapes. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from importlib import metadata
from pathlib import Path

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.host import Gpu
from qwen_nvfp4_serve.kernels import build
from qwen_nvfp4_serve.kernels.admission.table import Shape, Table, from_json, to_json

FOLDER = "admission"  # in our cache
VARIABLE = "QWEN_NVFP4_CACHE_DIR"
PACKAGES = ("vllm", "torch", "triton", "flashinfer-python")
SOURCES = (
    *("admission", "bf16_linear", "nvfp4_linear", "nvfp4_moe"),
    *("cards.py", "graph_timing.py", "nvfp4.py", "ops.py", "triton_step.py"),
)


def folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`admission` in our cache: the folder that QWEN_NVFP4_CACHE_DIR names, else the user's cache folder."""
    named = environment.get(VARIABLE)
    home = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(named) if named else home / "qwen-nvfp4-serve") / FOLDER


def facts(card: Gpu) -> dict[str, str]:
    """What a table holds for: the card and its driver, the versions of what computes, and our own sources."""
    found = {
        "card": card.name,
        "capability": ".".join(map(str, card.capability or ())),
        "driver": card.driver or "unknown",
        "kernel": " ".join(library.digest() for library in build.LIBRARIES),
        "library": " ".join(_name(build.find(library)) for library in build.LIBRARIES),
        "sources": source_digest(),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _name(path: Path | None) -> str:
    return path.name if path else "not built"


def source_digest(*more: Path) -> str:
    """Twelve hex digits over the Python of the kernels and of their admission, and the files named."""
    content = hashlib.sha256()
    for path in more:
        content.update(path.read_bytes())
    for name in SOURCES:
        root = build.HERE / name
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            content.update(path.read_bytes())
    return content.hexdigest()[:12]


def path_of(directory: Path, valid_for: Mapping[str, str], shapes: Sequence[Shape]) -> Path:
    """The file of a table: its name is the key."""
    key = json.dumps([sorted(valid_for.items()), sorted(astuple(shape) for shape in shapes)])
    return directory / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read(path: Path) -> Table | None:
    """The table in a file; None where there is none or it cannot be read. A pipe is not waited for."""
    if _changed(path) is None:
        return None
    try:
        return from_json(json.loads(path.read_text()))
    except (OSError, ValueError, QwenNvfp4Error):
        return None


def write(path: Path, table: Table) -> None:
    """Replaces the file at once, so that a reader sees the old table or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(to_json(table)))
    os.replace(fresh, path)


def kept(directory: Path) -> tuple[Table, ...]:
    """Every table in the folder that can be read, oldest first."""
    found = directory.glob("*.json") if directory.is_dir() else ()
    dated = sorted((when, path) for path in found if (when := _changed(path)) is not None)
    return tuple(table for _, path in dated if (table := read(path)) is not None)


def _changed(path: Path) -> float | None:
    """When a regular file was changed last; None where there is none."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_mtime if stat.S_ISREG(seen.st_mode) else None


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time: the workers of several cards ask at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
