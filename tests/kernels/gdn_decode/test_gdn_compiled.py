"""What the compiler made of the kernel for cards not at hand."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qwen_nvfp4_serve.kernels import build
from tests.kernels.nvfp4_linear import machine_code as sass

pytestmark = [pytest.mark.nvcc, pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")]
CARDS = ("90a", "120a", "121a")
THREADS = 160
PROCESSOR_REGISTERS = 65536
KERNELS = 6  # two types of states, three sizes of their slices


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[sass.Resources]]:
    """The library for all these cards, and each kernel's registers on each."""
    target = tmp_path_factory.mktemp("compiled") / "gdn.so"
    command = [*build.compile_command(build.GDN_DECODE, "nvcc", target, CARDS), "-Xptxas=-v"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return target, sass.resources(log)


def test_kernels_do_not_spill_and_fit_three_times(compiled: tuple[Path, list[sass.Resources]]) -> None:
    kernels = compiled[1]
    assert len(kernels) == KERNELS * len(CARDS)
    assert {kernel.name for kernel in kernels if kernel.spill_bytes} == set()
    # With 32 rows, 48 KiB of states are under way on each multiprocessor.
    assert max(kernel.registers for kernel in kernels) * THREADS * 3 <= PROCESSOR_REGISTERS


@pytest.mark.skipif(sass.disassembler() is None, reason="needs cuobjdump")
def test_states_move_16_bytes_at_a_time_and_before_the_wait(compiled: tuple[Path, list[sass.Resources]]) -> None:
    tool = sass.disassembler()
    assert tool is not None
    kernels = sass.functions(tool, compiled[0])
    assert len(kernels) == KERNELS * len(CARDS)
    for kernel in kernels:
        code = "\n".join(kernel.instructions)
        passes = int(re.findall(r"Li(\d+)E", kernel.name)[0]) // 16
        pieces = passes * (4 if "If" in kernel.name else 2)
        waits = [m.start() for m in re.finditer("ACQBULK", code)]
        states = [m.start() for m in re.finditer(r"LDG\.E\.128(?!\.CONSTANT)", code)]
        assert len(re.findall(r"STG\.E\.128", code)) == pieces
        assert len([at for at in states if at < max(waits)]) >= pieces
        assert "PREEXIT" in code, "lets the kernel after it start"
