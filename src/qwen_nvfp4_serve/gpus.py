"""The cards people serve on, as a table; a card that is not here works from the figures its driver reports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One card. Bytes and bytes per second are decimal integers; `capability` is CUDA's (major, minor).

    memory_bytes: what nvidia-smi lists. usable_bytes: what a CUDA process sees on an idle card (torch's total).
    bandwidth_bytes_per_s: the vendor's figure. unified_memory: the host's memory is the card's.
    pattern: regular expression that the driver's name for the card matches, case ignored.
    """

    name: str
    title: str
    pattern: str
    capability: tuple[int, int]
    nvcc_arch: str
    memory_bytes: int
    usable_bytes: int
    bandwidth_bytes_per_s: int
    l2_bytes: int
    sm_count: int
    unified_memory: bool = False

    @property
    def native_fp4(self) -> bool:
        """True when the tensor cores multiply FP4 (compute capability 10 and later)."""
        return self.capability >= (10, 0)


# Sources: NVIDIA's product and architecture papers for bandwidth, L2 and SM count; nvidia-smi's total for memory;
# usable is the "total capacity" that PyTorch prints for the card in public out-of-memory reports (RTX 5090: 31.36 GiB).
GPUS: tuple[GpuRow, ...] = (
    GpuRow(
        name="rtx-5090",
        title="GeForce RTX 5090",
        pattern=r"\bRTX\s*5090\b(?!.*laptop)",
        capability=(12, 0),
        nvcc_arch="sm_120a",
        memory_bytes=32607 * MIB,
        usable_bytes=round(31.36 * GIB),
        bandwidth_bytes_per_s=1_792 * 10**9,
        l2_bytes=96 * MIB,
        sm_count=170,
    ),
    GpuRow(
        name="rtx-5080",
        title="GeForce RTX 5080",
        pattern=r"\bRTX\s*5080\b(?!.*laptop)",
        capability=(12, 0),
        nvcc_arch="sm_120a",
        memory_bytes=16303 * MIB,
        usable_bytes=round(15.47 * GIB),
        bandwidth_bytes_per_s=960 * 10**9,
        l2_bytes=64 * MIB,
        sm_count=84,
    ),
    GpuRow(
        name="rtx-5070-ti",
        title="GeForce RTX 5070 Ti",
        pattern=r"\bRTX\s*5070\s*Ti\b(?!.*laptop)",
        capability=(12, 0),
        nvcc_arch="sm_120a",
        memory_bytes=16303 * MIB,
        usable_bytes=round(15.47 * GIB),
        bandwidth_bytes_per_s=896 * 10**9,
        l2_bytes=48 * MIB,
        sm_count=70,
    ),
    GpuRow(
        name="rtx-pro-6000",
        title="RTX PRO 6000 Blackwell",
        pattern=r"\bRTX\s*PRO\s*6000\b",
        capability=(12, 0),
        nvcc_arch="sm_120a",
        memory_bytes=97887 * MIB,
        usable_bytes=round(94.97 * GIB),
        bandwidth_bytes_per_s=1_792 * 10**9,
        l2_bytes=128 * MIB,
        sm_count=188,
    ),
    GpuRow(
        name="gb10",
        title="GB10 (DGX Spark)",
        pattern=r"\bGB10\b",
        capability=(12, 1),
        nvcc_arch="sm_121a",
        memory_bytes=round(121.69 * GIB),
        usable_bytes=round(102 * GIB),  # what CUDA reports free on an idle DGX Spark, drivers 580 and 610
        bandwidth_bytes_per_s=273 * 10**9,
        l2_bytes=24 * MIB,
        sm_count=48,
        unified_memory=True,
    ),
    GpuRow(
        name="rtx-4090",
        title="GeForce RTX 4090",
        pattern=r"\bRTX\s*4090\b(?!.*laptop)",
        capability=(8, 9),
        nvcc_arch="sm_89",
        memory_bytes=24564 * MIB,
        usable_bytes=round(23.64 * GIB),
        bandwidth_bytes_per_s=1_008 * 10**9,
        l2_bytes=72 * MIB,
        sm_count=128,
    ),
    GpuRow(
        name="rtx-3090",
        title="GeForce RTX 3090",
        pattern=r"\bRTX\s*3090\b(?!\s*Ti)",
        capability=(8, 6),
        nvcc_arch="sm_86",
        memory_bytes=24576 * MIB,
        usable_bytes=round(23.69 * GIB),
        bandwidth_bytes_per_s=936 * 10**9,
        l2_bytes=6 * MIB,
        sm_count=82,
    ),
    GpuRow(
        name="rtx-4060",
        title="GeForce RTX 4060",
        pattern=r"\bRTX\s*4060\b(?!\s*Ti)(?!.*laptop)",
        capability=(8, 9),
        nvcc_arch="sm_89",
        memory_bytes=8188 * MIB,
        usable_bytes=round(7.62 * GIB),
        bandwidth_bytes_per_s=272 * 10**9,
        l2_bytes=24 * MIB,
        sm_count=24,
    ),
    GpuRow(
        name="h200",
        title="H200",
        pattern=r"\bH200\b",
        capability=(9, 0),
        nvcc_arch="sm_90a",
        memory_bytes=143771 * MIB,
        usable_bytes=round(139.81 * GIB),
        bandwidth_bytes_per_s=4_800 * 10**9,
        l2_bytes=50 * MIB,
        sm_count=132,
    ),
    GpuRow(
        name="b200",
        title="B200",
        pattern=r"\bB200\b",
        capability=(10, 0),
        nvcc_arch="sm_100a",
        memory_bytes=183359 * MIB,
        usable_bytes=round(178.35 * GIB),
        bandwidth_bytes_per_s=8_000 * 10**9,
        l2_bytes=126 * MIB,
        sm_count=148,
    ),
)

GPU_NAMES: tuple[str, ...] = tuple(row.name for row in GPUS)


def match_gpu(driver_name: str) -> GpuRow | None:
    """The row for the name a driver reports (`NVIDIA GeForce RTX 5090`), or None when the table has no such card."""
    return next((row for row in GPUS if re.search(row.pattern, driver_name, re.IGNORECASE)), None)


def find_gpu(name: str) -> GpuRow:
    """The row for a table name (`rtx-5090`) or a driver's name; raises UsageError naming the table's cards."""
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower())
    row = next((row for row in GPUS if row.name == wanted), None) or match_gpu(name)
    if row is not None:
        return row
    near = get_close_matches(wanted, GPU_NAMES, n=1)
    hint = f"Did you mean {near[0]}?" if near else "Choose one of them."
    raise UsageError("unknown card", seen=repr(name), expected=", ".join(GPU_NAMES), do=hint)
