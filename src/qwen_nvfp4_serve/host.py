"""What this machine is: cards, container engine, compiler. Standard library only: it runs before any install."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROBE_TIMEOUT_S = 20.0  # nvidia-smi takes several seconds on a host whose driver is not persistent
GPU_FIELDS = "name,compute_cap,memory.total,memory.free,driver_version"
MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One visible card. `memory_bytes` and `free_bytes` are None where the driver does not say (unified memory)."""

    name: str
    capability: tuple[int, int] | None
    memory_bytes: int | None
    free_bytes: int | None
    driver: str | None


def detect_gpus(visible: str | None = None) -> tuple[Gpu, ...]:
    """The cards that nvidia-smi reports, in the order of `visible`; empty when there is none.

    visible: as CUDA_VISIBLE_DEVICES, indices with commas between; None for all, "" or "-1" for none. Cards named by
    UUID are not told apart: then all count.
    """
    if visible in ("", "-1"):
        return ()
    text = run_probe("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits")
    gpus = [gpu for line in (text or "").splitlines() if (gpu := _parse_gpu(line))]
    indices = [word.strip() for word in (visible or "").split(",")]
    if not all(_is_number(index) for index in indices):
        return tuple(gpus)
    return tuple(gpus[int(index)] for index in indices if int(index) < len(gpus))


def _parse_gpu(line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(GPU_FIELDS.split(",")):
        return None
    name, capability, total, free, driver = fields
    major, _, minor = capability.partition(".")
    return Gpu(
        name=name,
        capability=(int(major), int(minor)) if _is_number(major) and _is_number(minor) else None,
        memory_bytes=int(total) * MIB if _is_number(total) else None,
        free_bytes=int(free) * MIB if _is_number(free) else None,
        driver=driver or None,
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()  # int() refuses other digits, such as ²


def docker_runs_nvidia() -> bool:
    """True when a container engine answers, has the NVIDIA runtime, and the compose plugin is there."""
    text = run_probe("docker", "info", "--format", "{{json .Runtimes}}")
    try:
        runtimes = json.loads(text or "{}")
    except ValueError:
        return False
    return "nvidia" in (runtimes or {}) and run_probe("docker", "compose", "version") is not None


def has_cxx_compiler() -> bool:
    """True when torch's inductor would find a C++ compiler: $CXX, else g++ or clang++ on PATH."""
    named = os.environ.get("CXX")
    return any(shutil.which(name) for name in ([named] if named else ["g++", "clang++"]))


def hub_folder(hf_home: str | None) -> Path:
    """Where huggingface_hub, and so vLLM, looks for files: HF_HUB_CACHE, else `hub` in `hf_home` or its default."""
    home = Path(hf_home).expanduser() if hf_home else Path.home() / ".cache" / "huggingface"
    named = os.environ.get("HF_HUB_CACHE")
    return Path(named).expanduser() if named else home / "hub"


def claim_name(port: int) -> str:
    """The abstract Unix socket by which a start of ours holds `port`; /proc/net/unix shows it with an @ before."""
    return f"qwen-nvfp4-serve-{port}"


def run_probe(*argv: str) -> str | None:
    """Standard output of a command that exits 0 in time; None when it is missing, fails or hangs."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
