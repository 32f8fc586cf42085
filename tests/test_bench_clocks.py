"""What the card did while a figure was taken, from a stand-in for nvidia-smi that loops as it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import left_of

from qwen_nvfp4_serve.bench.clocks import (
    Clocks,
    ClockWatch,
    cap_line,
    clocks_section,
    parse_sample,
    reduce_samples,
    sampling_words,
    watched_clocks,
)

STEADY = "1980, 3201, 520.5, 61, 0x0000000000000000"
CAPPED = "1830, 3201, 698.2, 66, 0x0000000000000004"
UNKNOWN = "1980, [N/A], [N/A], [Unknown Error], [N/A]"
NOT_A_FIELD = 'Field "clocks_event_reasons.active" is not a valid field to query.'
# Prints the samples once, or again and again with --loop-ms, and holds them back as any program does that writes into
# a pipe.
STAND_IN = """#!{python} -S
import os, sys, time
said = open({words!r}, "a")
print(os.getpid(), *sys.argv[1:], file=said, flush=True)
if {old} and "clocks_event_reasons" in " ".join(sys.argv):
    print({refusal!r})
    sys.exit(2)
loops = any(word.startswith("--loop-ms=") for word in sys.argv)
while True:
    print(open({output!r}, errors="surrogateescape").read())
    if not loops:
        break
    time.sleep({every_s})
"""


class Smi:
    """A stand-in on PATH, and what it was asked."""

    def __init__(self, folder: Path):
        self.folder = folder

    def install(self, *lines: str, old: bool = False, every_s: float = 0.002) -> None:
        (self.folder / "output").write_text("\n".join(lines))
        output, words = (str(self.folder / name) for name in ("output", "words"))
        code = STAND_IN.format(
            python=sys.executable, output=output, words=words, old=old, every_s=every_s, refusal=NOT_A_FIELD
        )
        script = self.folder / "nvidia-smi"
        script.write_text(code)
        script.chmod(0o755)

    def calls(self) -> list[list[str]]:
        words = self.folder / "words"
        return [line.split()[1:] for line in words.read_text().splitlines()] if words.exists() else []

    def processes(self) -> list[int]:
        return [int(line.split()[0]) for line in (self.folder / "words").read_text().splitlines()]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # the stand-in would not hold back
    return Smi(tmp_path)


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def measure(watch: ClockWatch, name: str, samples: int = 3) -> Clocks:
    """What a measurement finds that lasts for so many samples."""
    with watch.during(name):
        until(lambda: len(watch.samples) >= samples)
    return watch.found[name]


def test_watch_knows_clocks_power_heat_and_cause_of_a_measurement(smi: Smi) -> None:
    smi.install(STEADY, STEADY, CAPPED)
    with watched_clocks() as watch:
        found = measure(watch, "decode 8", samples=30)
    assert (found.sm_mhz, found.sm_mhz_low, found.memory_mhz_low) == (1980.0, 1830.0, 3201.0)
    assert (found.power_w, found.power_w_high, found.temperature_c_high) == (520.5, 698.2, 66.0)
    assert found.reasons == ("sw_power_cap",)
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
    query = ["--id=0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    assert smi.calls() == [query, [*query, "--loop-ms=100"]]
    assert not left_of(smi.processes(), 0.0)


def test_watch_has_a_sample_as_soon_as_it_is_printed(smi: Smi) -> None:
    smi.install(STEADY, every_s=0.5)  # in a pipe 4 KiB of them would come together, after many seconds
    with watched_clocks() as watch:
        assert measure(watch, "decode 1", samples=1).sm_mhz == 1980.0


def test_watch_asks_an_older_driver_by_its_name_of_the_causes(smi: Smi) -> None:
    smi.install(CAPPED, old=True)
    with watched_clocks() as watch:
        assert measure(watch, "decode 1").reasons == ("sw_power_cap",)
    assert "clocks_throttle_reasons.active" in smi.calls()[-1][1]


def test_watch_keeps_what_a_card_says_that_knows_few_values(smi: Smi) -> None:
    smi.install(UNKNOWN)
    with watched_clocks() as watch:
        assert measure(watch, "decode 1") == Clocks(sm_mhz=1980.0, sm_mhz_low=1980.0)


def test_watch_keeps_what_came_before_nvidia_smi_died(smi: Smi) -> None:
    smi.install(STEADY)
    threads = threading.active_count()
    with watched_clocks() as watch:
        measure(watch, "decode 1")
        os.kill(smi.processes()[-1], signal.SIGKILL)
        until(lambda: threading.active_count() == threads)
        with watch.during("decode 8"):
            pass
    assert list(watch.found) == ["decode 1"]


@pytest.mark.parametrize(
    "lines",
    [
        ("No devices were found",),
        ("1980, 3201",),
        ("\x00\udcff" * 9000,),
        ("[N/A], [N/A], [N/A], [N/A], [N/A]",),
        ("nan, inf, -5, 1e300, 4",),
        (),
    ],
)
def test_watch_of_nvidia_smi_that_says_nothing_of_use_starts_no_loop(smi: Smi, lines: tuple[str, ...]) -> None:
    smi.install()
    (smi.folder / "output").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with watched_clocks() as watch, watch.during("decode 1"):
        pass
    assert watch.found == {}
    assert len(smi.calls()) == 2  # by both names
    assert not left_of(smi.processes(), 0.0)


def test_watch_skips_garbage_between_samples(smi: Smi) -> None:
    smi.install("x" * 10_000, STEADY, "1, 2", ",,,,", "Unable to determine the device handle: GPU is lost")
    with watched_clocks() as watch:
        found = measure(watch, "decode 1", samples=10)
    assert (found.sm_mhz, found.sm_mhz_low, found.power_w_high, found.reasons) == (1980.0, 1980.0, 520.5, ())


def test_watch_without_nvidia_smi_finds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with watched_clocks() as watch, watch.during("decode 1"):
        pass
    assert watch.found == {}


@pytest.mark.parametrize(
    ("visible", "card"), [(None, "0"), ("3", "3"), ("2,0", "2"), ("GPU-1f,1", "GPU-1f"), ("", None), ("-1", None)]
)
def test_card_that_is_sampled_is_the_first_that_is_visible(smi: Smi, visible: str | None, card: str | None) -> None:
    smi.install(STEADY)
    words = sampling_words(visible)
    assert (words is None) == (card is None)
    assert words is None or words[1] == f"--id={card}"
    assert len(smi.calls()) == (card is not None)


def test_samples_of_one_measurement_are_not_of_the_next() -> None:
    watch = ClockWatch()
    with watch.during("decode 1"):
        watch.read([STEADY])
    watch.read([CAPPED])  # between them
    with watch.during("decode 8"):
        watch.read([STEADY.replace("1980", "1950")])
    with watch.during("prefill 8192"):  # over before a sample came
        pass
    assert {name: (one.sm_mhz, one.reasons) for name, one in watch.found.items()} == {
        "decode 1": (1980.0, ()),
        "decode 8": (1950.0, ()),
    }


def test_child_is_gone_after_a_measurement_that_failed(smi: Smi) -> None:
    smi.install(STEADY)
    found: dict[str, Clocks] = {}

    def fails() -> None:
        nonlocal found
        with watched_clocks() as watch, watch.during("decode 1"):
            found = watch.found
            until(lambda: len(watch.samples) >= 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert found == {}
    assert len(smi.processes()) == 2
    assert not left_of(smi.processes(), 0.0)


def test_child_is_gone_with_a_killed_parent(smi: Smi) -> None:
    smi.install(STEADY, every_s=600)  # what it writes to is gone as well, but it writes nothing
    code = """
