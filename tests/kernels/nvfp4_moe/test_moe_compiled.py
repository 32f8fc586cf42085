"""What the compiler made of the mixture-of-experts kernels, for every card they are compiled for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.kernels.nvfp4_linear import machine_code as sass

from qwen_nvfp4_serve.kernels import build

pytestmark = [pytest.mark.nvcc, pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")]
# Programming guide, "Technical specifications per compute capability": the least of all cards named here.
PROCESSOR_REGISTERS = 65536
PROCESSOR_SHARED_BYTES = 100 * 1024
BLOCK_RESERVED_BYTES = 1024
# RTX 5090: 170 multiprocessors of 128 lanes at 2.41 GHz read 1.792 TB/s, 0.5625 bytes a weight (NVIDIA's data sheet).
LANE_SLOTS_PER_WEIGHT = 170 * 128 * 2.41e9 / (1.792e12 / 0.5625)
MAX_ISSUE_SHARE = 0.30
LANE_WEIGHTS_PER_MMA = 8  # 16 MMAs multiply a lane's 128 weights
# Threads of a CTA, CTAs that a multiprocessor is meant to hold, MMAs of one tile of tokens.
MEANT = {
    "gate_up_single_kernelILi4": (128, 5, 32),
    "gate_up_several_kernelILi4": (128, 5, 32),
    "gate_up_single_kernelILi8": (256, 2, 32),
    "gate_up_several_kernelILi8": (256, 2, 32),
    "down_kernelILb1": (288, 2, 16),
    "down_kernelILb0": (512, 1, 32),
}
BLOCKS_BEFORE_90 = {"gate_up_several_kernelILi4": 4}  # it takes more registers there
# Threads and CTAs. A CTA waits for the others: there has to be room for two (csrc/route.cuh).
ROUTERS = {"route_kernelILb1": (256, 3), "route_kernelILb0": (256, 2)}
# Most dynamic shared memory: 32 tokens of 16 experts (csrc/experts.cuh, DownMemory).
MOST_DYNAMIC_BYTES = {"down_kernelILb1": 1024, "down_kernelILb0": (5 * 512 + 32 + 544 * 16) * 4}


def shared_bytes(report: str) -> int:
    """Static shared memory in the compiler's report of one kernel."""
    found = re.search(r"(\d+) bytes smem", report)
    return int(found[1]) if found else 0


class Compiled:
    """The library's kernels for one card."""

    def __init__(self, card: str, folder: Path) -> None:
        self.card = card
        self.binary = folder / f"moe-{card}.so"
        command = [*build.compile_command(build.NVFP4_MOE, "nvcc", self.binary, (card,)), "-Xptxas=-v"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        self.kernels = sass.resources(log)
        self.shared_bytes = {part.split("'")[0]: shared_bytes(part) for part in log.split("entry function '")[1:]}

    def named(self, part: str) -> sass.Resources:
        """The one kernel whose mangled name has this part."""
        (kernel,) = (kernel for kernel in self.kernels if part in kernel.name)
        return kernel


@pytest.fixture(scope="module", params=build.CARDS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(request.param, tmp_path_factory.mktemp("compiled"))


def test_compiled_kernels_do_not_spill(compiled: Compiled) -> None:
    assert len(compiled.kernels) == len(MEANT) + len(ROUTERS) + 1  # and the election alone
    assert {kernel.name: kernel.spill_bytes for kernel in compiled.kernels if kernel.spill_bytes} == {}


def test_compiled_kernels_fit_as_often_as_they_are_meant_to(
    compiled: Compiled, record_property: pytest.RecordProperty
) -> None:
    for part, (threads, blocks, *_) in {**MEANT, **ROUTERS}.items():
        kernel = compiled.named(part)
        if int(compiled.card.rstrip("a")) < 90:
            blocks = BLOCKS_BEFORE_90.get(part, blocks)  # noqa: PLW2901
        shared = compiled.shared_bytes.get(kernel.name, 0) + MOST_DYNAMIC_BYTES.get(part, 0)
        record_property(part, f"{kernel.registers} registers, {shared} bytes shared")
        assert (kernel.registers + 7) // 8 * 8 * threads * blocks <= PROCESSOR_REGISTERS
        assert (shared + BLOCK_RESERVED_BYTES) * blocks <= PROCESSOR_SHARED_BYTES


@pytest.mark.skipif(sass.disassembler() is None, reason="needs cuobjdump")
def test_compiled_code_holds_the_instructions_meant(compiled: Compiled, record_property: pytest.RecordProperty) -> None:
    tool = sass.disassembler()
    assert tool is not None
    functions = {f.name: f for f in sass.functions(tool, compiled.binary)}
    assert set(functions) == {kernel.name for kernel in compiled.kernels}
    for part, (_, _, products) in MEANT.items():
        kernel = functions[compiled.named(part).name]
        text = "\n".join(kernel.instructions)
        assert "HMMA.16816.F32.BF16" in text
        assert re.search(r"LDG\.E\.\S*128\.CONSTANT", text), "weights are read 16 bytes at a time"
        assert "LDL" not in text
        assert "STL" not in text
        assert not re.search(r"^(RED|ATOM)", text, re.MULTILINE), "no atomics where results are made"
        span = sass.span_with(kernel.opcodes(), "HMMA", products)
        per_weight = len(span) / (products * LANE_WEIGHTS_PER_MMA)
        record_property(f"instructions per weight, {part}", round(per_weight, 2))
        assert per_weight / LANE_SLOTS_PER_WEIGHT <= MAX_ISSUE_SHARE
    for part in ROUTERS:
        text = "\n".join(functions[compiled.named(part).name].instructions)
        assert re.search(r"LDG\.E\.128\.STRONG\.GPU", text), "logits are read where other CTAs' are seen"
        assert re.search(r"STG\.E\.STRONG\.GPU", text), "and written there"
        assert not re.search(r"^(RED|ATOM|ATOMG|MEMBAR|CCTL)\b", text, re.MULTILINE), "no count, no fence"
    if compiled.binary.stem.split("-")[1].startswith(("9", "1")):
        for name, function in functions.items():
            text = "\n".join(function.instructions)
            assert "ACQBULK" in text, f"{name} waits for the kernel before it"
            assert "PREEXIT" in text, f"{name} lets the kernel after it start"
            first_wait, first_release = text.index("ACQBULK"), text.index("PREEXIT")
            assert first_wait < first_release, f"{name} releases before it has waited"
