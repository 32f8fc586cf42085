"""Secrets from files: `VLLM_API_KEY_FILE` and `HF_TOKEN_FILE` name one each, as container images do by convention."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from qwen_nvfp4_serve.errors import UsageError

LONGEST_BYTES = 4096  # of a secret: headers are limited to twice that by most servers
SECRET_KNOBS = ("VLLM_API_KEY", "HF_TOKEN")


def read_secret_files(given: Mapping[str, str]) -> dict[str, str]:
    """Knob -> the secret in the file that `<knob>_FILE` of `given` names, for those that are named.

    Raises UsageError with the line to type when a file is missing, unreadable or empty, or the knob is set as well.
    """
    named = {knob: given[f"{knob}_FILE"] for knob in SECRET_KNOBS if given.get(f"{knob}_FILE")}
    for knob in named:
        if given.get(knob):
            raise UsageError(f"{knob} and {knob}_FILE are both set", do="Remove one of them.")
    return {knob: read_secret(knob, Path(path).expanduser()) for knob, path in named.items()}


def read_secret(knob: str, path: Path) -> str:
    """The one line in `path`."""
    what, wanted = f"{knob}_FILE", "a text file that holds the secret"
    inside = ". A container sees only the folder of docker-compose.yml: name a file there, as "
    hint = f"{inside}{what}=secrets/{path.name}." if path.is_absolute() else ""
    mkdir = "" if path.parent.is_dir() else f"mkdir -p {path.parent} && "
    write = f"Type: {mkdir}printf %s 'YOUR-SECRET' > {path}{hint}"
    try:
        if path.exists() and not path.is_file():
            raise UsageError(what, seen=f"{path}, which is no file", expected=wanted, do="Name a file.")
        with path.open("rb") as file:
            secret = file.read(LONGEST_BYTES + 1).decode().strip()
    except FileNotFoundError:
        raise UsageError(what, seen=f"no file {path}", expected=wanted, do=write) from None
    except PermissionError:
        raise UsageError(what, seen=f"{path}, which this user may not read", do=f"Type: {opened(path)}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(what, seen=f"{path} ({error})", expected=wanted, do=write) from None
    if not secret:
        raise UsageError(what, seen=f"{path}, which is empty", expected=wanted, do=write)
    if len(secret) > LONGEST_BYTES:
        raise UsageError(what, seen=f"{path}, longer than {LONGEST_BYTES} bytes", expected=wanted, do=write)
    return secret


def opened(path: Path) -> str:
    """The line that lets this user read `path`; about the first folder on the way that may not be entered, if any."""
    closed = next((folder for folder in reversed(path.parents) if not os.access(folder, os.X_OK)), None)
    return f"sudo chmod o+x {closed}" if closed is not None else f"sudo chown {os.getuid()} {path}"
