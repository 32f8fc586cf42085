"""Is there memory and disk for a model on this machine? Estimates, which warn and stop nothing; a card is planned."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from qwen_nvfp4_serve.models import ModelRow, Precision
from qwen_nvfp4_serve.planner import PlanModel
from qwen_nvfp4_serve.planner.weights import weight_bytes
from qwen_nvfp4_serve.units import gib

# What a CPU computes in, whatever the checkpoint stores (docs/patches.md, "What the CPU numerics are").
ALL_BF16 = Precision(gdn="BF16", attention="BF16", ffn="BF16", shared_expert="BF16", lm_head="BF16")


def free_memory_bytes() -> int:
    """What this machine could still give to a process."""
    return int(psutil.virtual_memory().available)


def free_disk_bytes(folder: Path) -> int:
    """Of the disk that `folder` is on, or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def memory_warning(model: PlanModel, pool_bytes: int) -> str | None:
    """Why a run on this machine's CPU will not fit into its memory; None if it does."""
    weights = weight_bytes(model.dims, ALL_BF16)
    needed, free = weights.decoder + weights.embeddings + pool_bytes, free_memory_bytes()
    if needed <= free:
        return None
    return (
        f"WARNING: {model.name} on a CPU takes {gib(weights.decoder + weights.embeddings)} of weights in BF16 and "
        f"{gib(pool_bytes)} of cache, and this machine has {gib(free)} of memory free: the start will most likely be "
        "killed. Serve it on a card, or unset MODEL for the embedded one."
    )


def disk_warning(row: ModelRow, cache: Path) -> str | None:
    """Why the download will not fit onto the disk of the hub cache; None if it does, or some of it is there already."""
    if row.repo is None or row.dims is None or (cache / f"models--{row.repo.replace('/', '--')}").exists():
        return None
    needed = row.download_bytes or weight_bytes(row.dims, row.precision).total
    free = free_disk_bytes(cache)
    if needed <= free:
        return None
    return (
        f"WARNING: {row.name} is a download of {gib(needed)}, and the disk of {cache} has {gib(free)} free. Free some, "
        "or set HF_HOME to a folder on a larger disk."
    )
