"""What the compiler made of the BF16 kernel, for every card it is compiled for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.kernels.nvfp4_linear import machine_code as sass

from qwen_nvfp4_serve.kernels import build
from qwen_nvfp4_serve.kernels.bf16_linear import MAX_TOKENS, binding

pytestmark = [pytest.mark.nvcc, pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")]
# Programming guide, "Technical specifications per compute capability": the least of all cards named here.
PROCESSOR_REGISTERS, PROCESSOR_THREADS = 65536, 1536
PROCESSOR_SHARED_BYTES, BLOCK_RESERVED_BYTES = 100 * 1024, 1024


class Compiled:
    """The library's kernels for one card."""

    def __init__(self, card: str, folder: Path) -> None:
        self.binary = folder / f"bf16-{card}.so"
        command = [*build.compile_command(build.BF16_LINEAR, "nvcc", self.binary, (card,)), "-Xptxas=-v"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        self.kernels = sass.resources(log)
        self.shared_bytes = {
            part.split("'")[0]: int(re.search(r"(\d+) bytes smem", part)[1])  # type: ignore[index]
            for part in log.split("entry function '")[1:]
        }


@pytest.fixture(scope="module", params=build.CARDS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(request.param, tmp_path_factory.mktemp("compiled"))


def test_kernels_do_not_spill_and_fit_as_often_as_they_are_made_for(compiled: Compiled) -> None:
    table = binding.variants(build.load(build.BF16_LINEAR, compiled.binary))
    assert len(compiled.kernels) == len(table)
    for kernel in compiled.kernels:
        warps, blocks = (int(number) for number in re.findall(r"Li(\d+)E", kernel.name)[4:6])
        assert kernel.spill_bytes == 0, kernel.name
        assert kernel.registers * warps * 32 * blocks <= PROCESSOR_REGISTERS
        assert warps * 32 * blocks <= PROCESSOR_THREADS
        assert blocks * (compiled.shared_bytes[kernel.name] + BLOCK_RESERVED_BYTES) <= PROCESSOR_SHARED_BYTES


def test_variants_serve_every_number_of_tokens_and_column_count_that_supports_takes(compiled: Compiled) -> None:
    table = binding.variants(build.load(build.BF16_LINEAR, compiled.binary))
    assert max(row.tokens for row in table) == MAX_TOKENS
    assert all(128 % (row.loads * 32) == 0 for row in table)


@pytest.mark.skipif(sass.disassembler() is None, reason="needs cuobjdump")
def test_code_holds_the_instructions_meant(compiled: Compiled) -> None:
    tool = sass.disassembler()
    assert tool is not None
    for kernel in sass.functions(tool, compiled.binary):
        text = "\n".join(kernel.instructions)
        assert "HMMA.16816.F32.BF16" in text
        assert re.search(r"LDG\.E\.\S*128\.CONSTANT", text), "weights are read 16 bytes at a time"
        assert "LDL" not in text
        assert "STL" not in text
        if not compiled.binary.name.startswith("bf16-8"):
            assert "ACQBULK" in text, "waits for the kernel before it"
            assert "PREEXIT" in text, "lets the kernel after it start"
