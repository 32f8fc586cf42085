"""What the compiler made of the kernel for cards not at hand: sm_120a (RTX 5090, RTX PRO 6000), sm_121a (GB10)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import machine_code as sass
import pytest

from qwen_nvfp4_serve.kernels import build
from qwen_nvfp4_serve.kernels.nvfp4_linear import binding

pytestmark = [pytest.mark.nvcc, pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")]
# Programming guide, "Technical specifications per compute capability": 12.x has 99 KB for a block, 100 KB in all.
BLOCK_SHARED_BYTES = 99 * 1024
PROCESSOR_SHARED_BYTES = 100 * 1024
PROCESSOR_REGISTERS = 65536
# RTX 5090: 170 multiprocessors of 128 lanes at 2.41 GHz read 1.792 TB/s, 0.5625 bytes a weight (NVIDIA's data sheet).
LANE_SLOTS_PER_WEIGHT = 170 * 128 * 2.41e9 / (1.792e12 / 0.5625)
MAX_INSTRUCTIONS_PER_WEIGHT = 4.0
MAX_ISSUE_SHARE = 0.30


class Compiled:
    """The library's kernels for one card."""

    def __init__(self, card: str, folder: Path) -> None:
        library = build.NVFP4_LINEAR
        self.binary = folder / f"linear-{card}.so"
        command = [*build.compile_command(library, "nvcc", self.binary, (card,)), "-Xptxas=-v"]
        self.log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        self.kernels = [r for r in sass.resources(self.log) if "linear_kernel" in r.name]


@pytest.fixture(scope="module", params=["120a", "121a"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(request.param, tmp_path_factory.mktemp("compiled"))


def template_arguments(name: str) -> tuple[int, ...]:
    """Parts, tiles, warps, staged steps, CTAs per multiprocessor."""
    return tuple(int(v) for v in re.findall(r"Li(\d+)E", name.split("linear_kernel")[1])[:5])


def chosen(compiled: Compiled) -> list[binding.LinearVariant]:
    """The variants that such a card takes: those that fit it as often as they were made for."""
    table = binding.variants(build.load(build.NVFP4_LINEAR, compiled.binary))
    return [v for v in table if v.shared_bytes * v.blocks + 1024 * v.blocks <= PROCESSOR_SHARED_BYTES]


def test_compiled_kernels_do_not_spill(compiled: Compiled) -> None:
    assert compiled.kernels
    assert {kernel.name: kernel.spill_bytes for kernel in compiled.kernels if kernel.spill_bytes} == {}


def test_compiled_kernels_fit_as_often_as_they_are_made_for(compiled: Compiled) -> None:
    for kernel in compiled.kernels:
        _, _, warps, _, blocks = template_arguments(kernel.name)
        assert kernel.registers * warps * 32 * blocks <= PROCESSOR_REGISTERS


def test_compiled_variants_serve_every_small_m_within_the_cards_shared_memory(compiled: Compiled) -> None:
    fitting = chosen(compiled)
    assert max(v.tokens for v in fitting) >= 64
    assert min(v.step_columns for v in fitting if v.tokens >= 64) == 128
    assert all(v.shared_bytes <= BLOCK_SHARED_BYTES for v in fitting)


@pytest.mark.skipif(sass.disassembler() is None, reason="needs cuobjdump")
def test_compiled_code_holds_the_instructions_meant(compiled: Compiled) -> None:
    tool = sass.disassembler()
    assert tool is not None
    kernels = [f for f in sass.functions(tool, compiled.binary) if "linear_kernel" in f.name]
    assert len(kernels) == len(compiled.kernels)
    for kernel in kernels:
        text = "\n".join(kernel.instructions)
        assert "HMMA.16816.F32.BF16" in text
        assert re.search(r"LDG\.E\.\S*128\S*", text), "weights are read 16 bytes at a time"
        assert "LDGSTS" in text, "activations go to shared memory without registers"
        assert "ACQBULK" in text, "waits for the kernel before it"
        assert "PREEXIT" in text, "lets the kernel after it start"
        assert "LDL" not in text
        assert "STL" not in text


@pytest.mark.skipif(sass.disassembler() is None, reason="needs cuobjdump")
def test_compiled_loop_leaves_the_card_bound_by_memory(
    compiled: Compiled, record_property: pytest.RecordProperty
) -> None:
    tool = sass.disassembler()
    assert tool is not None
    for kernel in sass.functions(tool, compiled.binary):
        if "linear_kernel" not in kernel.name:
            continue
        parts, tiles, _, steps, _ = template_arguments(kernel.name)
        loop = sass.span_with(kernel.opcodes(), "HMMA", steps * 16 * tiles)
        per_weight = len(loop) / (steps * 128)
        record_property(f"instructions per weight, {8 * tiles // parts} tokens", round(per_weight, 2))
        assert per_weight <= MAX_INSTRUCTIONS_PER_WEIGHT
        assert per_weight / LANE_SLOTS_PER_WEIGHT <= MAX_ISSUE_SHARE


def test_compiled_variants_are_those_that_were_measured(compiled: Compiled) -> None:
    result = json.loads((Path(__file__).parents[3] / "docs/results/linear-h200.json").read_text())
    table = binding.variants(build.load(build.NVFP4_LINEAR, compiled.binary))
    names = [field[0] for field in binding.LinearVariant._fields_]
    shipped = [{name: row[name] for name in names} for row in result["variants"] if row["shipped"]]
    assert [{name: getattr(row, name) for name in names} for row in table] == shipped