import time
from qwen_nvfp4_serve.bench.clocks import watched_clocks
with watched_clocks():
    print("up", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        until(lambda: len(smi.calls()) == 2)
        assert left_of(smi.processes(), 0.0) == smi.processes()[1:]
        parent.kill()
    assert not left_of(smi.processes(), 10.0)


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        ("0x0000000000000000", ()),
        ("0x0000000000000001", ()),  # idle
        ("0x00000000000000E1", ("hw_power_brake", "hw_thermal", "sw_thermal")),
        ("0x11e", ("applications_clocks", "display", "hw_slowdown", "sw_power_cap", "sync_boost")),
        ("0x8000000000000200", ("0x200", "0x8000000000000000")),  # of a driver to come
        ("[N/A]", None),
        ("-0x4", None),
        ("0x" + "f" * 17, None),
    ],
)
def test_causes_are_read_from_bits(bits: str, names: tuple[str, ...] | None) -> None:
    sample = parse_sample(f"1980, 3201, 500, 60, {bits}\n")
    assert sample is not None
    found = reduce_samples([sample])
    assert found is not None
    assert found.reasons == names


def test_clocks_section_has_a_row_a_measurement_and_a_column_a_configuration() -> None:
    capped = Clocks(sm_mhz=1980.0, sm_mhz_low=1830.0, power_w=560.4, power_w_high=698.0, reasons=("sw_power_cap",))
    steady = Clocks(sm_mhz=1980.0, sm_mhz_low=1980.0, power_w=500.0, power_w_high=510.0, reasons=())
    rows = clocks_section({"a": {"decode 8": steady}, "b": {"decode 8": capped, "behind 65536": Clocks(sm_mhz=1980.0)}})
    assert rows[2:] == [
        "| | a | b |",
        "|:--|:--|:--|",
        "| decode 8 | 1,980 MHz (low 1,980), 500 W (high 510)"
        " | 1,980 MHz (low 1,830), 560 W (high 698), sw_power_cap |",
        "| behind 65536 |  | 1,980 MHz, reasons unknown |",
        "",
    ]
    assert clocks_section({"stock": {}, "ours": {}}) == []


def test_cap_line_tells_what_the_card_did_by_itself_from_what_was_set() -> None:
    power, heat = Clocks(reasons=("display", "sw_power_cap")), Clocks(reasons=("hw_thermal",))
    other = Clocks(reasons=("applications_clocks", "display", "sync_boost"))
    assert cap_line({"stock": {"decode 1": other}, "ours": {"decode 1": Clocks()}}) is None
    assert cap_line({"stock": {"decode 1": other, "decode 8": power}, "ours": {"decode 8": power, "x": heat}}) == (
        "The card lowered its clocks (hw_thermal, sw_power_cap) during decode 8 of stock; decode 8, x of ours."
    )
