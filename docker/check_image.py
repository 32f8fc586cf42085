"""What a finished image must hold, asked at build: `check_image.py cpu|gpu`. Exit 1 with a line for each fault.

vLLM inside its window, our plugin found exactly once, vLLM importable, the embedded model there, nothing of root's
among the caches; for `gpu` also our kernels loadable and FlashInfer usable without a download. No check needs a card.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from qwen_nvfp4_serve import preflight
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.launch import SHIMS

Target = Literal["cpu", "gpu"]
CACHE, USER = Path("/cache"), 1000


def vllm_version(target: Target) -> str:
    """Inside the window of this target."""
    return preflight.check_version("cuda" if target == "gpu" else "cpu")


def plugin(_target: Target) -> str:
    """Installed once, so that no patch is applied twice."""
    preflight.check_plugin()
    return "found once"


def vllm_imports(target: Target) -> str:
    """The command line of vLLM starts, with the shims that a CPU run gets."""
    environment = dict(os.environ)
    if target == "cpu":
        environment["PYTHONPATH"] = str(SHIMS)
    command = [sys.executable, "-c", "import vllm.entrypoints.cli.main, vllm; print(vllm.__version__)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise QwenNvfp4Error("importing vLLM", seen=done.stderr.strip().splitlines()[-1])
    return done.stdout.strip().splitlines()[-1]


def reference(_target: Target) -> str:
    """The embedded model is in the package, with what it is known to answer."""
    from qwen_nvfp4_serve.checkpoint import inspect_folder, require_servable
    from qwen_nvfp4_serve.reference import EMBEDDED, read_answers

    require_servable(inspect_folder(EMBEDDED))
    return f"{len(read_answers(EMBEDDED))} known answers"


def kernels(target: Target) -> str:
    """Every library is built in and loads; its CUDA runtime is linked statically, so no driver is needed for that."""
    if target == "cpu":
        return "none on a CPU"
    from qwen_nvfp4_serve.kernels.build import LIBRARIES, PREBUILT, find, load

    for library in LIBRARIES:
        load(library, find(library, (PREBUILT,)))
    return ", ".join(library.name for library in LIBRARIES)


def flashinfer(target: Target) -> str:
    """Importable, with its prebuilt kernels where they could be had; else they are compiled at the first start."""
    if target == "cpu":
        return "none on a CPU"
    done = subprocess.run([sys.executable, "-c", "import flashinfer"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise QwenNvfp4Error("importing FlashInfer", seen=done.stderr.strip().splitlines()[-1])
    found = [name for name in ("flashinfer_cubin", "flashinfer_jit_cache") if importlib.util.find_spec(name)]
    return f"with {' and '.join(found)}" if found else "WARNING: no prebuilt kernels, the first start compiles them"


def caches(_target: Target) -> str:
    """A fresh volume starts as a copy of this folder, so nothing in it may be root's. Asked last."""
    foreign = [str(path) for path in (CACHE, *CACHE.rglob("*")) if path.lstat().st_uid != USER]
    if foreign:
        raise QwenNvfp4Error(str(CACHE), seen=f"of another user: {', '.join(foreign[:3])}", expected=f"owner {USER}")
    return f"owner {USER}"


CHECKS: tuple[Callable[[Target], str], ...] = (
    vllm_version,
    plugin,
    vllm_imports,
    reference,
    kernels,
    flashinfer,
    caches,
)


def main(target: Target) -> int:
    """Run every check; 1 if any failed."""
    failed = 0
    for check in CHECKS:
        try:
            print(f"{check.__name__}: {check(target)}")
        except (QwenNvfp4Error, OSError) as error:
            print(f"{check.__name__}: FAILED: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main("gpu" if sys.argv[1:] == ["gpu"] else "cpu"))
