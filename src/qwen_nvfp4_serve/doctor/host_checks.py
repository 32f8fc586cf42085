"""Checks of the host around the card: containers, shared memory, disk, ports, compile jobs."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from qwen_nvfp4_serve.doctor.check import Check, failed, passed
from qwen_nvfp4_serve.doctor.facts import Facts
from qwen_nvfp4_serve.models import DEFAULT_ON_CARD, find_model
from qwen_nvfp4_serve.planner import weight_bytes
from qwen_nvfp4_serve.units import GIB

# Debian 12 ships Docker 20.10, and a current Compose plugin drives it; Compose 2.20 reads the whole file format.
LEAST_DOCKER, LEAST_COMPOSE = "20.10", "2.20"
# NCCL and vLLM's message queues map buffers there for every pair of ranks; a container's default is 64 MiB.
SHM_WITH_PARALLEL_MIB = 1024
DOWNLOAD_MARGIN = 1.05
JOB_GIB = 4.0  # host memory that one nvcc job of FlashInfer's kernels may take


def check_docker(facts: Facts) -> Check | None:
    """Docker's version."""
    if not facts.docker_version:
        return None
    return _at_least("docker", "Docker", facts.docker_version, LEAST_DOCKER)


def check_compose(facts: Facts) -> Check | None:
    """Compose's version."""
    if not facts.compose_version:
        return None
    return _at_least("compose", "Docker Compose", facts.compose_version, LEAST_COMPOSE)


def check_toolkit(facts: Facts) -> Check | None:
    """The NVIDIA runtime of the container engine."""
    if facts.nvidia_runtime is None or facts.gpu == "" or not facts.docker_version:
        return None
    if facts.nvidia_runtime:
        return passed("container-toolkit", "installed", "the NVIDIA runtime", "Docker can hand a card to a container")
    return failed(
        "container-toolkit",
        seen="no NVIDIA runtime",
        needed="nvidia-container-toolkit",
        says="Docker has no NVIDIA runtime, so a container would see no card",
        do="install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && "
        "sudo systemctl restart docker",
    )


def check_shm(facts: Facts) -> Check | None:
    """Shared memory for tensor parallelism."""
    if facts.shm_mib is None:
        return None
    cards = facts.tensor_parallel or 1
    needed = SHM_WITH_PARALLEL_MIB if cards > 1 else 0
    if facts.shm_mib >= needed:
        return passed("shm", f"{facts.shm_mib:,} MiB", f"{needed:,} MiB", f"shm is large enough for {cards} card(s)")
    return failed(
        "shm",
        seen=f"{facts.shm_mib:,} MiB",
        needed=f"{needed:,} MiB",
        says=f"shm of {facts.shm_mib:,} MiB is too small for tensor parallelism over {cards} cards",
        do=f"put QWEN_NVFP4_SHM_SIZE={needed // 1024}gb into .env, which sets shm_size in docker-compose.yml "
        f"(docker run: --shm-size {needed // 1024}g)",
    )


def check_disk(facts: Facts) -> Check | None:
    """Disk space against the download."""
    download = facts.download_gib
    if download is None and facts.card:
        download = _catalogue_gib(facts.model or DEFAULT_ON_CARD)
    if facts.disk_free_gib is None or download is None:
        return None
    needed = download * DOWNLOAD_MARGIN
    where = facts.cache_path or "the hub cache"
    seen, wanted = f"{facts.disk_free_gib:.1f} GiB free", f"{needed:.1f} GiB"
    if facts.disk_free_gib >= needed:
        return passed("disk", seen, wanted, f"{where} has room for the download")
    return failed(
        "disk",
        seen=seen,
        needed=wanted,
        says=f"{where} has {seen}, the download needs {wanted}",
        do="free some, or set HF_HOME to a folder on a larger disk",
    )


def _catalogue_gib(model: str) -> float | None:
    row = find_model(model)
    if row is None or row.dims is None:
        return None
    return (row.download_bytes or weight_bytes(row.dims, row.precision).total) / GIB


