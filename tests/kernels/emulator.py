"""Compiles a library's kernels for a CPU: `nvfp4_moe/emulated` stands in for CUDA's headers, thread by thread."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from qwen_nvfp4_serve.kernels.build import KernelLibrary

EMULATED = Path(__file__).parent / "nvfp4_moe" / "emulated"


def compiled(library: KernelLibrary, source: Path, folder: Path) -> ctypes.CDLL:
    """`source`, which includes the library's own, behind the same interface as for a card."""
    target = folder / f"{library.name}.so"
    folders = [f"-I{EMULATED}", f"-I{library.folder}", *library.include_flags()]
    command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", "-Wno-unknown-pragmas", *folders]
    subprocess.run([*command, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))
