"""From settings to a running server: resolve the model, plan, check, launch, supervise."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from qwen_nvfp4_serve import preflight
from qwen_nvfp4_serve.capacity import plan_capacity, tightest_card
from qwen_nvfp4_serve.container import check_container, in_container
from qwen_nvfp4_serve.errors import UnsupportedHostError, UsageError
from qwen_nvfp4_serve.host import Gpu, detect_gpus, has_cxx_compiler
from qwen_nvfp4_serve.launch import DRAIN_MIDDLEWARE, Host, Launch, Model, build_launch
from qwen_nvfp4_serve.model_files import download, hub_cache, planned_model
from qwen_nvfp4_serve.models import DEFAULT_ON_CARD, DEFAULT_WITHOUT_CARD, ModelRef, find_model, resolve_knob
from qwen_nvfp4_serve.planner import Plan, PlanModel
from qwen_nvfp4_serve.planner.feedback import (
    differences,
    extra_after_out_of_memory,
    read_engine_log,
    read_extra,
    write_extra,
)
from qwen_nvfp4_serve.ready import first_answer, pulse, recording, state_path
from qwen_nvfp4_serve.reference import ANSWERS, EMBEDDED, LEAST_TOKENS, KnownAnswer, read_answers, ready_answer
from qwen_nvfp4_serve.room import disk_warning, memory_warning
from qwen_nvfp4_serve.settings import Loaded, Settings, knobs
from qwen_nvfp4_serve.stages import Report
from qwen_nvfp4_serve.supervisor import Supervisor
from qwen_nvfp4_serve.units import GIB, gib

SOCKET_ADDRESS_BYTES = 107  # unix(7): 108 with the end mark
SOCKET_NAME_BYTES = 36  # a UUID (vllm/utils/network_utils.py, 0.32 and 0.33)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch that passed every check, and what it came from.

    embedded: the model is our own. known: what it must answer before it is READY, None where nobody knows. plan: what
    the start is compared with, None without one. shortfall_key: under which memory that the plan did not foresee is
    remembered.
    """

    launch: Launch
    settings: Settings
    model: Model
    embedded: bool
    known: KnownAnswer | None
    plan: Plan | None
    shortfall_key: str


def prepare(loaded: Loaded, report: Report, *, ask_hub: bool = False) -> Prepared:
    """Facts, model, plan, checks, command: all before the first process, and nothing written. Raises QwenNvfp4Error.

    ask_hub: look at the headers of a model that is not on this disk, before it is downloaded.
    """
    settings = loaded.settings
    for notice in check_container(settings) if in_container() else ():
        report("notice", notice)
    device = choose_device(settings, report)
    preflight.check_build(device, preflight.installed_kind())
    vllm_version = preflight.check_version(device)
    preflight.check_exposure(settings, device, vllm_version)
    preflight.check_device_knobs(settings, device)
    preflight.check_plugin()
    ref = resolve_knob(settings.model or (DEFAULT_ON_CARD if device == "cuda" else DEFAULT_WITHOUT_CARD))
    model = locate(ref, settings)
    preflight.check_patches(settings, device, model_config(model), vllm_version)
    gpu = tightest_card(settings, detect_gpus(settings.cuda_visible_devices)) if device == "cuda" else None
    shortfall = read_extra(shortfalls(settings), shortfall_key(model, gpu))
    planned = planned_model(ref, model, settings, report, ask_hub=ask_hub)
    capacity = plan_capacity(settings, planned, gpu, extra_bytes=shortfall)
    launch = build_launch(
        settings,
        model=model,
        capacity=capacity,
        host=Host(device=device, python=sys.executable, has_cxx=has_cxx_compiler(), in_container=in_container()),
        passthrough=loaded.passthrough,
    )
    for notice in (*loaded.notices, *launch.notices, *_room(settings, ref, planned, device)):
        report("notice", notice)
    return Prepared(
        launch=launch,
        settings=settings,
        model=model,
        embedded=is_embedded(ref),
        known=first_question(settings, model),
        plan=capacity.plan,
        shortfall_key=shortfall_key(model, gpu),
    )


