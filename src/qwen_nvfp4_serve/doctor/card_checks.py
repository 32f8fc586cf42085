"""Checks of driver, card and memory."""

from __future__ import annotations

import re

from packaging.version import InvalidVersion, Version

from qwen_nvfp4_serve.doctor.check import Check, failed, passed
from qwen_nvfp4_serve.doctor.facts import Facts
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import GpuRow, match_gpu
from qwen_nvfp4_serve.models import DEFAULT_ON_CARD, resolve_model
from qwen_nvfp4_serve.planner import PlanModel, PlanRequest, plan
from qwen_nvfp4_serve.units import MIB

# Oldest driver branch that runs a CUDA major release (NVIDIA's CUDA compatibility guide, minor-version compatibility).
DRIVER_FOR_CUDA = {11: 450, 12: 525, 13: 580}
# Oldest driver branch that knows Blackwell at all.
BLACKWELL_DRIVER = 570
# The driver branch that a CUDA release ships with; its forward-compatibility libraries are of that branch.
NATIVE_DRIVER = {(12, 8): 570, (12, 9): 575, (13, 0): 580, (13, 1): 590, (13, 2): 595}
LEAST_CAPABILITY = (8, 0)  # BF16 tensor cores, and the oldest that vLLM's attention backends accept
FOREIGN = re.compile(r"\b(AMD|Radeon|Instinct|Intel|Arc)\b", re.IGNORECASE)
WSL_HIDDEN_MIB = 1331  # about 1.3 GiB that Windows keeps of a card


def check_driver(facts: Facts) -> Check | None:
    """The driver against the CUDA release of the image."""
    if facts.driver is None or facts.gpu == "":
        return None
    branch = _branch(facts.driver)
    cuda = _cuda(facts.cuda_image or "13.0")
    if branch is None or cuda is None:
        bad = f"driver {facts.driver!r}" if branch is None else f"CUDA {facts.cuda_image!r}"
        do = "type nvidia-smi: where it shows no driver version, install the driver again"
        if branch is not None:
            do = "set CUDA_VERSION to that of the image, such as 13.0"
        return failed("driver", seen=bad, needed="a version number", says=f"{bad} is no version", do=do)
    needed = DRIVER_FOR_CUDA.get(cuda[0], DRIVER_FOR_CUDA[max(DRIVER_FOR_CUDA)])
    if (_capability(facts) or (0, 0)) >= (10, 0):
        needed = max(needed, BLACKWELL_DRIVER)
    release = f"CUDA {cuda[0]}.{cuda[1]}"
    if branch >= needed:
        return passed("driver", facts.driver, f"{needed} or newer", f"driver {facts.driver} runs {release}")
    return failed(
        "driver",
        seen=facts.driver,
        needed=f"{needed} or newer",
        says=f"driver {facts.driver} is too old for {release}, which needs {needed} or newer",
        do=f"install NVIDIA driver {needed} or newer and reboot",
        unsupported=True,
    )


def check_compat(facts: Facts) -> Check | None:
    """CUDA's forward-compatibility libraries, which GeForce cards refuse."""
    if facts.compat_libs is None or facts.gpu == "":
        return None
    if not facts.compat_libs:
        return passed("cuda-compat", "none", "none on GeForce", "no CUDA compatibility libraries are on the path")
    if facts.card and not is_geforce(facts.card):
        return passed("cuda-compat", "present", "none on GeForce", f"{facts.card} accepts CUDA compatibility libraries")
    branch, cuda = _branch(facts.driver or ""), _cuda(facts.cuda_image or "")
    # Of a CUDA release that is not in the table no more is known than that its driver is newer than these.
    native = NATIVE_DRIVER.get(cuda, max(NATIVE_DRIVER.values()) + 1) if cuda else None
    if branch is not None and native is not None and branch >= native:
        return passed("cuda-compat", "present", "none on GeForce", f"driver {facts.driver} is as new as the libraries")
    return failed(
        "cuda-compat",
        seen=f"compatibility libraries of CUDA {facts.cuda_image or 'unknown'}",
        needed="none on GeForce",
        says=f"{facts.card or 'a GeForce card'} with CUDA compatibility libraries fails with Error 804 "
        "(forward compatibility on unsupported hardware)",
        do="take /usr/local/cuda/compat off LD_LIBRARY_PATH and out of /etc/ld.so.conf.d, or update the driver",
        unsupported=True,
    )


