"""The `gpu` target on its stand-in base: everything about it that can be had without a card."""

from __future__ import annotations

import json

import bases
import pytest
from engine import docker, need, run
from stack import TAGS, build

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def image() -> str:
    """The built image; its build-time checks have passed."""
    arguments = {"GPU_BASE": bases.gpu_base(), "CPU_BASE": bases.cpu_base(), "FLASHINFER_KERNELS": "none"}
    return build("gpu", arguments)


def inside(code: str) -> str:
    """What Python prints in a container of the image, started as the stack starts it."""
    confined = ("--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--cap-drop", "ALL")
    return need(docker(), "run", "--rm", *confined, "--entrypoint", "python3", TAGS["gpu"], "-c", code).strip()


def test_gpu_image_has_one_plugin_and_vllm_of_its_window(image: str) -> None:
    code = "from qwen_nvfp4_serve import preflight as p; p.check_plugin(); print(p.check_version('cuda'))"
    assert inside(code).splitlines()[-1].startswith("0.33.")


def test_gpu_image_loads_every_kernel_library_built_for_all_cards(image: str) -> None:
    code = (
        "from qwen_nvfp4_serve.kernels.build import LIBRARIES, PREBUILT, find, load\n"
        "for library in LIBRARIES: load(library); print(find(library, (PREBUILT,)).name)"
    )
    names = inside(code).splitlines()
    assert names
    assert all(name.endswith("-all.so") for name in names)


def test_gpu_image_runs_as_a_number_with_caches_under_one_root(image: str) -> None:
    config = json.loads(need(docker(), "image", "inspect", image))[0]["Config"]
    assert config["User"] == "1000:1000"
    assert config["Entrypoint"] == ["qwen-nvfp4", "serve"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", "qwen-nvfp4", "ready"]
    assert list(config["Volumes"]) == ["/cache"]
    environment = dict(row.split("=", 1) for row in config["Env"])
    caches = (
        "HF_HOME",
        "CACHE_DIR",
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "CUDA_CACHE_PATH",
    )
    assert all(environment[name].startswith("/cache/") for name in caches)


def test_gpu_image_without_a_card_says_so(image: str) -> None:
    done = run(docker(), "run", "--rm", "--read-only", "--tmpfs", "/tmp:exec,mode=1777", image)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "DEVICE=cuda and nvidia-smi shows no card" in done.stderr
