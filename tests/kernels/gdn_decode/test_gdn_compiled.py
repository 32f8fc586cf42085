"""What the compiler made of the kernel for every card that it is compiled for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.kernels.nvfp4_linear import machine_code as sass

from qwen_nvfp4_serve.kernels import build

pytestmark = [pytest.mark.nvcc, pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")]
THREADS = 160
PROCESSOR_REGISTERS = 65536
KERNELS = 6  # two types of states, three sizes of their slices


def compiled(target: Path, cards: Sequence[str]) -> list[sass.Resources]:
    """What each kernel takes on each card; the library lies in `target`."""
    command = [*build.compile_command(build.GDN_DECODE, "nvcc", target, cards), "-Xptxas=-v"]
    return sass.resources(subprocess.run(command, capture_output=True, text=True, check=True).stderr)


def test_kernels_do_not_spill_and_fit_three_times(tmp_path: Path) -> None:
    kernels = compiled(tmp_path / "gdn.so", build.CARDS)
    assert len(kernels) == KERNELS * len(build.CARDS)
    assert {kernel.name for kernel in kernels if kernel.spill_bytes} == set()
    # With 32 rows, 48 KiB of states are then under way on each multiprocessor.
    assert max(kernel.registers for kernel in kernels) * THREADS * 3 <= PROCESSOR_REGISTERS


@pytest.mark.skipif(sass.disassembler() is None, reason="needs cuobjdump")
def test_states_move_16_bytes_at_a_time_and_are_asked_for_before_the_wait(tmp_path: Path) -> None:
    tool = sass.disassembler()
    assert tool is not None
    compiled(tmp_path / "gdn.so", ["90a"])
    kernels = sass.functions(tool, tmp_path / "gdn.so")
    assert len(kernels) == KERNELS
    for kernel in kernels:
        code = "\n".join(kernel.instructions)
        passes = int(re.findall(r"Li(\d+)E", kernel.name)[0]) // 16
        pieces = passes * (4 if "kernelIf" in kernel.name else 2)
        before_barrier = code.split("BAR.SYNC")[0]
        assert len(re.findall(r"STG\.E\.128", code)) == pieces
        # Beside the weights of a pair of q's or k's channels, and of v's.
        assert len(re.findall(r"LDG\.E\.128", before_barrier)) == pieces + 2
        assert "ACQBULK" in code, "waits for the kernel before it"
        assert "PREEXIT" in code, "lets the kernel after it start"
