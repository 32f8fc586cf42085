"""What the machine says of its cards, from a stand-in for nvidia-smi."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_nvfp4_serve import host
from qwen_nvfp4_serve.host import Gpu, detect_gpus, run_probe

CARD = "NVIDIA H200, 9.0, 143771, 143000, 580.65.06"
OTHER = "NVIDIA GB10, 12.1, [N/A], [N/A], 580.95.05"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts a command on PATH that prints the bytes given."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def prints(content: bytes) -> None:
        (tmp_path / "output").write_bytes(content)
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\nexec cat '{tmp_path}/output'\n")
        script.chmod(0o755)

    return prints


def test_detect_gpus_reads_a_line_a_card_and_knows_what_is_not_said(nvidia_smi: Callable[[bytes], None]) -> None:
    nvidia_smi(f"{CARD}\n{OTHER}\nno card here\n".encode())
    h200, gb10 = detect_gpus()
    assert (h200.name, h200.capability, h200.driver) == ("NVIDIA H200", (9, 0), "580.65.06")
    assert (h200.memory_bytes, h200.free_bytes) == (143771 * host.MIB, 143000 * host.MIB)
    assert (gb10.capability, gb10.memory_bytes, gb10.free_bytes) == ((12, 1), None, None)


def test_detect_gpus_follows_the_visible_indices(nvidia_smi: Callable[[bytes], None]) -> None:
    nvidia_smi(f"{CARD}\n{OTHER}\n".encode())
    names = {visible: [gpu.name for gpu in detect_gpus(visible)] for visible in ("1,0", "1", "7", "", "-1", "GPU-1f")}
    both = ["NVIDIA H200", "NVIDIA GB10"]
    assert names == {"1,0": both[::-1], "1": both[1:], "7": [], "": [], "-1": [], "GPU-1f": both}


@pytest.mark.parametrize("digit", ["²", "٣", "①"])
def test_detect_gpus_digits_that_are_no_ascii_are_unknown(nvidia_smi: Callable[[bytes], None], digit: str) -> None:
    nvidia_smi(f"card, 9.{digit}, {digit}, {digit}, 1\n".encode())
    unknown = Gpu(name="card", capability=None, memory_bytes=None, free_bytes=None, driver="1")
    assert detect_gpus() == (unknown,)
    assert detect_gpus(digit) == (unknown,)


def test_detect_gpus_output_that_is_no_utf8_still_counts(nvidia_smi: Callable[[bytes], None]) -> None:
    nvidia_smi(b"card \xff, 9.0, 1, 1, 1\n")
    (gpu,) = detect_gpus()
    assert gpu.capability == (9, 0)
    assert gpu.name.startswith("card ")


def test_run_probe_missing_or_failing_command_is_none(nvidia_smi: Callable[[bytes], None], tmp_path: Path) -> None:
    assert run_probe("no-such-command-here") is None
    nvidia_smi(b"")
    (tmp_path / "output").unlink()
    assert run_probe("nvidia-smi") is None
