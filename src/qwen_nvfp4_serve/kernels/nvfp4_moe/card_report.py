"""Everything that one card can tell about the mixture-of-experts block, a step at a time, a short table at the end.

python -m qwen_nvfp4_serve.kernels.nvfp4_moe.card_report OUT [--steps build tests measure]

OUT keeps a log for each step and the measurement as moe.json. Each step is a process with a deadline of its own; one
that fails is reported and the next begins.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from qwen_nvfp4_serve.errors import UnsupportedHostError

ROOT = Path(__file__).resolve().parents[4]
DEADLINES_S = {"build": 240, "tests": 200, "measure": 300}
TESTS = ROOT / "tests" / "kernels" / "nvfp4_moe" / "test_moe_on_card.py"


def card() -> str:
    """This machine's card as the compiler names it. Raises UnsupportedHostError without one."""
    if not torch.cuda.is_available():
        raise UnsupportedHostError("no NVIDIA card to compile for")
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}" + ("a" if major >= 9 else "")


def command_of(step: str, out: Path, commit: str) -> list[str]:
    """What a step runs."""
    if step == "build":
        return [sys.executable, "-m", "qwen_nvfp4_serve.kernels.build", "--cards", card()]
    if step == "tests":
        words = ["-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", "--durations=5", str(TESTS)]
        return [sys.executable, "-m", "pytest", *words]
    module = "qwen_nvfp4_serve.kernels.nvfp4_moe.measure"
    return [sys.executable, "-m", module, str(out / "moe.json"), "--commit", commit]


def run(step: str, out: Path, commit: str) -> tuple[str, str]:
    """Runs one step; what came of it in words, and the end of what it said."""
    log, began = out / f"{step}.log", time.monotonic()
    try:
        with log.open("w") as sink:
            done = subprocess.run(
                command_of(step, out, commit),
                stdout=sink,
                stderr=subprocess.STDOUT,
                timeout=DEADLINES_S[step],
                check=False,
            )
        outcome = "ok" if done.returncode == 0 else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        outcome = f"not done in {DEADLINES_S[step]} s"
    lines = log.read_text(errors="replace").splitlines()
    return f"{step}: {outcome} in {time.monotonic() - began:.0f} s", "\n".join(lines[-40:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps asked for; 1 if any did not end well."""
    parser = argparse.ArgumentParser(prog="measure-moe", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", nargs="+", choices=list(DEADLINES_S), default=list(DEADLINES_S))
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"},
    )
    commit = git.stdout.strip() or "unknown"
    outcomes = []
    for step in chosen.steps:
        outcome, end = run(step, chosen.out, commit)
        outcomes.append(outcome)
        print(f"--- {outcome}\n{end}", flush=True)
    print("---", *outcomes, sep="\n")
    return int(any(": ok in " not in outcome for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
