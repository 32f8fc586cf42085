"""Changes to vLLM, as a vLLM general plugin. Standard library only here: vLLM imports this in every process."""

from __future__ import annotations

_registered = False


def register() -> None:
    """Applies the patches that this process needs, once; a second call does nothing.

    Raises qwen_nvfp4_serve.errors.UnsupportedHostError, which ends the process, when a needed patch does not fit the
    vLLM that is installed.
    """
    global _registered
    if _registered:
        return
    from qwen_nvfp4_patches.registry import apply_all

    apply_all()
    _registered = True