def _check_none(facts: Facts) -> Check:
    if facts.device != "cuda":
        return passed("card", "none", "none for the CPU backend", "no NVIDIA card: the CPU backend will serve")
    return failed(
        "card",
        seen="no NVIDIA card",
        needed="one, as DEVICE=cuda says",
        says="DEVICE=cuda and nvidia-smi shows no card",
        do="install the driver, make the card visible, or set DEVICE=cpu",
        unsupported=True,
    )


def check_card(facts: Facts) -> Check | None:
    """The card and its capability against the table."""
    if facts.gpu is None and facts.capability is None:
        return None
    if facts.gpu == "":
        return _check_none(facts)
    name, row = facts.card or "the card", match_gpu(facts.card or "")
    capability = _capability(facts)
    if capability is None:
        return _check_name(name)
    text = f"{capability[0]}.{capability[1]}"
    if capability < LEAST_CAPABILITY:
        return failed(
            "card",
            seen=f"{name}, compute capability {text}",
            needed="8.0 or newer",
            says=f"{name} has compute capability {text}; attention and BF16 need 8.0",
            do="use an RTX 30 card or newer, or DEVICE=cpu",
            unsupported=True,
        )
    if row and row.capability != capability:
        known = f"{row.capability[0]}.{row.capability[1]}"
        return failed(
            "card",
            seen=f"{name}, compute capability {text}",
            needed=known,
            says=f"{name} reports compute capability {text}, the table says {known}",
            do="check that the driver matches the card",
        )
    kind = "native FP4" if capability >= (10, 0) else "FP4 weights through Marlin"
    return passed("card", f"{name}, compute capability {text}", "8.0 or newer", f"{name} is supported: {kind}")


def _check_name(name: str) -> Check:
    """A card of which no more than its name is known."""
    if not FOREIGN.search(name):
        return passed("card", name, "a known card", f"{name} is not in the table and its capability is unknown")
    return failed(
        "card",
        seen=name,
        needed="an NVIDIA card",
        says=f"{name} is no NVIDIA card, and what is served here is for CUDA or the CPU",
        do="set DEVICE=cpu",
        unsupported=True,
    )


def check_cards(facts: Facts) -> Check | None:
    """The number of cards against TENSOR_PARALLEL."""
    if facts.cards is None or not facts.tensor_parallel or facts.gpu == "":
        return None
    seen, needed = f"{facts.cards} visible", f"{facts.tensor_parallel}, as TENSOR_PARALLEL says"
    if facts.cards >= facts.tensor_parallel:
        return passed(
            "cards", seen, needed, f"the model is split over {facts.tensor_parallel} of {facts.cards} card(s)"
        )
    says = f"TENSOR_PARALLEL={facts.tensor_parallel} and {facts.cards} card(s) are visible"
    do = "lower it, or name more cards in CUDA_VISIBLE_DEVICES"
    return failed("cards", seen=seen, needed=needed, says=says, do=do)


def check_torch(facts: Facts) -> Check | None:
    """The architectures that torch was built for against the card."""
    capability = _capability(facts)
    if not facts.torch_arch_list or not capability or facts.gpu == "":
        return None
    card, listed = 10 * capability[0] + capability[1], ", ".join(facts.torch_arch_list)
    if any(_runs(arch, card) for arch in facts.torch_arch_list):
        return passed("torch", listed, f"sm_{card}", f"torch has code for sm_{card}")
    return failed(
        "torch",
        seen=listed,
        needed=f"sm_{card}",
        says=f"the installed torch has no code for sm_{card}",
        do="install the torch build that vLLM 0.33 asks for (CUDA 13)",
        unsupported=True,
    )


def _runs(arch: str, card: int) -> bool:
    """Whether code for `arch` runs on sm_<card>: that of x.y also on x.z with z > y, unless it is for x.y alone (a)."""
    match = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if match is None:
        return False
    built = int(match[1])
    return built == card if match[2] == "a" else built // 10 == card // 10 and built <= card


