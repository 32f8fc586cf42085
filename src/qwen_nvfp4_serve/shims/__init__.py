"""The folder that CPU runs put first on PYTHONPATH, so that vLLM's CPU build starts from the package index alone."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

SHIM_FOLDER = Path(__file__).resolve().parent


def python_path(inherited: str | None) -> str:
    """PYTHONPATH with the shim folder first, then `inherited`, without repeats."""
    parts = [str(SHIM_FOLDER), *(inherited or "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(part for part in parts if part))


def install() -> None:
    """Gives this process what the folder on PYTHONPATH would have given it from the start. A second call does nothing.

    Only before vLLM and torchvision are imported; for servers, use `python_path`, which reaches their children too.
    """
    if any(type(finder).__name__ == "CpuBuildAnswersForVllm" for finder in sys.meta_path):
        return
    spec = importlib.util.spec_from_file_location("sitecustomize", SHIM_FOLDER / "sitecustomize.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{SHIM_FOLDER} holds no sitecustomize.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
