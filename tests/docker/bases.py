"""Stand-ins for the images that the Dockerfile starts from, for machines that reach no image registry.

A Debian root with its Python, made by debootstrap, that uses the package index as pip on this machine does: with its
certificates and its folders of wheels. `QWEN_NVFP4_CPU_BASE` names a real base instead.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from engine import BUILDKIT, EngineError, docker, need, run

PACKAGES = ("ca-certificates", "python3", "python3-venv", "python3-pip", "libnuma1")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "qwen-nvfp4-stand-in"


def cpu_base() -> str:
    """The image to build the CPU target on: QWEN_NVFP4_CPU_BASE, else a stand-in, made once."""
    if named := os.environ.get("QWEN_NVFP4_CPU_BASE"):
        return named
    tag = f"{REPOSITORY}:python-{recipe_digest()}"
    if run(docker(), "image", "inspect", tag).returncode == 0:
        return tag
    if os.geteuid() != 0:
        raise EngineError("making a base image needs root; set QWEN_NVFP4_CPU_BASE to an image with Python 3.11")
    if shutil.which("debootstrap") is None:
        need("apt-get", "update", "-qq")
        need("apt-get", "install", "-y", "-qq", "--no-install-recommends", "debootstrap")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        make_root(root)
        import_root(root, tag)
    return tag


# What vLLM's own image has and we use: vLLM and its packages for the system's Python, nvcc, a host compiler.
GPU_BASE = """
FROM {base}
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*
COPY gpu.lock /tmp/
RUN python3 -m pip install --quiet --no-cache-dir --no-deps --break-system-packages --requirement /tmp/gpu.lock
RUN toolkit=$(dirname "$(find / -path '*/nvidia/*/bin/nvcc' -print -quit)")/.. \\
    && ln -s "$(realpath "$toolkit")" /usr/local/cuda
ENV PATH=/usr/local/cuda/bin:$PATH CUDA_HOME=/usr/local/cuda
"""


def gpu_base() -> str:
    """The image to build the GPU target on: QWEN_NVFP4_GPU_BASE, else a stand-in, made once (several GB)."""
    if named := os.environ.get("QWEN_NVFP4_GPU_BASE"):
        return named
    text = GPU_BASE.format(base=cpu_base())
    lock = (ROOT / "requirements" / "gpu.lock").read_bytes()
    tag = f"{REPOSITORY}:vllm-{hashlib.sha256(text.encode() + lock).hexdigest()[:12]}"
    if run(docker(), "image", "inspect", tag).returncode != 0:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "Dockerfile").write_text(text)
            (Path(folder) / "gpu.lock").write_bytes(lock)
            need(docker(), "build", "--tag", tag, folder, env=BUILDKIT)
    return tag


def recipe_digest() -> str:
    """Twelve hex digits over what the stand-in is made from."""
    recipe = (PACKAGES, codename(), pip_settings(), [path.name for path in wheel_folders() for path in path.iterdir()])
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]


def codename() -> str:
    """Of the Debian that runs here."""
    rows = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    if rows.get("ID") != "debian":
        raise EngineError("stand-in images are made on Debian; set QWEN_NVFP4_CPU_BASE to an image with Python 3.11")
    return rows["VERSION_CODENAME"]


def make_root(root: Path) -> None:
    """A minimal Debian with Python, and pip set up as here."""
    need("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", codename(), str(root))
    shutil.rmtree(root / "var/cache/apt/archives")
    (root / "etc/pip.conf").write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in pip_settings().items()))
    if CERTIFICATES.exists():
        shutil.copyfile(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    for wheels in wheel_folders():
        shutil.copytree(wheels, root / wheels.relative_to("/"))


def pip_settings() -> dict[str, str]:
    """Of pip on this machine: what tells it where packages are. Folders that were not copied are left out."""
    shown = need(sys.executable, "-m", "pip", "config", "list")
    rows = [line.partition("=") for line in shown.splitlines()]
    given = {name.rpartition(".")[2]: value.strip("'") for name, _, value in rows}
    wanted = {key: given[key] for key in ("index-url", "cert", "default-timeout", "find-links") if given.get(key)}
    if given.get("extra-index-url"):
        wanted["extra-index-url"] = " ".join(url for url in given["extra-index-url"].split() if "file:" not in url)
    return {key: value for key, value in wanted.items() if value}


def wheel_folders() -> list[Path]:
    """Local folders in which pip looks for wheels."""
    return [Path(word) for word in pip_settings().get("find-links", "").split() if Path(word).is_dir()]


def import_root(root: Path, tag: str) -> None:
    """A folder as a one-layer image."""
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
        need(docker(), "import", "-", tag, stdin=archive.stdout)
