"""All patches in order, applied or reported. `python -m qwen_nvfp4_patches.registry` prints this machine's outcomes."""

from __future__ import annotations

import json
import os
import sys

from qwen_nvfp4_patches import (
    cpu_compiled_reload,
    cpu_fp8_linear,
    cpu_mtp_state,
    cpu_nvfp4_linear,
    cpu_nvfp4_moe,
    cpu_one_token_prompt,
    cpu_seeded_prefill,
    cpu_short_drafts,
    fused_scales,
    gpu_bf16_linear,
    gpu_dependent_launch,
    gpu_gdn_decode,
    gpu_gdn_projections,
    gpu_nvfp4_linear,
    gpu_nvfp4_moe,
    gpu_nvfp4_moe_block,
    gpu_whole_rows,
    quick_exit,
    qwen3_parser,
    rendezvous_file,
    structured_backends,
    structured_limits,
    structured_reasoning,
    structured_separator,
    unreadable_requests,
)
from qwen_nvfp4_patches.patch import Check, Need, Outcome, Patch, Platform, State
from qwen_nvfp4_patches.processes import is_worker
from qwen_nvfp4_serve.errors import UnsupportedHostError, UsageError
from qwen_nvfp4_serve.versions import check_vllm, installed_vllm, vllm_window

SWITCH = "QWEN_NVFP4_PATCHES"

PATCHES: tuple[Patch, ...] = (
    cpu_nvfp4_linear.PATCH,
    cpu_nvfp4_moe.PATCH,
    fused_scales.PATCH,
    cpu_fp8_linear.PATCH,
    cpu_compiled_reload.PATCH,
    cpu_mtp_state.PATCH,
    cpu_seeded_prefill.PATCH,
    cpu_one_token_prompt.PATCH,
    cpu_short_drafts.PATCH,
    gpu_nvfp4_linear.PATCH,
    gpu_bf16_linear.PATCH,
    gpu_nvfp4_moe.PATCH,
    gpu_nvfp4_moe_block.PATCH,
    gpu_gdn_decode.PATCH,
    gpu_gdn_projections.PATCH,
    gpu_dependent_launch.PATCH,
    gpu_whole_rows.PATCH,
    quick_exit.PATCH,
    qwen3_parser.PATCH,
    structured_reasoning.PATCH,
    structured_backends.PATCH,
    structured_separator.PATCH,
    structured_limits.PATCH,
    unreadable_requests.PATCH,
    rendezvous_file.PATCH,
)


def patches_enabled() -> bool:
    """False when QWEN_NVFP4_PATCHES=off, True when unset or `on`. Raises UsageError for another value."""
    text = os.environ.get(SWITCH) or "on"
    if text not in ("on", "off"):
        raise UsageError(SWITCH, seen=text, expected="on or off")
    return text == "on"


def apply_all(patches: tuple[Patch, ...] = PATCHES) -> tuple[Outcome, ...]:
    """Applies what this process needs, logs each outcome unless the engine core above has, and returns them.

    Raises UnsupportedHostError naming both versions if a patch is needed and vLLM is outside the tested window.
    """
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.version import __version__

    logger = init_logger("vllm.qwen_nvfp4_patches")
    platform = _platform(current_platform)
    enabled = patches_enabled()
    outcomes = tuple(_settle(patch, platform, __version__, enabled) for patch in patches)
    told = is_worker()
    for outcome in outcomes:
        log = logger.debug if told else logger.warning if outcome.state is State.OFF else logger.info
        log("Patch %s: %s (%s)", outcome.name, outcome.state.value, outcome.reason)
    return outcomes


def _platform(current: object) -> Platform | None:
    if current.is_cpu():  # type: ignore[attr-defined]
        return Platform.CPU
    return Platform.GPU if current.is_cuda_alike() else None  # type: ignore[attr-defined]


