"""Everything that one machine with a card can tell, within a time: python -m tests.card_visit OUT [--minutes 20]

Not a test. Needs vLLM, nvcc and Triton; everything goes to OUT as JSON and logs, a table comes last. In this order, so
that what is timed has the card to itself and the minutes in which engines compile are used. The record is made of it by
`qwen-nvfp4 bench record --take OUT`:

    engines    build, admission; then for one model after the other: stock and ours start side by side and are measured
               one at a time; with --restarts each starts again after that, alone, from its own caches
    known      known answers of the embedded model, stock and ours, eager, compiled, with drafts, and with
               the delta net in BF16
    elected    how many experts eight streams elect; it and the known answers run while the first model's engines start,
               and nothing is timed before they are done
    logs       the engine logs for the planner
    kernels    the experts, the BF16 and the linear layers beside vLLM's, as long as there is time
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qwen_nvfp4_serve.kernels.admission.card_report import ENGINE, LABELS, environment_of
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec
from qwen_nvfp4_serve.synthetic.config import model_config
from qwen_nvfp4_serve.units import GIB

# Architecture, context, depths that are measured, and GiB of a pool that holds one such request or eight short ones.
MODELS = {
    "35b": ("35b-a3b", 262_144, (4_096, 65_536, 261_632), 6),
    "27b": ("27b", 262_144, (4_096, 65_536, 261_632), 10),
}
MOE = "35b"
START_S, KERNELS_S, SIDE_S, MEASURE_S, RESTART_S = 420.0, 150.0, 240.0, 200.0, 200.0
PARTS = ("engines", "known", "elected", "logs", "kernels")
CLI = "from qwen_nvfp4_serve.cli import main; main()"
STOCK = dict(LABELS["stock"][1])
KNOWN: dict[str, dict[str, Any]] = {
    "stock": STOCK,
    "stock-eager": {**STOCK, "enforce_eager": True},
    "ours": {},
    "ours-plain": {"plain": True},
    "ours-eager": {"enforce_eager": True},
    "ours-drafts": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
}


@dataclass(slots=True)
class Visit:
    """Where results go, until when, and what processes are given."""

    out: Path
    end_s: float
    environment: Mapping[str, str]

    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end_s - time.monotonic()

    def start(self, name: str, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        """A process whose output is kept as OUT/name.log."""
        with (self.out / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **self.environment, **more}
            )

    def finish(self, name: str, process: subprocess.Popen[bytes], limit_s: float) -> bool:
        """Waits, ends what takes longer, says how it went; True if well."""
        began = time.monotonic()
        try:
            code: int | None = process.wait(max(1.0, min(limit_s, self.left_s())))
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        outcome = "ended, out of time" if code is None else "ok" if code == 0 else f"exit code {code}"
        say(f"{name}: {outcome} after {time.monotonic() - began:.0f} s")
        if outcome != "ok":
            lines = (self.out / f"{name}.log").read_text(errors="replace").splitlines()
            print(*(line[:300] for line in lines[-12:]), sep="\n", flush=True)
        return outcome == "ok"

    def run(self, name: str, command: Sequence[str], limit_s: float) -> bool:
        """Starts and finishes."""
        return self.left_s() > 0 and self.finish(name, self.start(name, command), limit_s)


def say(text: str) -> None:
    """A line with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def module(name: str, *words: str) -> list[str]:
    """The command that runs a module of ours."""
    return [sys.executable, "-m", name, *words]


def this_card() -> str:
    """What nvcc calls it: compiling for one card takes a tenth of the time of all."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}" + ("a" if major >= 9 else "")


def write_config(folder: Path, architecture: str) -> None:
    """The config.json of a model of the real shape, NVFP4 as llm-compressor writes it, for dummy weights."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = CheckpointSpec(architecture=ARCHITECTURES[architecture], style="ct-w4a4")
    (folder / "config.json").write_text(json.dumps(model_config(spec)))


def start_engine(visit: Visit, model: str, label: str, restarts: int) -> subprocess.Popen[bytes]:
    """One engine that waits at its gate once it is up."""
    _, context, depths, pool_gib = MODELS[model]
    backend, options = LABELS[label]
    spec: dict[str, Any] = {
        "model_folder": str(visit.out / model),
        "configurations": {
            label: {
                **ENGINE,
                **options,
                "gpu_memory_utilization": 0.2,
                "kv_cache_memory_bytes": pool_gib * GIB,
                "max_model_len": context,
                "skip_tokenizer_init": True,
            }
        },
        "prefills": [2048, 8192],
        "depths": depths,
        "profile_streams": [1, 8],
        "restarts": restarts,
    }
    name = f"engine-{model}-{label}"
    for gate in ("ready", "go"):  # an earlier visit's would let it be timed beside the others
        (visit.out / f"{name}.{gate}").unlink(missing_ok=True)
    (visit.out / f"{name}.spec.json").write_text(json.dumps(spec, indent=1))
    words = [str(visit.out / f"{name}.spec.json"), str(visit.out / f"{name}.json"), str(visit.out / name)]
    return visit.start(name, module("qwen_nvfp4_serve.bench.engine_worker", *words), QWEN_NVFP4_BACKEND=backend)


def await_ready(visit: Visit, name: str, engine: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Waits at an engine's gate."""
    ready = visit.out / f"{name}.ready"
    while not ready.exists() and engine.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.2)
    say(f"{name}: {'ready' if ready.exists() else 'not ready'}")


