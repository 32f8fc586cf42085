"""What the compiler made of the kernels: for cards not at hand, sm_120a (RTX 5090, RTX PRO 6000), sm_121a (GB10); for
sm_90a, of its products of four warps."""

from __future__ import annotations

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
# The same of 9.0.
HOPPER_BLOCK_SHARED_BYTES = 227 * 1024
HOPPER_PROCESSOR_SHARED_BYTES = 228 * 1024
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
        kernels = sass.resources(self.log)
        self.kernels = [r for r in kernels if "linear_kernel" in r.name]
        self.by_warpgroups = [r for r in kernels if "warpgroup_kernel" in r.name]


@pytest.fixture(scope="module", params=["120a", "121a"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(request.param, tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled("90a", tmp_path_factory.mktemp("compiled"))


def template_arguments(name: str) -> tuple[int, ...]:
    """Parts, tiles, warps, staged steps, CTAs per multiprocessor; of products of four warps: tiles, warps, CTAs."""
    return tuple(int(v) for v in re.findall(r"Li(\d+)E", name.split("_kernelI")[1]))


def chosen(compiled: Compiled) -> list[binding.LinearVariant]:
    """The variants that such a card takes: those that fit it as often as they were made for."""
    table = binding.variants(build.load(build.NVFP4_LINEAR, compiled.binary))
    fitting = [v for v in table if (v.shared_bytes + 1024) * v.blocks <= PROCESSOR_SHARED_BYTES]
    return [v for v in fitting if v.capability == 0]


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
        parts, tiles = template_arguments(kernel.name)[:2]
        loop = sass.turn_with(kernel, "HMMA")
        steps, rest = divmod(loop.count("HMMA"), 16 * tiles)
        assert (steps, rest) == (2, 0), "two steps, with weights in alternating registers"
        per_weight = len(loop) / (steps * 128)
        record_property(f"instructions per weight, {8 * tiles // parts} tokens", round(per_weight, 2))
        assert per_weight <= MAX_INSTRUCTIONS_PER_WEIGHT
        assert per_weight / LANE_SLOTS_PER_WEIGHT <= MAX_ISSUE_SHARE


def by_warpgroups(hopper: Compiled) -> list[binding.LinearVariant]:
    """The variants that only a card of capability 9.0 runs."""
    return [v for v in binding.variants(build.load(build.NVFP4_LINEAR, hopper.binary)) if v.capability == 90]


def test_products_of_four_warps_neither_spill_nor_wait_for_each_other(hopper: Compiled) -> None:
    assert len(hopper.by_warpgroups) == len(by_warpgroups(hopper))
    assert {k.name: k.spill_bytes for k in hopper.by_warpgroups if k.spill_bytes} == {}
    assert "serialized" not in hopper.log  # the compiler's warning that products are not left to run on


def test_products_of_four_warps_fit_as_often_as_they_are_made_for(hopper: Compiled) -> None:
    for kernel in hopper.by_warpgroups:
        _, warps, blocks = template_arguments(kernel.name)
        assert kernel.registers * warps * 32 * blocks <= PROCESSOR_REGISTERS
    for v in by_warpgroups(hopper):
        assert v.shared_bytes <= HOPPER_BLOCK_SHARED_BYTES
        assert (v.shared_bytes + 1024) * v.blocks <= HOPPER_PROCESSOR_SHARED_BYTES


@pytest.mark.skipif(sass.disassembler() is None, reason="needs cuobjdump")
def test_products_of_four_warps_hold_the_instructions_meant(hopper: Compiled) -> None:
    tool = sass.disassembler()
    assert tool is not None
    kernels = [f for f in sass.functions(tool, hopper.binary) if "warpgroup_kernel" in f.name]
    assert len(kernels) == len(hopper.by_warpgroups)
    for kernel in kernels:
        text = "\n".join(kernel.instructions)
        tokens = 8 * template_arguments(kernel.name)[0]
        products = [line for line in kernel.instructions if "HGMMA" in line]
        assert len(products) == 16, "a step: 4 words, 2 halves of the rows, 2 passes"
        assert all(f"HGMMA.64x{tokens}x16.F32.BF16" in line for line in products)
        assert re.search(r"LDGSTS\.E\.\S*LTC128B\S*128", text), "weights go to shared memory by whole lines"
        assert "ACQBULK" in text, "waits for the kernel before it"
        assert "PREEXIT" in text, "lets the kernel after it start"
        assert "LDL" not in text
        assert "STL" not in text


def test_products_of_four_warps_are_empty_elsewhere(compiled: Compiled) -> None:
    assert compiled.by_warpgroups
    assert max(kernel.registers for kernel in compiled.by_warpgroups) <= 16