def _capability(facts: Facts) -> tuple[int, int] | None:
    """What was seen, else what the table knows of the card."""
    row = match_gpu(facts.card or "")
    return facts.capability or (row.capability if row else None)


def check_memory(facts: Facts) -> Check | None:
    """Free memory against the plan for the model; names who holds the rest."""
    row = match_gpu(facts.card or "")
    free = _free_mib(facts)
    if row is None or free is None:
        return None
    model = _plan_model(facts)
    if model is None:
        return None
    cards = facts.tensor_parallel or 1
    try:
        planned = plan(PlanRequest(model=model, gpu=row, free_bytes=free * MIB, tensor_parallel=cards))
    except UsageError as error:
        do = "set TENSOR_PARALLEL to a divisor"
        return failed("memory", seen=str(cards), needed="a divisor of the heads", says=error.sentence(), do=do)
    held = f", held by {', '.join(facts.gpu_processes)}" if facts.gpu_processes else ""
    needed_mib = planned.bytes.fixed // MIB
    if planned.fits:
        says = f"{free:,} MiB are free: {planned.max_model_len:,} tokens of context fit"
        return passed("memory", f"{free:,} MiB free", f"{needed_mib:,} MiB and a cache", says)
    if facts.port_own:
        says = f"{free:,} MiB are free{held}: a server of ours runs and has its memory"
        return passed("memory", f"{free:,} MiB free{held}", f"{needed_mib:,} MiB and a cache", says)
    return failed(
        "memory",
        seen=f"{free:,} MiB free{held}",
        needed=f"{needed_mib:,} MiB and a cache",
        says=f"{free:,} MiB of the card are free{held}, {model.name} needs {needed_mib:,} MiB and a cache",
        do="end what holds the memory, or choose a smaller model: qwen-nvfp4 plan",
    )


def check_wsl(facts: Facts) -> Check | None:
    """WSL2, which hides memory."""
    if not facts.wsl:
        return None
    says = f"WSL2 keeps about {WSL_HIDDEN_MIB:,} MiB of the card: the memory check counts it as taken"
    return passed("wsl", "WSL2", "Linux or WSL2", says)


def check_unified(facts: Facts) -> Check | None:
    """Unified memory, where the host's processes live in the card's memory."""
    row = match_gpu(facts.card or "")
    if not (facts.unified_memory or (row and row.unified_memory)):
        return None
    seen = "unknown" if facts.mem_available_mib is None else f"{facts.mem_available_mib:,} MiB available"
    says = "memory is shared with the host: the budget is MemAvailable, not what the card reports free"
    return passed("unified-memory", seen, "MemAvailable", says)


def is_geforce(name: str) -> bool:
    """True for the consumer line: `GeForce`, or `RTX` with a bare four-digit number."""
    row: GpuRow | None = match_gpu(name)
    if row is not None:
        return row.title.startswith("GeForce")
    return "geforce" in name.lower() or re.search(r"\bRTX\s*\d{4}\b", name, re.IGNORECASE) is not None


def _free_mib(facts: Facts) -> int | None:
    row = match_gpu(facts.card or "")
    if row and row.unified_memory:
        return facts.mem_available_mib
    if facts.memory_free_mib is None:
        return None
    return max(0, facts.memory_free_mib - (WSL_HIDDEN_MIB if facts.wsl else 0))


def _plan_model(facts: Facts) -> PlanModel | None:
    try:
        row = resolve_model(facts.model or DEFAULT_ON_CARD).row
    except UsageError:
        return None
    return PlanModel.from_row(row, row.dims) if row is not None and row.dims is not None else None


def _branch(driver: str) -> int | None:
    try:
        return Version(driver).major
    except InvalidVersion:
        return None


def _cuda(release: str) -> tuple[int, int] | None:
    """Major and minor number, also of an image's tag (`13.0.1-runtime-ubuntu24.04`)."""
    match = re.match(r"\D{0,8}(\d{1,4})(?:\.(\d{1,4}))?", release)
    return None if match is None else (int(match[1]), int(match[2] or 0))