def _room(
    settings: Settings, ref: ModelRef, planned: PlanModel | None, device: Literal["cuda", "cpu"]
) -> tuple[str, ...]:
    """Warnings about memory and disk."""
    memory = None
    if planned is not None and device == "cpu":
        memory = memory_warning(planned, int(settings.cpu_kv_cache_gib * GIB))
    disk = disk_warning(ref.row, hub_cache(settings)) if ref.row else None
    return tuple(warning for warning in (memory, disk) if warning)


def is_embedded(ref: ModelRef) -> bool:
    """True for the catalogue's own model, which comes with this package."""
    return ref.row is not None and ref.row.repo is None


def model_config(model: Model) -> dict[str, Any] | None:
    """config.json as vLLM will read it; None for a hub model that is not on this disk yet."""
    return preflight.read_config(Path(model.source)) if model.local else None


def shortfalls(settings: Settings) -> Path:
    """The file that remembers how much memory earlier starts ran short of."""
    return cache_dir(settings) / "memory.json"


def shortfall_key(model: Model, gpu: Gpu | None) -> str:
    """What a shortfall belongs to: the model on the card."""
    return f"{model.source} on {gpu.name if gpu else 'cpu'}"


def choose_device(settings: Settings, report: Report) -> Literal["cuda", "cpu"]:
    """`cuda` or `cpu` as DEVICE says; `auto` takes a card when there is one and the installed vLLM can use it."""
    if settings.device == "cpu":
        return "cpu"
    gpus = detect_gpus(settings.cuda_visible_devices)
    if settings.device == "cuda" and not gpus:
        raise UnsupportedHostError(
            "DEVICE=cuda and nvidia-smi shows no card", do="Install the driver, or set DEVICE=cpu."
        )
    if settings.device == "cuda":
        return "cuda"
    if gpus and preflight.installed_kind() == "cpu":
        report("notice", f"WARNING: {gpus[0].name} is not used: the installed vLLM is its CPU build")
        return "cpu"
    return "cuda" if gpus else "cpu"


def locate(ref: ModelRef, settings: Settings) -> Model:
    """Where vLLM finds the model and the names clients may use."""
    if is_embedded(ref):
        return Model(source=str(EMBEDDED), ids=(DEFAULT_WITHOUT_CARD,), revision=None, local=True, own_format=True)
    if ref.path is not None:
        folder = ref.path.resolve()
        own_format = (folder / ANSWERS).is_file()
        return Model(
            source=str(folder), ids=(folder.name, str(ref.path)), revision=None, local=True, own_format=own_format
        )
    repo = ref.repo
    if repo is None:
        raise UsageError("MODEL", seen=ref.given, expected="a catalogue name, a folder or a hub id")
    row = ref.row or find_model(repo)
    alias = row.name if row else repo.split("/")[-1].lower()
    return Model(source=repo, ids=(alias, repo), revision=settings.revision or ref.revision, local=False)


