"""Everything that one machine with a card can tell, within a time: python -m tests.card_visit OUT [--minutes 20]

Not a test. Needs vLLM, nvcc and Triton; everything goes to OUT as JSON and logs, a table comes last. In this order, so
that what is timed has the card to itself and the minutes in which engines compile are used. The record is made of it by
`qwen-nvfp4 bench record --take OUT`:

    build, admission        with nothing beside them
    engines start           stock and ours of each model, all at once; meanwhile engine logs and known answers
    engines are measured    one at a time; with --restarts each starts again then, from the caches of its first start
    kernels                 the experts and the linear layers beside Marlin, as long as there is time
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
from pathlib import Path
from typing import Any

from qwen_nvfp4_serve.kernels.admission.card_report import ENGINE, LABELS, environment_of
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec
from qwen_nvfp4_serve.synthetic.config import model_config
from qwen_nvfp4_serve.units import GIB

# Architecture, context, and the depths that are measured.
MODELS = {"35b": ("35b-a3b", 262_144, (4_096, 65_536, 261_632)), "27b": ("27b", 70_000, (4_096, 65_536))}
POOL_GIB = 6  # holds one request of the 35B's whole context, and eight short ones of either model
START_S, KERNELS_S, SIDE_S, MEASURE_S, RESTART_S = 420.0, 150.0, 240.0, 120.0, 200.0
CLI = "from qwen_nvfp4_serve.cli import main; main()"
KNOWN = {
    "stock": {"linear_backend": "marlin", "moe_backend": "marlin"},
    "ours": {},
    "ours-eager": {"enforce_eager": True},
    "ours-drafts": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
}


@dataclass(slots=True)
class Visit:
    """Where results go, until when, and what processes are given."""

    out: Path
    end_s: float
    environment: Mapping[str, str]
    restarts: int = 0

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


def write_config(folder: Path, architecture: str) -> None:
    """The config.json of a model of the real shape, NVFP4 as llm-compressor writes it, for dummy weights."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = CheckpointSpec(architecture=ARCHITECTURES[architecture], style="ct-w4a4")
    (folder / "config.json").write_text(json.dumps(model_config(spec)))


def start_engine(visit: Visit, model: str, label: str) -> subprocess.Popen[bytes]:
    """One engine that waits at its gate once it is up."""
    _, context, depths = MODELS[model]
    backend, options = LABELS[label]
    spec: dict[str, Any] = {
        "model_folder": str(visit.out / model),
        "configurations": {
            label: {
                **ENGINE,
                **options,
                "gpu_memory_utilization": 0.2,
                "kv_cache_memory_bytes": POOL_GIB * GIB,
                "max_model_len": context,
                "skip_tokenizer_init": True,
            }
        },
        "prefills": [2048, 8192],
        "depths": depths,
        "restarts": visit.restarts,
    }
    name = f"engine-{model}-{label}"
    (visit.out / f"{name}.spec.json").write_text(json.dumps(spec, indent=1))
    words = [str(visit.out / f"{name}.spec.json"), str(visit.out / f"{name}.json"), str(visit.out / name)]
    return visit.start(name, module("qwen_nvfp4_serve.bench.engine_worker", *words), QWEN_NVFP4_BACKEND=backend)


def engines(visit: Visit, models: Sequence[str]) -> None:
    """Starts all, uses their start for what is not timed, then measures one after another."""
    running = {(model, label): start_engine(visit, model, label) for model in models for label in LABELS}
    logs = visit.start("engine-logs", module("tests.record_engine_logs", str(visit.out / "engine_logs.json")))
    for name, options in KNOWN.items():
        backend = LABELS["stock" if name == "stock" else "ours"][0]
        command = module("tests.known_on_card", str(visit.out / f"known-{name}.json"), json.dumps(options))
        asked = visit.start(f"known-{name}", command, QWEN_NVFP4_BACKEND=backend)
        visit.finish(f"known-{name}", asked, SIDE_S)
    visit.finish("engine-logs", logs, SIDE_S)
    deadline = time.monotonic() + min(START_S, visit.left_s())
    for (model, label), engine in running.items():
        ready = visit.out / f"engine-{model}-{label}.ready"
        while not ready.exists() and engine.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        say(f"engine-{model}-{label}: {'ready' if ready.exists() else 'not ready'}")
    for (model, label), engine in running.items():
        (visit.out / f"engine-{model}-{label}.go").touch()
        visit.finish(f"engine-{model}-{label}", engine, MEASURE_S + visit.restarts * RESTART_S)


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
                ratio = f"{rates[1] / rates[0]:.3f}" if all(rates) else "-"
                lines.append(f"{model} {kind} {key}: {' '.join(f'{r:.1f}' if r else '-' for r in rates)} ratio {ratio}")
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
    parser.add_argument(
        "--restarts", type=int, default=0, help="starts of each engine from its caches, a minute or two each"
    )
    parser.add_argument("--marlin", type=Path, help="vLLM's _C_stable_libtorch, for the linear layers beside Marlin")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        end_s = time.monotonic() + chosen.minutes * 60
        visit = Visit(chosen.out, end_s, environment_of(Path(scratch) / "plugin"), chosen.restarts)
        visit.run("build", module("qwen_nvfp4_serve.kernels.build"), 300)
        for model in chosen.models:
            write_config(chosen.out / model, MODELS[model][0])
            words = ["kernels", "--config", str(chosen.out / model), "--json"]
            visit.run(f"admission-{model}", [sys.executable, "-c", CLI, *words], 180)
        engines(visit, chosen.models)
        moe = str(chosen.out / "moe.json")
        visit.run("moe", module("qwen_nvfp4_serve.kernels.nvfp4_moe.measure", moe), KERNELS_S)
        linear = [str(chosen.out / "linear.json"), *(["--marlin", str(chosen.marlin)] if chosen.marlin else [])]
        visit.run("linear", module("qwen_nvfp4_serve.kernels.nvfp4_linear.measure", *linear), KERNELS_S)
    print(table(chosen.out, chosen.models))


if __name__ == "__main__":
    main()
