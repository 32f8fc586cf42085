"""Reads what the compiler and the disassembler say about a CUDA library."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel's machine code: mangled name and instructions without padding, in order."""

    name: str
    instructions: tuple[str, ...]

    def opcodes(self) -> list[str]:
        """Opcodes without modifiers or predicates."""
        return [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].split(".")[0] for line in self.instructions]


def disassembler() -> str | None:
    """`cuobjdump`, from PATH or from a Python package that carries it, or None."""
    packaged = [Path(root, "nvidia/cu13/bin/cuobjdump") for root in sys.path]
    packaged += [Path(root, "triton/backends/nvidia/bin/cuobjdump") for root in sys.path]
    return shutil.which("cuobjdump") or next((str(path) for path in packaged if path.exists()), None)


def functions(tool: str, binary: Path) -> list[Function]:
    """The kernels in a cubin or shared library."""
    path = f"{Path(tool).parent}:/usr/bin:/bin"  # cuobjdump looks for nvdisasm on PATH
    listing = subprocess.run(
        [tool, "-sass", str(binary)], capture_output=True, text=True, check=True, env={"PATH": path}
    )
    result = []
    for part in listing.stdout.split("Function : ")[1:]:
        code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", part, flags=re.MULTILINE)
        result.append(Function(part.split()[0], tuple(line for line in code if "NOP" not in line)))
    return result


@dataclass(frozen=True, slots=True)
class Resources:
    """What `-Xptxas=-v` says of one kernel."""

    name: str
    registers: int
    spill_bytes: int


def resources(log: str) -> list[Resources]:
    """Every kernel in the compiler's report."""
    pattern = r"entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    return [Resources(n, int(r), int(a) + int(b)) for n, a, b, r in re.findall(pattern, log, flags=re.DOTALL)]


def span_with(opcodes: list[str], opcode: str, count: int) -> list[str]:
    """The shortest run of opcodes that holds `count` of `opcode`: the body of an unrolled loop."""
    places = [i for i, name in enumerate(opcodes) if name == opcode]
    starts = range(len(places) - count + 1)
    best = min(starts, key=lambda i: places[i + count - 1] - places[i])
    return opcodes[places[best] : places[best + count - 1] + 1]
