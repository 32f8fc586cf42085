"""Everything that one card can tell about the linear kernels, a step at a time, and a short table at the end.

python -m qwen_nvfp4_serve.kernels.admission.card_report OUT [--steps build tests …] [--model 27b=FOLDER]

OUT keeps one JSON file a step, so that a later call adds what an earlier one had no time for. Each step is a process
with its own deadline; one that fails is reported and the next begins. A folder of a model needs config.json and
tokenizer: the engine runs on dummy weights, stock and ours in processes of their own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UnsupportedHostError, UsageError

ROOT = Path(__file__).resolve().parents[4]
GROUP = "vllm.general_plugins"
PLUGIN = "qwen_nvfp4"
QUICK_SHAPES = ("gate_up", "down", "attn_qkv", "attn_o")
# What an engine takes unless --engine says otherwise. Marlin is what vLLM is compared with: its other choices for an
# H200 compile for minutes first.
ENGINE: Mapping[str, Any] = {
    "gdn_prefill_backend": "triton",
    "gpu_memory_utilization": 0.6,
    "kernel_config": {"enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False},
}
LABELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "stock": ("stock", {"linear_backend": "marlin", "moe_backend": "marlin"}),
    "ours": ("hybrid", {}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What is asked: where results go, which model, and the options of its engine."""

    out: Path
    model: str
    folder: Path | None
    engine: Mapping[str, Any]
    all_shapes: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A named process. command: made when its turn comes. deadline_s: then it is ended."""

    name: str
    deadline_s: float
    command: Callable[[Visit], tuple[list[str], Mapping[str, str]]]


def build_step(_visit: Visit) -> tuple[list[str], Mapping[str, str]]:
    """Compiles for this card alone, which takes a tenth of the time of all."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedHostError("no NVIDIA card to compile for")
    major, minor = torch.cuda.get_device_capability()
    card = f"{major}{minor}" + ("a" if major >= 9 else "")
    return [sys.executable, "-m", "qwen_nvfp4_serve.kernels.build", "--cards", card], {}


def tests_step(_visit: Visit) -> tuple[list[str], Mapping[str, str]]:
    """Every test that needs a card."""
    if importlib.util.find_spec("pytest") is None:
        raise UsageError("tests", seen="pytest is not installed", do="Leave this step out: admission checks as well.")
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests/kernels"),
    ], {}


def admission_step(visit: Visit) -> tuple[list[str], Mapping[str, str]]:
    """Admits kernels for the model, as its first start would."""
    code = (
        "import json, sys, time; from qwen_nvfp4_serve.host import detect_gpus;"
        "from qwen_nvfp4_serve.dims import dims_from_config;"
        "from qwen_nvfp4_serve.kernels.admission import admit, summary;"
        "from qwen_nvfp4_serve.kernels.admission.shapes import linear_shapes;"
        "from qwen_nvfp4_serve.kernels.admission.table import to_json;"
        "shapes = linear_shapes(dims_from_config(json.load(open(sys.argv[1]))));"
        "table = admit(shapes, card=detect_gpus()[0]); begin = time.monotonic();"
        "admit(shapes, card=detect_gpus()[0]); again = time.monotonic() - begin;"
        "lines = summary(table); print(*lines, sep='\\n');"
        "json.dump({**to_json(table), 'again_s': again, 'summary': lines}, open(sys.argv[2], 'w'), indent=1)"
    )
    return [sys.executable, "-c", code, str(_config(visit)), str(visit.out / f"admission-{visit.model}.json")], {}


def kernels_step(visit: Visit) -> tuple[list[str], Mapping[str, str]]:
    """Errors and times over the models' shapes, beside Marlin where vLLM's library is found."""
    command = [sys.executable, "-m", "qwen_nvfp4_serve.kernels.nvfp4_linear.measure"]
    command += [str(visit.out / f"linear-{visit.model}.json"), "--commit", _commit()]
    if not visit.all_shapes:
        command += ["--shapes", *(f"{visit.model}/{layer}" for layer in QUICK_SHAPES)]
    found = importlib.util.find_spec("vllm")
    libraries = (
        [lib for place in (found.submodule_search_locations or []) for lib in Path(place).glob("_C_stable*.so")]
        if found
        else []
    )
    if libraries:
        command += ["--marlin", str(libraries[0])]
    return command, {}


def engine_step(label: str) -> Callable[[Visit], tuple[list[str], Mapping[str, str]]]:
    """One engine of the model, `stock` or `ours`."""

    def command(visit: Visit) -> tuple[list[str], Mapping[str, str]]:
        backend, options = LABELS[label]
        spec = {
            "model_folder": str(_config(visit).parent.resolve()),
            "configurations": {label: {**ENGINE, **options, **visit.engine}},
            "streams": [1, 8],
        }
        path = visit.out / f"spec-{visit.model}-{label}.json"
        path.write_text(json.dumps(spec, indent=1))
        target = visit.out / f"engine-{visit.model}-{label}.json"
        words = [sys.executable, "-m", "qwen_nvfp4_serve.bench.engine_worker", str(path), str(target)]
        return words, {"QWEN_NVFP4_BACKEND": backend, "VLLM_PLUGINS": PLUGIN}

    return command


