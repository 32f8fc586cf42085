"""What is compiled, for which cards, with which flags. Building needs nvcc; loading needs only the built file.

A library's name carries the hash of everything that decides its contents, so a stale file is never loaded.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UnsupportedHostError, UsageError

HERE = Path(__file__).parent
PREBUILT = HERE / "prebuilt"
USER_CACHE = Path.home() / ".cache" / "qwen_nvfp4_serve" / "kernels"
CARDS = ("80", "86", "89", "90a", "120a", "121a")
FLAGS = ("-O3", "-std=c++17", "-cudart=static", "--compiler-options=-fPIC")


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """One shared library: its name and its sources, the first of which is compiled and includes the rest.

    headers: what it shares with another library, looked for in these files' folders.
    """

    name: str
    folder: Path
    sources: tuple[str, ...]
    headers: tuple[Path, ...] = ()

    def digest(self) -> str:
        """Twelve hex digits over sources, headers and flags."""
        content = hashlib.sha256(repr((self.name, FLAGS)).encode())
        for path in (*(self.folder / source for source in self.sources), *self.headers):
            content.update(path.read_bytes())
        return content.hexdigest()[:12]

    def include_flags(self) -> list[str]:
        """Where the compiler finds the headers."""
        return [f"-I{folder}" for folder in dict.fromkeys(path.parent for path in self.headers)]

    def file_name(self, cards: Sequence[str] = CARDS) -> str:
        """`<name>-<digest>-<cards>.so`, `all` for all of them."""
        suffix = "all" if set(cards) == set(CARDS) else "-".join(cards)
        return f"{self.name}-{self.digest()}-{suffix}.so"


LINEAR_SOURCES = HERE / "nvfp4_linear" / "csrc"
LINEAR_KERNELS = ("warp_kernel.cuh", "warpgroup_kernel.cuh", "row_blocks.cuh")
NVFP4_LINEAR = KernelLibrary(
    "nvfp4_linear",
    LINEAR_SOURCES,
    ("linear.cu", "linear.h", *LINEAR_KERNELS, "layout.cuh", "device.cuh", "warpgroup.cuh"),
)
NVFP4_MOE = KernelLibrary(
    "nvfp4_moe",
    HERE / "nvfp4_moe" / "csrc",
    ("moe.cu", "moe.h", "plan.cuh", "octet.cuh", "experts.cuh", "route.cuh"),
    (LINEAR_SOURCES / "layout.cuh", LINEAR_SOURCES / "device.cuh"),
)
BF16_LINEAR = KernelLibrary(
    "bf16_linear",
    HERE / "bf16_linear" / "csrc",
    ("bf16_linear.cu", "bf16_linear.h"),
    (LINEAR_SOURCES / "layout.cuh", LINEAR_SOURCES / "device.cuh"),
)
GDN_DECODE = KernelLibrary(
    "gdn_decode",
    HERE / "gdn_decode" / "csrc",
    ("gdn_decode.cu", "gdn_decode.h"),
    (LINEAR_SOURCES / "layout.cuh", LINEAR_SOURCES / "device.cuh"),
)
READ_STREAM = KernelLibrary("read_stream", LINEAR_SOURCES, ("read_stream.cu",))
LIBRARIES = (NVFP4_LINEAR, NVFP4_MOE, BF16_LINEAR, GDN_DECODE)


def compile_command(library: KernelLibrary, nvcc: str, target: Path, cards: Sequence[str] = CARDS) -> list[str]:
    """The nvcc call that writes `target` with machine code for each of `cards`."""
    unknown = [card for card in cards if card not in CARDS]
    if unknown or not cards:
        raise UsageError("cards to compile for", seen=", ".join(unknown) or "none", expected=", ".join(CARDS))
    codes = [f"-gencode=arch=compute_{card},code=sm_{card}" for card in cards]
    source = str(library.folder / library.sources[0])
    cards_at_once = "--threads=0"  # as many as there are processors; changes nothing in the file
    return [nvcc, *FLAGS, cards_at_once, *library.include_flags(), "-shared", *codes, source, "-o", str(target)]


def build(
    library: KernelLibrary,
    directory: Path = USER_CACHE,
    *,
    cards: Sequence[str] = CARDS,
    nvcc: str | None = None,
    timeout_s: float = 600,
) -> Path:
    """The built file in `directory`, compiled unless it is there already. Safe to run twice at once.

    Raises UnsupportedHostError without nvcc and QwenNvfp4Error, with the compiler's last lines, if it fails.
    """
    target = directory / library.file_name(cards)
    if target.exists():
        return target
    compiler = nvcc or shutil.which("nvcc")
    if compiler is None:
        raise UnsupportedHostError(
            "nvcc", seen="not on PATH", do="Install the CUDA 13 toolkit or use the prebuilt image."
        )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        fresh = Path(scratch) / target.name
        command = compile_command(library, compiler, fresh, cards)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise QwenNvfp4Error(f"compiling {library.name}", output="\n".join(done.stderr.splitlines()[-20:]))
        os.replace(fresh, target)
    return target


def find(library: KernelLibrary, directories: Iterable[Path] = (PREBUILT, USER_CACHE)) -> Path | None:
    """A built file whose digest matches the sources, or None; one for all cards before one for some."""
    built = [path for d in directories for path in sorted(d.glob(f"{library.name}-{library.digest()}-*.so"))]
    return min(built, key=lambda path: path.name != library.file_name(), default=None)


def load(library: KernelLibrary, path: Path | None = None) -> ctypes.CDLL:
    """The library, from `path` or from where `find` sees it. Raises UnsupportedHostError if it was never built."""
    found = path or find(library)
    if found is None:
        raise UnsupportedHostError(
            f"kernel library {library.name}",
            seen="not built",
            expected=library.file_name(),
            do="Run scripts/build-kernels.",
        )
    return ctypes.CDLL(str(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds every library, prints where each lies. Exit code as the errors define it."""
    parser = argparse.ArgumentParser(prog="build-kernels", description="Compile the CUDA kernels.")
    parser.add_argument("directory", nargs="?", type=Path, default=USER_CACHE, help="where the libraries go")
    parser.add_argument("--cards", nargs="+", default=list(CARDS), choices=CARDS, help="machine code for these cards")
    chosen = parser.parse_args(arguments)
    try:
        for library in LIBRARIES:
            print(build(library, chosen.directory, cards=chosen.cards))
    except QwenNvfp4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
