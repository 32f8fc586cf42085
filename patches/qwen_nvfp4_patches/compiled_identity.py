"""What vLLM compiled is taken up again only under the patches, and the choice of kernels, that it was compiled with.

vLLM keeps compiled graphs by its own settings and the source files that were traced. Ours change what is traced and how
kernels are written, and a graph of other patches or another NVFP4_BACKEND would load: right, but without our kernels.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch
from qwen_nvfp4_serve import __version__

CHOICES = ("QWEN_NVFP4_BACKEND", "QWEN_NVFP4_PATCHES")
SOURCES = Path(__file__).parent
PARAMETERS: dict[str, tuple[str, ...]] = {
    "0.32": (),
    "0.33": ("use_aot_compile",),
}  # get_inductor_factors takes, by vLLM


@functools.cache
def identity() -> str:
    """A digest of this project's version, the patches' sources and the variables that choose among them."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for name in CHOICES:
        digest.update(f"\0{name}={os.environ.get(name) or ''}".encode())
    return digest.hexdigest()


def with_identity(stock: Any) -> Any:
    """A list of what compiled graphs depend on, with us in it."""

    @functools.wraps(stock)
    def factors(*arguments: Any, **named: Any) -> list[Any]:
        return [*stock(*arguments, **named), identity()]

    return factors


def _needed() -> Need:
    return Need(True, "vLLM keeps compiled graphs from one start to the next")


def _apply() -> None:
    from vllm.compilation import caching, compiler_interface
    from vllm.version import __version__ as vllm_version

    parameters = PARAMETERS.get(vllm_version.rpartition(".")[0], ())
    seams.replace_function(caching, "aot_compile_hash_factors", with_identity, ("vllm_config",))
    seams.replace_function(compiler_interface, "get_inductor_factors", with_identity, parameters)


PATCH = Patch(
    name="compiled-identity",
    platform=None,
    changes="aot_compile_hash_factors and get_inductor_factors name the patches' sources and NVFP4_BACKEND too",
    why="a graph compiled with other patches, or for another NVFP4_BACKEND, is taken up again without a word",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/compilation/caching.py",
    remove_when="vLLM asks its plugins what compiled graphs depend on",
    needed=_needed,
    apply=_apply,
)
