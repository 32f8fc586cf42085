"""What can be wrong around a container and is invisible from outside: each refused with the line to type."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.settings import Settings
from qwen_nvfp4_serve.units import GIB, MIB

CACHE_ROOT = Path("/cache")
MODELS_MOUNT = Path("/models")
SHM = Path("/dev/shm")
SHM_FLOOR_BYTES = 1 * GIB  # NCCL and vLLM's message queues between workers; Docker's own default is 64 MiB
STOP_MARGIN_S = 20  # the supervisor's: 10 s for vLLM to close down, 5 s to reap, and some slack
CONTAINER = "QWEN_NVFP4_CONTAINER"  # the image's target, and the service that runs it
STOP_GRACE, SET_OUTSIDE = "QWEN_NVFP4_STOP_GRACE", "QWEN_NVFP4_SET_OUTSIDE"
MODELS = "QWEN_NVFP4_MODELS"  # folder of the host that docker-compose.yml mounts at MODELS_MOUNT
UNIT_SECONDS = {"h": 3600, "m": 60, "s": 1}


def in_container() -> bool:
    """True inside our image, which sets this variable."""
    return CONTAINER in os.environ


def check_container(settings: Settings, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What the user should know. Raises UsageError at what would stop the server, or surprise its user, later."""
    service = environ.get(CONTAINER, "gpu")
    check_model_folder(settings.model, service)
    check_temporary()
    for folder in cache_folders(settings, environ):
        check_cache(folder, uid=os.getuid(), gid=os.getgid(), service=service)
    check_shm(shutil.disk_usage(SHM).total if SHM.exists() else None, settings.tensor_parallel, service)
    check_stop_grace(environ.get(STOP_GRACE), settings.shutdown_timeout_s, service)
    has_secret = {"VLLM_API_KEY": settings.vllm_api_key is not None, "HF_TOKEN": settings.hf_token is not None}
    return check_secrets_arrived(environ.get(SET_OUTSIDE, "").split(), has_secret)


def check_model_folder(model: str | None, service: str) -> None:
    """Raises UsageError when MODEL is a path of the host: a container sees its own folders only."""
    if model is None or not model.startswith(("/", ".", "~")) or os.path.exists(model):
        return
    folder = Path(model)
    if MODELS_MOUNT in folder.parents:
        return
    raise UsageError(
        f"MODEL={model} is not in the container",
        do=f"Put {MODELS}={folder.parent} and MODEL={MODELS_MOUNT / folder.name} into .env (host folder, and where it "
        f"is seen) and type: docker compose up -d {service}",
    )


def check_temporary() -> None:
    """Raises UsageError unless temporary files can be written: engine and workers meet in sockets there."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise UsageError(
            "/tmp cannot be written", expected="a folder in memory with room",
            do="Use docker-compose.yml (docker run: --tmpfs /tmp:exec,mode=1777).",
        ) from None  # fmt: skip


def cache_folders(settings: Settings, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """What must be writable: the volumes, and the folders in them that the hub, vLLM and compilers keep."""
    hub = Path(settings.hf_home) if settings.hf_home else CACHE_ROOT / "huggingface"
    named = (settings.cache_dir, environ.get("VLLM_CACHE_ROOT"))
    below = (*subfolders(CACHE_ROOT), *(Path(name) for name in named if name))
    return (CACHE_ROOT, *below, hub, hub / "hub", hub / "xet")


def subfolders(folder: Path) -> list[Path]:
    """The folders directly below; none where it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def check_cache(folder: Path, *, uid: int, gid: int, service: str) -> None:
    """Raises UsageError unless `folder`, or the nearest one above that exists, is writable for this user.

    service: its name in docker-compose.yml, for the line to type; that line serves volumes and host folders alike.
    """
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if os.access(there, os.W_OK | os.X_OK):
        return
    what, found = f"the cache folder {there} cannot be written", there.stat()
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise UsageError(what, seen="a read-only mount", expected="a writable one", do="Take `ro` off the volume.")
    mine, run = found.st_uid == uid, f"docker compose run --rm {{}}{service} -R {{}} {shlex.quote(str(there))}"
    chmod = run.format("--entrypoint chmod ", "u+rwX")
    chown = run.format("--user 0 --cap-add CHOWN --cap-add DAC_OVERRIDE --entrypoint chown ", f"{uid}:{gid}")
    raise UsageError(
        what, seen=f"owner {found.st_uid}, mode {found.st_mode & 0o777:03o}", expected=f"owner {uid}, mode 755",
        do=f"Type: {chmod if mine else chown} (or give HF_HOME another folder, if it names this one)",
    )  # fmt: skip


def check_shm(shm_bytes: int | None, tensor_parallel: int, service: str) -> None:
    """Raises UsageError when several workers would share too little memory."""
    if tensor_parallel == 1 or shm_bytes is None or shm_bytes >= SHM_FLOOR_BYTES:
        return
    raise UsageError(
        f"/dev/shm (shm_size) is too small for TENSOR_PARALLEL={tensor_parallel}",
        seen=f"{shm_bytes // MIB} MiB", expected=f"at least {SHM_FLOOR_BYTES // MIB} MiB",
        do="Put QWEN_NVFP4_SHM_SIZE=8gb into .env and type: "
        f"docker compose up -d {service} (docker run: --shm-size 8g).",
    )  # fmt: skip


def check_stop_grace(grace: str | None, shutdown_timeout_s: int, service: str) -> None:
    """Raises UsageError when the engine would kill the container while requests may still finish."""
    seconds = duration_s(grace) if grace else None
    if seconds is None or seconds >= shutdown_timeout_s + STOP_MARGIN_S:
        return
    wanted = shutdown_timeout_s + STOP_MARGIN_S
    raise UsageError(
        f"{STOP_GRACE} is shorter than SHUTDOWN_TIMEOUT_S={shutdown_timeout_s} needs", seen=grace,
        expected=f"at least {wanted}s",
        do=f"Put {STOP_GRACE}={wanted}s into .env and type: docker compose up -d {service}",
    )  # fmt: skip


def duration_s(text: str) -> float | None:
    """Seconds in Compose's notation (`90s`, `1m30s`); None when it is none."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        return None
    return sum(float(number) * UNIT_SECONDS[unit] for number, unit in parts)


def check_secrets_arrived(set_outside: list[str], has_secret: Mapping[str, bool]) -> tuple[str, ...]:
    """One sentence for each secret that is set only in the shell: it is not passed on, and must not be lost silently.

    Raises UsageError where that is the key. Many shells hold a token that the models served here do not need.
    """
    notices = []
    for name in set_outside:
        if has_secret.get(name, False):
            continue
        lost = UsageError(
            f"{name} is set in the shell, from where containers do not get it (docker inspect would show it)",
            do=f"Put {name}=… into .env, or its file into {name}_FILE.",
        )
        if name == "VLLM_API_KEY":
            raise lost
        notices.append(f"WARNING: {lost.sentence()}")
    return tuple(notices)