def cache_dir(settings: Settings) -> Path:
    """Our cache folder: CACHE_DIR, else the user's cache folder."""
    if settings.cache_dir:
        return Path(settings.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qwen-nvfp4-serve"


def first_question(settings: Settings, model: Model) -> KnownAnswer | None:
    """What the model must answer rightly before it is READY; None unless it is a reference model, asked as trained."""
    if not model.own_format or settings.chat_template == "ours":
        return None
    if settings.max_model_len is not None and settings.max_model_len < LEAST_TOKENS:
        return None
    return ready_answer(read_answers(Path(model.source)))


def child_environment(launch: Launch, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment, but for knobs without a value, plus the launch's; PYTHONPATH is prepended, not replaced."""
    ours = os.environ if environ is None else environ
    base = {name: value for name, value in ours.items() if value.strip() or name not in knobs()}
    added = dict(launch.environment)
    if "PYTHONPATH" in added and base.get("PYTHONPATH"):
        added["PYTHONPATH"] = os.pathsep.join((added["PYTHONPATH"], base["PYTHONPATH"]))
    return base | added


def meeting_in(folder: str) -> dict[str, str]:
    """Puts the sockets of vLLM's processes and (by a patch of ours) the file through which they find each other, all of
    which they leave behind, into `folder`; unless it is too deep for a socket.
    """
    deepest = len(os.fsencode(folder)) + 1 + SOCKET_NAME_BYTES
    return {"VLLM_RPC_BASE_PATH": folder} if deepest <= SOCKET_ADDRESS_BYTES else {}


def run(prepared: Prepared, report: Report) -> int:
    """Start the server and stay until it ends; the exit code of the command (see Supervisor.run)."""
    settings = prepared.settings
    # In a container BIND_HOST is the address that the engine publishes; it does not exist inside.
    with (
        preflight.claimed_port("0.0.0.0" if in_container() else settings.bind_host, settings.port),
        TemporaryDirectory(prefix="qwen-nvfp4-", ignore_cleanup_errors=True) as sockets,
    ):
        return _run(prepared, report, sockets)


def _run(prepared: Prepared, report: Report, sockets: str) -> int:
    """sockets: an empty folder that goes when the server has ended."""
    launch, settings = prepared.launch, prepared.settings
    url = f"http://127.0.0.1:{settings.port}/v1" if in_container() else launch.url
    report = recording(report, state_path(None if in_container() else settings.port), url=url, model=launch.model_id)
    if not prepared.model.local:
        download(prepared.model, settings, report)
    supervisor = Supervisor(
        argv=launch.argv,
        environment=meeting_in(sockets) | child_environment(launch),
        scratch=sockets,
        probe=_probe(prepared, url),
        pulse=pulse(url, launch.model_id, secret_key(settings)) if settings.hang_timeout_s else None,
        hang_timeout_s=settings.hang_timeout_s,
        report=report,
        ready_message=ready_message(launch, has_key=settings.vllm_api_key is not None),
        start_timeout_s=settings.start_timeout_s,
        shutdown_timeout_s=settings.shutdown_timeout_s,
        on_ready=_compare(prepared, report),
        drain_signal=signal.SIGUSR1 if DRAIN_MIDDLEWARE in launch.argv else signal.SIGTERM,
    )
    code = supervisor.run()
    if prepared.plan is not None and read_engine_log(supervisor.log_tail).out_of_memory:
        extra = extra_after_out_of_memory(prepared.plan)
        write_extra(shortfalls(settings), prepared.shortfall_key, extra)
        report("notice", f"out of memory: the next start keeps {gib(extra)} more back")
    return code


def _compare(prepared: Prepared, report: Report) -> Callable[[tuple[str, ...]], None]:
    """Says after a start where the engine's own numbers differ from the plan's."""

    def compare(lines: tuple[str, ...]) -> None:
        if prepared.plan is None:
            return
        for difference in differences(prepared.plan, read_engine_log(lines), free_bytes=_free_bytes(prepared)):
            report("notice", f"not as planned: {difference}")

    return compare


def _free_bytes(prepared: Prepared) -> int | None:
    """What is free of the fullest card now; None on the CPU, and where the driver does not say."""
    if prepared.plan is None or prepared.plan.request.gpu is None:
        return None
    gpus = detect_gpus(prepared.settings.cuda_visible_devices)
    return tightest_card(prepared.settings, gpus).free_bytes if gpus else None


def _probe(prepared: Prepared, url: str) -> Callable[[], bool]:
    known = prepared.known or not prepared.model.local
    key = secret_key(prepared.settings)
    return lambda: first_answer(url, prepared.launch.model_id, key, known=known)


def secret_key(settings: Settings) -> str | None:
    """What clients must send, in the clear."""
    return settings.vllm_api_key.get_secret_value() if settings.vllm_api_key else None


def ready_message(launch: Launch, *, has_key: bool) -> str:
    """URL, model id and a curl line to paste."""
    auth = '-H "Authorization: Bearer $VLLM_API_KEY" ' if has_key else ""
    message = {"role": "user", "content": "What is 17 + 25?"}
    question = {"model": launch.model_id, "messages": [message], "max_tokens": 64}
    body = shlex.quote(json.dumps(question))
    curl = f"curl {launch.url}/chat/completions {auth}-H 'Content-Type: application/json' -d {body}"
    return f"{launch.url} serves {launch.model_id}. Try:\n  {curl}"