def admit(visit: Visit, models: Sequence[str]) -> None:
    """Tries kernels for each model, with the card to itself, so that engines find the tables."""
    for model in models:
        words = ["kernels", "--config", str(visit.out / model), "--json"]
        visit.run(f"admission-{model}", [sys.executable, "-c", CLI, *words], 180)


def engines(visit: Visit, model: str, restarts: int, known: Sequence[str], elected: bool) -> None:
    """Starts a model's engines and what runs beside that, waits for all, then measures one engine after the other."""
    began_s = time.monotonic()
    running = {label: start_engine(visit, model, label, restarts) for label in LABELS}
    beside = start_beside(visit, known, elected)
    for label, engine in running.items():
        await_ready(visit, f"engine-{model}-{label}", engine, began_s + min(START_S, visit.left_s()))
    finish_beside(visit, beside, began_s + START_S)
    for label, engine in running.items():
        (visit.out / f"engine-{model}-{label}.go").touch()
        visit.finish(f"engine-{model}-{label}", engine, MEASURE_S + restarts * RESTART_S)


def start_beside(visit: Visit, known: Sequence[str], elected: bool) -> dict[str, subprocess.Popen[bytes]]:
    """Engines that nothing times, all at once: of the embedded model in each of these ways of KNOWN, and of MOE."""
    beside = {}
    for way in known:
        command = module("tests.known_on_card", str(visit.out / f"known-{way}.json"), json.dumps(KNOWN[way]))
        backend = LABELS["stock" if way.startswith("stock") else "ours"][0]
        beside[f"known-{way}"] = visit.start(f"known-{way}", command, QWEN_NVFP4_BACKEND=backend)
    if elected:
        command = module("tests.elected_on_card", str(visit.out / MOE), str(visit.out / "elected.json"))
        beside["elected"] = visit.start("elected", command, QWEN_NVFP4_BACKEND=LABELS["stock"][0])
    return beside


def finish_beside(visit: Visit, beside: Mapping[str, subprocess.Popen[bytes]], deadline_s: float) -> None:
    """Waits for what they find."""
    for name, process in beside.items():
        visit.finish(name, process, deadline_s - time.monotonic())


def kernels(visit: Visit, marlin: Path | None, commit: str) -> None:
    """Times of the kernels, each with nothing beside it."""
    compared = ["--marlin", str(marlin), "--vllm", version("vllm")] if marlin else []
    for name, package, words in (
        ("moe", "nvfp4_moe", []),
        ("bf16", "bf16_linear", []),
        ("linear", "nvfp4_linear", compared),
    ):
        target = [str(visit.out / f"{name}.json"), "--commit", commit]
        visit.run(name, module(f"qwen_nvfp4_serve.kernels.{package}.measure", *target, *words), KERNELS_S)


def table(out: Path, models: Sequence[str]) -> str:
    """What came out, in a few lines."""
    lines = []
    for model in models:
        runs = {}
        for label in LABELS:
            path = out / f"engine-{model}-{label}.json"
            runs[label] = json.loads(path.read_text())["runs"][0] if path.exists() else None
        for kind in ("decode", "prefill"):
            keys = next((run[kind] for run in runs.values() if run), {})
            for key in keys:
                rates = [run[kind][key]["median"] if run else None for run in runs.values()]
                ratios = [f"{rate / rates[0]:.3f}" if rate and rates[0] else "-" for rate in rates]
                shown = " ".join(f"{rate:.1f}" if rate else "-" for rate in rates)
                lines.append(f"{model} {kind} {key}: {shown} ratios {' '.join(ratios)}")
    for path in sorted(out.glob("known-*.json")):
        known = json.loads(path.read_text())
        lines.append(f"{path.stem}: wrong {known['wrong']} of {known['asked']}, alone {known['wrong_alone']}")
    return "\n".join(lines)


def main() -> None:
    """Runs everything that there is time for."""
    parser = argparse.ArgumentParser(prog="card_visit", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--known", nargs="+", choices=list(KNOWN), default=list(KNOWN), help="what known answers are asked"
    )
    parser.add_argument("--commit", default="unknown", help="of this project, for the record")
    parser.add_argument("--restarts", type=int, default=0, help="of each engine, from its own caches, a minute each")
    parser.add_argument("--marlin", type=Path, help="vLLM's _C_stable_libtorch, for the linear layers beside Marlin")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        end_s = time.monotonic() + chosen.minutes * 60
        known = chosen.known if "known" in chosen.parts else ()
        elected = "elected" in chosen.parts and MOE in chosen.models
        visit = Visit(chosen.out, end_s, environment_of(Path(scratch) / "plugin"))
        visit.run("build", module("qwen_nvfp4_serve.kernels.build", "--cards", this_card()), 300)
        for model in chosen.models:
            write_config(chosen.out / model, MODELS[model][0])
        if "engines" in chosen.parts:
            admit(visit, chosen.models)
            for model in chosen.models:
                first = model == chosen.models[0]
                engines(visit, model, chosen.restarts, known if first else (), elected and first)
        else:
            finish_beside(visit, start_beside(visit, known, elected), time.monotonic() + START_S)
        if "logs" in chosen.parts:
            visit.run("engine-logs", module("tests.record_engine_logs", str(chosen.out / "engine_logs.json")), SIDE_S)
        if "kernels" in chosen.parts:
            kernels(visit, chosen.marlin, chosen.commit)
    print(table(chosen.out, chosen.models))


if __name__ == "__main__":
    main()