def check_cache_owner(facts: Facts) -> Check | None:
    """Whether the server's user can write the hub cache."""
    if facts.cache_fault:
        where = facts.cache_path or "the hub cache"
        says = f"{where}, where the hub cache should be, is {facts.cache_fault}"
        do = "name a folder that can be written in HF_HOME"
        return failed("cache", seen=facts.cache_fault, needed="a folder that can be written", says=says, do=do)
    if facts.cache_uid is None or facts.run_uid is None:
        return None
    try:
        mode = int(facts.mode or "0755", 8)
    except ValueError:
        do = "give it as octal, such as 0755"
        return failed("cache", seen=repr(facts.mode), needed="an octal mode", says="the mode is no octal number", do=do)
    where = facts.cache_path or "the hub cache"
    seen = f"uid {facts.cache_uid}, mode {mode & 0o7777:04o}"
    if facts.run_uid == 0 or mode & _writable_bits(facts):
        return passed("cache", seen, f"writable by uid {facts.run_uid}", f"{where} can be written")
    path = facts.cache_path or "CACHE_FOLDER"
    owns = facts.cache_uid == facts.run_uid
    return failed(
        "cache",
        seen=seen,
        needed=f"writable by uid {facts.run_uid}",
        says=f"{where} belongs to {seen}, and uid {facts.run_uid} cannot write it",
        do=f"chmod -R u+rwX {path}" if owns else f"sudo chown -R {facts.run_uid} {path}",
    )


def _writable_bits(facts: Facts) -> int:
    """The mode bits of which one must be set: both write and search, reduced to write."""
    if facts.cache_uid == facts.run_uid:
        return 0o200
    if facts.cache_gid is not None and facts.cache_gid in (facts.run_gids or ()):
        return 0o020
    return 0o002


def check_port(facts: Facts) -> Check | None:
    """Whether the port is free."""
    if facts.port is None or facts.port_holder is None:
        return None
    if not facts.port_holder:
        return passed("port", f"{facts.port} free", "a free port", f"port {facts.port} is free")
    if facts.port_own:
        seen, says = f"{facts.port} held by {facts.port_holder}", f"port {facts.port} is held by {facts.port_holder}"
        return passed("port", seen, "a free port, or our own server", says)
    return failed(
        "port",
        seen=f"{facts.port} taken by {facts.port_holder}",
        needed="a free port",
        says=f"port {facts.port} is taken by {facts.port_holder}",
        do="stop it, or set PORT to another number",
    )


def check_jobs(facts: Facts) -> Check | None:
    """Host memory against parallel compile jobs: a first start compiles kernels for minutes."""
    if facts.host_memory_gib is None or facts.gpu == "":
        return None
    jobs = facts.max_jobs or facts.cpu_count
    if jobs is None:
        return None
    most = max(1, int(facts.host_memory_gib // JOB_GIB))
    seen, needed = f"{jobs} jobs, {facts.host_memory_gib:.0f} GiB", f"{JOB_GIB:.0f} GiB a job"
    if jobs <= most:
        return passed("compile-jobs", seen, needed, f"{jobs} compile jobs fit in host memory")
    return failed(
        "compile-jobs",
        seen=seen,
        needed=needed,
        says=f"a first start may run {jobs} compile jobs in {facts.host_memory_gib:.0f} GiB of host memory",
        do=f"set MAX_JOBS={most}",
    )


def _at_least(name: str, what: str, seen: str, least: str) -> Check:
    try:
        new_enough = Version(seen.removeprefix("v").split("-")[0]) >= Version(least)
    except InvalidVersion:
        return passed(name, seen, f"{least} or newer", f"{what} reports {seen}, which is no plain version")
    if new_enough:
        return passed(name, seen, f"{least} or newer", f"{what} {seen} is new enough")
    says = f"{what} {seen} is too old"
    return failed(name, seen=seen, needed=f"{least} or newer", says=says, do=f"update {what} to {least} or newer")
