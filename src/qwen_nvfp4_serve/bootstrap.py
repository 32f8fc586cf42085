"""`scripts/serve` and `scripts/test` on a machine with nothing but Python: make `.venv`, install, hand over.

Standard library only: this runs before anything is installed. Packages come from the lock files in `requirements/`,
without dependency resolution, so that every machine gets the same versions.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn

from qwen_nvfp4_serve.host import detect_gpus, docker_runs_nvidia

Target = Literal["cpu", "gpu"]

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / ".installed.json"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own index of CPU builds
PROBE_TIMEOUT_S = 3.0
HEARTBEAT_S = 20.0
DEVICES = ("auto", "cuda", "cpu")
BEGAN = time.monotonic()


def main(argv: Sequence[str]) -> int:
    """`serve ARGS…` or `test ARGS…`; replaces this process by the command, or returns an exit code."""
    os.chdir(ROOT)
    os.environ.pop("PYTHONPATH", None)  # set by the script so that this module is found; `.venv` has its own copy
    command, *rest = argv
    if command == "serve" and hands_over_to_docker():
        say("an NVIDIA card and Docker with its runtime are here: docker compose up")
        os.execvp("docker", ["docker", "compose", "up", *rest])
    target: Target = "gpu" if wants_gpu() else "cpu"
    with install_lock():
        python = install(target)
    scripts = python.parent
    os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"
    if command == "serve":
        os.execv(scripts / "qwen-nvfp4", ["qwen-nvfp4", "serve", *rest])
    return run_tests(python, rest)


def hands_over_to_docker() -> bool:
    """True when a card, Docker with the NVIDIA runtime and a compose file are here and DEVICE leaves the choice."""
    wanted = device_setting() == "auto" and (ROOT / "docker-compose.yml").exists()
    return wanted and has_gpu() and docker_runs_nvidia()


def wants_gpu() -> bool:
    """True when this machine should get the GPU build of vLLM: DEVICE, else whether there is a card."""
    device = device_setting()
    return device == "cuda" or (device != "cpu" and has_gpu())


def has_gpu() -> bool:
    """True when a card is there and CUDA_VISIBLE_DEVICES does not hide it."""
    return bool(detect_gpus(early_setting("CUDA_VISIBLE_DEVICES")))


def device_setting() -> str:
    """DEVICE, before the real settings can be read. Exits with 2 when it is none of its values."""
    device = early_setting("DEVICE") or "auto"
    if device not in DEVICES:
        fail(f"DEVICE: seen {device!r}, expected {', '.join(DEVICES)}.", 2)
    return device


def early_setting(name: str) -> str | None:
    """A knob from the environment or `.env`, read without any library; None when unset. Exits with 2 if unreadable."""
    if os.environ.get(name, "").strip():
        return os.environ[name].strip()
    file = ROOT / ".env"
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace") if file.exists() else ""
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}. It has to be a text file that you may read.", 2)
    line = re.compile(rf"""^\s*(?:export\s+)?{name}\s*=\s*(['"]?)([^'"#\r\n]*)\1\s*(?:#.*)?$""", re.MULTILINE)
    found = line.findall(text)
    return found[-1][1].strip() or None if found else None


def install(target: Target) -> Path:
    """The Python of `.venv` with the locked packages of `target`; a second call finds it done. Exits on failure."""
    python = VENV / "bin" / "python"
    wanted = fingerprint(target)
    if python.exists() and STAMP.exists() and STAMP.read_text() == json.dumps(wanted):
        return python
    STAMP.unlink(missing_ok=True)
    if python.exists() and python_of(python) != wanted["python"]:
        shutil.rmtree(VENV)
    if not python.exists():
        say(f"making {VENV.name} with Python {wanted['python']}")
        run(
            [sys.executable, "-m", "venv", str(VENV)],
            "Python's venv module failed: on Debian and Ubuntu, apt-get install python3-venv.",
        )
    what = {"cpu": "2 to 4 minutes, about 0.7 GB to download", "gpu": "several GB to download"}[target]
    say(f"installing the {target.upper()} packages (first time only; {what})")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    install_locked(pip, target)
    run([*pip, "--editable", str(ROOT)], "Installing this project failed.")
    STAMP.write_text(json.dumps(wanted))
    say("installed")
    return python


def install_locked(pip: Sequence[str], target: Target) -> None:
    """Install `requirements/<target>.lock`. For a CPU: its torch from where pip looks, from PyTorch's index, or, as a
    last resort, the large CUDA build, which works there too."""
    lock = ROOT / "requirements" / f"{target}.lock"
    if target == "gpu":
        return run([*pip, "--requirement", str(lock)], "Installing vLLM failed.")
    torch, rest = split_torch(lock.read_text())
    index = ["--extra-index-url", TORCH_CPU_INDEX] if reachable(f"{TORCH_CPU_INDEX}/torch/") else []
    vision = [line + "+cpu" if index and line.startswith("torchvision==") else line for line in rest]
    filtered = VENV / "requirements.txt"
    filtered.write_text("\n".join(vision) + "\n")
    if subprocess.run([*pip, *index, torch], check=False, stderr=subprocess.DEVNULL).returncode != 0:
        public = torch.partition("+")[0]
        say(
            f"WARNING: no {torch} (PyTorch's CPU index is out of reach): installing the CUDA build {public}, several GB"
        )
        run([*(word for word in pip if word != "--no-deps"), public], f"Installing {public} failed.")
    return run([*pip, *index, "--requirement", str(filtered)], "Installing the packages failed.")


def split_torch(lock: str) -> tuple[str, list[str]]:
    """The lock's torch requirement, and its other lines."""
    lines = [line for line in lock.splitlines() if line.strip()]
    torch = next(line for line in lines if line.startswith("torch=="))
    return torch, [line for line in lines if line is not torch]


def fingerprint(target: Target) -> dict[str, str]:
    """What `.venv` was made from; a change of any part installs again."""
    digest = hashlib.sha256(
        (ROOT / "requirements" / f"{target}.lock").read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    )
    return {
        "target": target,
        "python": python_of(Path(sys.executable)),
        "inputs": digest.hexdigest(),
        "root": str(ROOT),
    }


def python_of(python: Path) -> str:
    """`3.11` and so on; `broken` when that interpreter does not start."""
    if python == Path(sys.executable):
        return f"{sys.version_info[0]}.{sys.version_info[1]}"
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return "broken"
    return done.stdout.strip() or "broken"


def run_tests(python: Path, arguments: Sequence[str]) -> int:
    """Lint, types and tests; the first failing step's exit code. With arguments (but --full), only pytest with them.

    Tests run in several processes unless some are named by their path; those that compare speeds in the end, alone."""
    module = [str(python), "-m"]
    named = any((ROOT / word.partition("::")[0]).exists() for word in arguments if not word.startswith("-"))
    pytest = [*module, "pytest", *([] if named else ["--numprocesses=auto"]), *arguments]
    steps = [pytest]
    if not arguments or list(arguments) == ["--full"]:
        steps = [
            [*module, "ruff", "check"],
            [*module, "ruff", "format", "--check"],
            [*module, "mypy"],
            [*pytest, "-m", "not alone"],
            [*module, "pytest", *arguments, "-m", "alone"],
        ]
    for step in steps:
        say(" ".join(step[2:]))
        code = subprocess.run(step, check=False).returncode
        if code != 0:
            return code
    return 0


@contextmanager
def install_lock() -> Iterator[None]:
    """One installation at a time: a second start waits for the first."""
    with (ROOT / ".venv.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another installation to finish")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def reachable(url: str) -> bool:
    """True when `url` answers in time."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def run(command: Sequence[str], failure: str) -> None:
    """Run a step, saying now and then that it goes on; on failure print one line and exit 1."""
    with subprocess.Popen(command) as step:
        while step.poll() is None:
            try:
                step.wait(timeout=HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                say("still installing")
    if step.returncode != 0:
        fail(f"{failure} The output above says why.", 1)


def say(message: str) -> None:
    """One stage line, as `qwen-nvfp4 serve` prints them."""
    print(f"[qwen-nvfp4 {time.monotonic() - BEGAN:6.1f}s] install: {message}", flush=True)


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and out."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
