"""Reads what the compiler and the disassembler say about a CUDA library."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel's machine code: mangled name, instructions without padding, in order, and their addresses."""

    name: str
    instructions: tuple[str, ...]
    addresses: tuple[int, ...]

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
        listed = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", part, flags=re.MULTILINE)
        code = [(int(address, 16), line) for address, line in listed if "NOP" not in line]
        addresses, instructions = zip(*code, strict=True)
        result.append(Function(part.split()[0], instructions, addresses))
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


def turn_with(function: Function, opcode: str) -> list[str]:
    """The opcodes of the shortest way from the first `opcode` back to itself: what a loop does when nothing ends."""
    opcodes = function.opcodes()
    first = opcodes.index(opcode)
    came_from = {first: first}
    reached = [first]
    for at in reached:
        for then in _successors(function, at):
            if then == first:
                way = [at]
                while way[-1] != first:
                    way.append(came_from[way[-1]])
                return [opcodes[i] for i in reversed(way)]
            if then not in came_from:
                came_from[then] = at
                reached.append(then)
    raise AssertionError(f"{function.name}: no loop around {opcode}")


def _successors(function: Function, at: int) -> list[int]:
    line = function.instructions[at]
    always = not re.match(r"@!?U?P\d", line) and not re.search(r"BRA(\.\S+)? !?U?P\d|BRA\.DIV", line)
    following = [] if always and re.match(r"(BRA|EXIT|RET)\b", line) else [at + 1]
    target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", line)
    if target:
        following.append(bisect_left(function.addresses, int(target[1], 16)))  # padding leads to what comes after it
    return [i for i in following if i < len(function.instructions)]
