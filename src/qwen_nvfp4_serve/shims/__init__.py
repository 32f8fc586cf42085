"""The folder that CPU runs put first on PYTHONPATH, so that vLLM's CPU build starts from the package index alone."""

from __future__ import annotations

import os
from pathlib import Path

SHIM_FOLDER = Path(__file__).resolve().parent


def python_path(inherited: str | None) -> str:
    """PYTHONPATH with the shim folder first, then `inherited`, without repeats."""
    parts = [str(SHIM_FOLDER), *(inherited or "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(part for part in parts if part))