def _settle(patch: Patch, platform: Platform | None, version: str, enabled: bool) -> Outcome:
    """Applies `patch` if it should be, and says what became of it."""
    if patch.platform not in (None, platform):
        return Outcome(patch.name, State.NOT_NEEDED, f"for {_places(patch)} runs only")
    verdict = check_vllm(version, gpu=platform is Platform.GPU)
    need = patch.needed() if verdict.ok else _guess_need(patch)
    if not need.needed:
        return Outcome(patch.name, State.NOT_NEEDED, need.reason)
    if not enabled:
        return Outcome(patch.name, State.OFF, f"{SWITCH}=off although {need.reason}")
    if not verdict.ok:
        raise UnsupportedHostError(
            f"patch {patch.name} is needed ({need.reason}) but not tested on this vLLM: {verdict.sentence}",
            do="To run without patches, set PATCHES=off",
        )
    patch.apply()
    return Outcome(patch.name, State.APPLIED, need.reason)


def _guess_need(patch: Patch) -> Need:
    """The need in a vLLM outside the window, whose insides may be arranged otherwise: then it counts as needed."""
    try:
        return patch.needed()
    except (ImportError, AttributeError) as error:
        return Need(True, f"this vLLM cannot be asked: {error}")


def checks(
    *, vllm_version: str | None = None, gpu: bool = False, nvfp4: bool = True, enabled: bool = True
) -> tuple[Check, ...]:
    """What can be said before vLLM is imported, for the launcher and the doctor.

    vllm_version: as installed, looked up when None. gpu: the run that is planned. nvfp4: the model has NVFP4 layers.
    enabled: the PATCHES setting. A check that is not ok means: do not start.
    """
    version = vllm_version or installed_vllm()
    verdict = check_vllm(version, gpu=gpu)
    platform = Platform.GPU if gpu else Platform.CPU
    vital = [patch.name for patch in PATCHES if patch.platform is platform and patch.serves_nvfp4]
    found = [Check("vllm-window", verdict.ok or not enabled, verdict.sentence)]
    if nvfp4 and vital and not enabled:
        sentence = (
            f"PATCHES=off leaves vLLM {version} without an NVFP4 kernel for {platform.value.upper()}, and this model "
            f"has NVFP4 layers: set PATCHES=on (needed: {', '.join(vital)}), or serve a BF16 checkpoint"
        )
        found.append(Check("nvfp4-without-patches", False, sentence))
    return tuple(found)


def report() -> dict[str, object]:
    """This process's outcomes with the patches' records, as JSON values. Applies the patches."""
    outcomes = {outcome.name: outcome for outcome in apply_all()}
    rows = [
        {
            "name": patch.name,
            "platform": _places(patch),
            "window": _windows(patch),
            "state": outcomes[patch.name].state.value,
            "reason": outcomes[patch.name].reason,
            "changes": patch.changes,
            "why": patch.why,
            "upstream": patch.upstream,
            "remove_when": patch.remove_when,
        }
        for patch in PATCHES
    ]
    return {"vllm": installed_vllm(), "patches": rows}


def _places(patch: Patch) -> str:
    return " and ".join(place.value for place in _platforms(patch))


def _windows(patch: Patch) -> str:
    return " and ".join(vllm_window(gpu=place is Platform.GPU).specifier for place in _platforms(patch))


def _platforms(patch: Patch) -> tuple[Platform, ...]:
    return (patch.platform,) if patch.platform else tuple(Platform)


def table() -> str:
    """The records as a Markdown table, as docs/patches.md shows them."""
    lines = ["| patch | for | changes | without it | drop it when |", "|---|---|---|---|---|"]
    for patch in PATCHES:
        name = f"[{patch.name}]({patch.upstream})" if patch.upstream else patch.name
        place = f"{_places(patch).upper()}, vLLM {_windows(patch)}"
        lines.append(f"| {name} | {place} | {patch.changes} | {patch.why} | {patch.remove_when} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(json.dumps(report()), file=sys.stdout)
