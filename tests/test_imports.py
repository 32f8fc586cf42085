"""`src` imports with no torch, no vLLM and no GPU (kernels aside), and arrows point one way."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import qwen_nvfp4_serve

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
HEAVY = ("torch", "vllm", "transformers", "flashinfer", "triton")
LAYERS = ("errors", "units", "versions", "dims", "gpus", "models", "planner", "settings", "launch", "serve", "cli")

WALK = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ImportError("imported " + name)
sys.meta_path.insert(0, Refuse())
for name in {names!r}:
    importlib.import_module(name)
"""


def light_modules() -> list[str]:
    found = pkgutil.walk_packages(qwen_nvfp4_serve.__path__, "qwen_nvfp4_serve.")
    names = [module.name for module in found]
    return [name for name in names if ".kernels" not in name and not name.endswith(("sitecustomize", "__main__"))]


def test_src_imports_without_torch_or_vllm() -> None:
    code = WALK.format(heavy=HEAVY, names=light_modules())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def imports_of(path: Path) -> set[str]:
    """Absolute module names that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_src_never_imports_patches() -> None:
    for path in SOURCES:
        assert not any(name.startswith("qwen_nvfp4_patches") for name in imports_of(path)), path


def test_src_never_imports_vllm_but_to_measure_beside_it() -> None:
    for path in SOURCES:
        if path == ROOT / "src" / "qwen_nvfp4_serve" / "kernels" / "nvfp4_moe" / "stock.py":
            continue
        assert not any(name == "vllm" or name.startswith("vllm.") for name in imports_of(path)), path


def test_src_arrows_point_from_actions_to_facts() -> None:
    rank = {name: index for index, name in enumerate(LAYERS)}
    for path in SOURCES:
        own = path.relative_to(ROOT / "src" / "qwen_nvfp4_serve").parts[0].removesuffix(".py")
        if own not in rank:
            continue
        for name in imports_of(path):
            target = name.removeprefix("qwen_nvfp4_serve.").split(".")[0]
            if name.startswith("qwen_nvfp4_serve.") and target in rank:
                assert rank[target] <= rank[own], f"{path} imports {name}"


def test_settings_is_the_only_reader_of_knobs_in_the_environment() -> None:
    """Other modules may look at the environment for paths and for what vLLM's processes are told, never for a knob."""
    from qwen_nvfp4_serve.settings import knobs

    allowed = {"settings.py", "bootstrap.py"}  # bootstrap runs before settings can be imported
    for path in SOURCES:
        if path.name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                line = path.read_text().splitlines()[node.lineno - 1]
                assert not any(f'"{name}"' in line for name in knobs()), f"{path}:{node.lineno}: {line.strip()}"
