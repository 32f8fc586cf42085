"""The measurement of a card in steps: each outcome is kept, and the table is made of what is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.kernels.admission import card_report
from qwen_nvfp4_serve.kernels.admission.card_report import Step, Visit


@pytest.fixture
def visit(tmp_path: Path) -> Visit:
    return Visit(out=tmp_path, model="27b", folder=None, engine={}, all_shapes=False)


def python(code: str, deadline_s: float = 20) -> Step:
    return Step("probe", deadline_s, lambda _: ([sys.executable, "-c", code], {"MORE": "1"}))


@pytest.mark.parametrize(
    ("step", "outcome", "last"),
    [
        (python("import os; print('done', os.environ['MORE'], os.environ['BASE'])"), "ok", "done 1 2"),
        (python("import sys; print('why'); sys.exit(3)"), "exit code 3", "why"),
        (python("import time; print('begun', flush=True); time.sleep(60)", 1), "not done in 1 s", "begun"),
    ],
    ids=["ok", "failure", "too long"],
)
def test_step_outcome_and_last_line_are_kept(visit: Visit, step: Step, outcome: str, last: str) -> None:
    found = card_report.run_step(step, visit, {"BASE": "2"})
    assert (found["outcome"], found["last"]) == (outcome, last)


def test_step_without_a_model_folder_says_what_is_missing(visit: Visit) -> None:
    step = next(step for step in card_report.STEPS if step.name == "admission")
    assert "--model" in card_report.run_step(step, visit, {})["outcome"]


def test_engine_steps_differ_in_who_computes_and_in_nothing_else(visit: Visit, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    here = Visit(out=tmp_path, model="27b", folder=tmp_path, engine={"max_model_len": 4096}, all_shapes=False)
    specs: dict[str, dict[str, Any]] = {}
    for label, backend in (("stock", "stock"), ("ours", "hybrid")):
        command, environment = card_report.engine_step(label)(here)
        assert environment["QWEN_NVFP4_BACKEND"] == backend
        specs[label] = json.loads(Path(command[3]).read_text())["configurations"][label]
    # Ours for linear layers and experts alike; a backend that is named would be vLLM's.
    assert [specs["stock"].pop(name) for name in ("linear_backend", "moe_backend")] == ["marlin", "marlin"]
    assert specs["stock"] == specs["ours"]
    assert specs["ours"]["max_model_len"] == 4096


def test_engine_spec_is_one_that_the_worker_reads(visit: Visit, tmp_path: Path) -> None:
    from qwen_nvfp4_serve.bench.engine import read_spec

    (tmp_path / "config.json").write_text("{}")
    here = Visit(out=tmp_path, model="27b", folder=tmp_path, engine={}, all_shapes=False)
    command, _ = card_report.engine_step("ours")(here)
    assert read_spec(Path(command[3]).read_text()).streams == (1, 8)


def test_plugin_is_found_where_the_package_is_not_installed(tmp_path: Path) -> None:
    folder = card_report.plugin_folder(tmp_path / "plugin")
    code = (
        "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p];"
        "from importlib.metadata import entry_points;"
        f"print([p.value for p in entry_points(group={card_report.GROUP!r})])"
    )
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['qwen_nvfp4_patches:register']"


def test_table_shows_rates_ratio_weights_and_admission(tmp_path: Path) -> None:
    for label, rate in (("stock", 80.0), ("ours", 92.0)):
        run = {"decode": {"1": {"median": rate}, "8": {"median": 6 * rate}}, "prefill": {"8192": {"median": 7000.0}}}
        (tmp_path / f"engine-27b-{label}.json").write_text(json.dumps({"runs": [run]}))
        (tmp_path / f"engine-{label}-27b.log").write_text("x Model loading took 25.18 GiB memory and 3 seconds\n")
    admission = {"took_s": 12.0, "again_s": 0.2, "summary": ["[1, 2]: M>=1 qwen-dequantized"]}
    (tmp_path / "admission-27b.json").write_text(json.dumps(admission))
    shown = card_report.table(tmp_path, "27b")
    assert "| decode 1, t/s | 80.0 | 92.0 | 1.150 |" in shown
    assert "| prefill 8192, t/s | 7000.0 | 7000.0 | 1.000 |" in shown
    assert "| model loading took, GiB | 25.18 | 25.18 | |" in shown
    assert "admission: 12.0 s, again 0.20 s" in shown


def test_table_of_nothing_has_empty_cells(tmp_path: Path) -> None:
    assert "| decode 1, t/s |  |  |  |" in card_report.table(tmp_path, "27b")