STEPS = (
    Step("build", 300, build_step),
    Step("tests", 240, tests_step),
    Step("admission", 90, admission_step),
    Step("kernels", 420, kernels_step),
    Step("engine-ours", 480, engine_step("ours")),
    Step("engine-stock", 480, engine_step("stock")),
)


def run_step(step: Step, visit: Visit, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs one step and keeps its output in OUT. What came of it, as JSON values."""
    begin = time.monotonic()
    log = visit.out / f"{step.name}-{visit.model}.log"
    try:
        command, more = step.command(visit)
        with log.open("w") as sink:
            done = subprocess.run(
                command,
                env={**os.environ, **environment, **more},
                stdout=sink,
                stderr=subprocess.STDOUT,
                timeout=step.deadline_s,
                check=False,
            )
        outcome = "ok" if done.returncode == 0 else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        outcome = f"not done in {step.deadline_s:g} s"
    except QwenNvfp4Error as error:
        outcome = str(error)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    last = next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
    return {
        "step": step.name,
        "model": visit.model,
        "outcome": outcome,
        "took_s": round(time.monotonic() - begin, 1),
        "last": last,
    }


def plugin_folder(scratch: Path) -> Path:
    """A folder with metadata that lets vLLM find our plugin where the package runs from its sources."""
    info = scratch / "qwen_nvfp4_serve-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qwen-nvfp4-serve\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{PLUGIN} = qwen_nvfp4_patches:register\n")
    return scratch


def environment_of(scratch: Path) -> dict[str, str]:
    """Our sources, and the plugin's metadata unless the package is installed, in front of PYTHONPATH."""
    installed = any(point.name == PLUGIN for point in entry_points(group=GROUP))
    parts = [str(ROOT / "src"), str(ROOT / "patches"), *([] if installed else [str(plugin_folder(scratch))])]
    return {"PYTHONPATH": os.pathsep.join([*parts, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def table(out: Path, model: str) -> str:
    """The results in OUT as a short Markdown table: engine rates, their ratio, weights, and who serves what."""
    runs = {label: _run(out / f"engine-{model}-{label}.json") for label in LABELS}
    lines = [f"| {model} | stock | ours | ours / stock |", "|---|---|---|---|"]
    for kind, key in (("decode", "1"), ("decode", "8"), ("prefill", "8192")):
        stock, ours = (run.get(kind, {}).get(key, {}).get("median") for run in runs.values())
        ratio = f"{ours / stock:.3f}" if stock and ours else ""
        cells = [f"{rate:.1f}" if rate else "" for rate in (stock, ours)]
        lines.append(f"| {kind} {key}, t/s | {' | '.join(cells)} | {ratio} |")
    loaded = [_loading_took(out / f"engine-{label}-{model}.log") for label in LABELS]
    lines.append(f"| model loading took, GiB | {' | '.join(loaded)} | |")
    try:
        admission = json.loads((out / f"admission-{model}.json").read_text())
        lines += [
            "",
            f"admission: {admission['took_s']:.1f} s, again {admission['again_s']:.2f} s",
            *admission["summary"],
        ]
    except (OSError, ValueError, KeyError):
        lines += ["", "admission: no result"]
    return "\n".join(lines)


def _run(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())["runs"][0]
    except (OSError, ValueError, KeyError, IndexError):
        return {}
    return found


def _loading_took(log: Path) -> str:
    """The figure in vLLM's line "Model loading took 25.18 GiB memory and 3.1 seconds"."""
    text = log.read_text(errors="replace") if log.exists() else ""
    _, _, rest = text.rpartition("Model loading took ")
    return rest.split()[0] if rest else ""


def _config(visit: Visit) -> Path:
    if visit.folder is None or not (visit.folder / "config.json").is_file():
        raise UsageError("--model", seen=str(visit.folder), expected="NAME=FOLDER, a folder with config.json")
    return visit.folder / "config.json"


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps asked for; 1 if any did not end well."""
    parser = argparse.ArgumentParser(prog="measure-linear", description=__doc__)
    parser.add_argument("out", type=Path)
    names = [step.name for step in STEPS]
    parser.add_argument("--steps", nargs="+", choices=names, default=names)
    parser.add_argument("--model", default="27b", help="27b or 35b, or NAME=FOLDER with the folder of its config.json")
    parser.add_argument("--engine", default="{}", help="more keyword arguments of vllm.LLM, as JSON")
    parser.add_argument("--all-shapes", action="store_true", help="time every layer shape, not only the four largest")
    chosen = parser.parse_args(arguments)
    name, _, folder = chosen.model.partition("=")
    chosen.out.mkdir(parents=True, exist_ok=True)
    visit = Visit(
        out=chosen.out,
        model=name,
        folder=Path(folder) if folder else None,
        engine=json.loads(chosen.engine),
        all_shapes=chosen.all_shapes,
    )
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        environment = environment_of(Path(scratch) / "plugin")
        for step in (step for step in STEPS if step.name in chosen.steps):
            outcomes.append(run_step(step, visit, environment))
            print(json.dumps(outcomes[-1]), flush=True)
            (visit.out / f"steps-{name}-{step.name}.json").write_text(json.dumps(outcomes[-1], indent=1))
    text = table(visit.out, name)
    (visit.out / f"table-{name}.md").write_text(text + "\n")
    print(text)
    return int(any(outcome["outcome"] != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
