"""Secrets from files: `VLLM_API_KEY_FILE` and `HF_TOKEN_FILE` name one each, as container images do by convention."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from qwen_nvfp4_serve.errors import UsageError

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
    what = f"{knob}_FILE"
    write = f"printf %s 'YOUR-SECRET' > {path}"
    try:
        secret = path.read_text().strip()
    except FileNotFoundError:
        hint = (
            " In a container only files below the folder of docker-compose.yml are seen." if path.is_absolute() else ""
        )
        raise UsageError(
            what, seen=f"no file {path}", expected="a file that holds the secret", do=f"Type: {write}.{hint}"
        ) from None
    except PermissionError:
        raise UsageError(
            what, seen=f"{path}, which this user may not read", do=f"Type: sudo chown {os.getuid()} {path}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            what, seen=f"{path} ({error})", expected="a text file that holds the secret", do=f"Type: {write}"
        ) from None
    if not secret:
        raise UsageError(
            what, seen=f"{path}, which is empty", expected="a file that holds the secret", do=f"Type: {write}"
        )
    return secret
