"""Who computes NVFP4 layers on a card, as the launcher was told."""

from __future__ import annotations

import os

from qwen_nvfp4_serve.errors import UsageError

VARIABLE = "QWEN_NVFP4_BACKEND"
KNOWN = ("auto", "hybrid", "marlin", "flashinfer-cutlass", "flashinfer-b12x", "stock")


def nvfp4_backend() -> str:
    """The setting NVFP4_BACKEND of this process, `auto` when unset. Raises UsageError for an unknown value."""
    text = os.environ.get(VARIABLE) or "auto"
    if text not in KNOWN:
        raise UsageError(VARIABLE, seen=text, expected=", ".join(KNOWN))
    return text
