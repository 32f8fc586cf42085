"""docker-compose.yml passes on every knob. What Compose makes of it is asked in tests/docker."""

from __future__ import annotations

import re
from pathlib import Path

from qwen_nvfp4_serve.settings import knobs
from qwen_nvfp4_serve.settings_names import COMPOSE_NAMES

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docker-compose.yml"
# Set by the image, or secret: `docker inspect` shows every variable of a container.
NOT_PASSED_ON = {"DEVICE", "CACHE_DIR", "HF_HOME", "VLLM_API_KEY", "HF_TOKEN"}


def test_every_knob_reaches_the_server_and_no_secret_does() -> None:
    block = FILE.read_text().partition("environment: &knobs\n")[2].partition("  volumes:\n")[0]
    passed = set(re.findall(r"^    ((?!QWEN_NVFP4_)[A-Z0-9_]+):(?: \$\{\1:-[^}]+\})?$", block, re.MULTILINE))
    assert set(knobs()) - passed == NOT_PASSED_ON, "docker-compose.yml, under `environment: &knobs`"
    assert passed <= set(knobs())


def test_names_that_only_compose_reads_are_known_and_documented() -> None:
    read = set(re.findall(r"\$\{(QWEN_NVFP4_[A-Z_]+)", FILE.read_text()))
    assert read == COMPOSE_NAMES
    table = (ROOT / "docs" / "docker.md").read_text().replace("`…_", "`QWEN_NVFP4_")
    assert {name for name in COMPOSE_NAMES if f"`{name}`" not in table} == set()
