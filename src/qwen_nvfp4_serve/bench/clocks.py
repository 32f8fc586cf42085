"""Whether the card kept its clocks while it was measured: nvidia-smi is read meanwhile, and no setting touched."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median
from threading import Thread

from pydantic import ConfigDict

from qwen_nvfp4_serve.bench.machine import read_number
from qwen_nvfp4_serve.bench.orphans import die_with_parent
from qwen_nvfp4_serve.host import run_probe

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
# Why clocks are below their highest, as bits of one number; drivers before 535 know the second name alone.
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
IDLE = 0x1  # nothing ran at that moment: it lowers no clock of a measurement
REASONS: dict[int, str] = {  # nvmlClocksEventReason… of nvml.h, CUDA 12.2
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display",
}
CAPS = frozenset({"sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})  # no one's wish
EVERY_MS = 100
LINE_LIMIT = 4096  # characters, so that a line without an end does not fill the memory
HIGHEST = 1e6  # no card's MHz, W or degrees: what is above is no answer
READER_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The card while one figure was taken: medians and extremes of its samples. None: the card does not say.

    power_w: nvidia-smi's, which is an average of the last second on most cards. reasons: every cause that was seen for
    clocks below their highest, a key of REASONS or the bit itself.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    sm_mhz: float | None = None
    sm_mhz_low: float | None = None
    memory_mhz_low: float | None = None
    power_w: float | None = None
    power_w_high: float | None = None
    temperature_c_high: float | None = None
    reasons: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """What nvidia-smi said at one moment; reasons are its bits."""

    sm_mhz: float | None
    memory_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    reasons: int | None


class ClockWatch:
    """Keeps samples of the measurement that runs, and of each one that is over what they come to."""

    def __init__(self) -> None:
        self.found: dict[str, Clocks] = {}
        self.samples: list[ClockSample] = []  # of the measurement that runs, or since the last

    def read(self, lines: Iterable[str]) -> None:
        """Takes nvidia-smi's lines until there are no more."""
        for line in lines:
            sample = parse_sample(line)
            if sample is not None:
                self.samples.append(sample)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """What comes in meanwhile is of the measurement `name`; nothing is kept of one that fails."""
        self.samples = []
        yield
        clocks = reduce_samples(tuple(self.samples))
        if clocks is not None:
            self.found[name] = clocks


@contextmanager
def watched_clocks(environ: Mapping[str, str] = os.environ) -> Iterator[ClockWatch]:
    """A watch that nvidia-smi feeds until the end; it finds nothing where there is no card, or nvidia-smi fails."""
    watch = ClockWatch()
    words = sampling_words(environ.get("CUDA_VISIBLE_DEVICES"))
    started = None if words is None else _start([*words, f"--loop-ms={EVERY_MS}"])
    if started is None:
        yield watch
        return
    child, terminal = started
    reader = Thread(target=_read, args=(terminal, watch), daemon=True)
    reader.start()
    try:
        yield watch
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        reader.join(READER_END_S)


def _start(words: Sequence[str]) -> tuple[subprocess.Popen[bytes], int] | None:
    """The process and what reads its output: a terminal, since programs hold back lines that go into a pipe."""
    try:
        here, there = os.openpty()
    except OSError:
        return None
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=there,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # one that is a script ends with what it started
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one call of libc, no lock
        )
    except OSError:
        os.close(here)
        return None
    finally:
        os.close(there)
    return child, here


def _read(terminal: int, watch: ClockWatch) -> None:
    with os.fdopen(terminal, errors="replace") as output, suppress(OSError):  # EIO: no one writes any more
        watch.read(iter(lambda: output.readline(LINE_LIMIT), ""))


def sampling_words(visible: str | None) -> tuple[str, ...] | None:
    """The command that prints one sample of the first card of CUDA_VISIBLE_DEVICES; None where none does."""
    card = "0" if visible is None else visible.split(",")[0].strip()
    if card in ("", "-1"):
        return None
    for reasons in REASON_FIELDS:
        query = ",".join((*FIELDS, reasons))
        words = ("nvidia-smi", f"--id={card}", f"--query-gpu={query}", "--format=csv,noheader,nounits")
        if any(map(parse_sample, (run_probe(*words) or "").splitlines())):
            return words
    return None


def parse_sample(line: str) -> ClockSample | None:
    """A sample from a line of nvidia-smi's CSV, a value that it does not know (`[N/A]`) as None; None where the line
    has another shape or no value at all."""
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(FIELDS) + 1:
        return None
    reasons = int(words[-1], 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", words[-1]) else None
    sm_mhz, memory_mhz, power_w, temperature_c = map(_measure, words[:-1])
    if reasons is None and {sm_mhz, memory_mhz, power_w, temperature_c} == {None}:
        return None
    return ClockSample(
        sm_mhz=sm_mhz, memory_mhz=memory_mhz, power_w=power_w, temperature_c=temperature_c, reasons=reasons
    )


def reduce_samples(samples: Sequence[ClockSample]) -> Clocks | None:
    """What the samples of one measurement come to; None where there are none."""
    if not samples:
        return None
    sm_mhz = [one.sm_mhz for one in samples if one.sm_mhz is not None]
    memory_mhz = [one.memory_mhz for one in samples if one.memory_mhz is not None]
    power_w = [one.power_w for one in samples if one.power_w is not None]
    bits = [one.reasons for one in samples if one.reasons is not None]
    return Clocks(
        sm_mhz=median(sm_mhz) if sm_mhz else None,
        sm_mhz_low=min(sm_mhz, default=None),
        memory_mhz_low=min(memory_mhz, default=None),
        power_w=median(power_w) if power_w else None,
        power_w_high=max(power_w, default=None),
        temperature_c_high=max((one.temperature_c for one in samples if one.temperature_c is not None), default=None),
        reasons=tuple(sorted({name for one in bits for name in _names(one)})) if bits else None,
    )


def clock_figures(clocks: Mapping[str, Clocks]) -> Iterator[tuple[str, float]]:
    """Every number of a run's clocks, and where it stands."""
    for name, one in clocks.items():
        for attribute in Clocks.__slots__:
            value = getattr(one, attribute)
            if isinstance(value, float):
                yield f"{name}.{attribute}", value


def clocks_section(runs: Mapping[str, Mapping[str, Clocks]]) -> list[str]:
    """Lines of a page, by configuration: a row for each measurement; none where nothing was sampled."""
    names = list(dict.fromkeys(name for clocks in runs.values() for name in clocks))
    if not names:
        return []
    lines = ["## The card meanwhile", "", f"| | {' | '.join(runs)} |", "|:--|" + ":--|" * len(runs)]
    for name in names:
        cells = [_cell(clocks[name]) if name in clocks else "" for clocks in runs.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def cap_line(runs: Mapping[str, Mapping[str, Clocks]]) -> str | None:
    """Where the card lowered its clocks by itself, and why; None where that was not seen."""
    causes: set[str] = set()
    places = []
    for label, clocks in runs.items():
        capped = [name for name, one in clocks.items() if CAPS.intersection(one.reasons or ())]
        causes.update(cause for name in capped for cause in clocks[name].reasons or () if cause in CAPS)
        if capped:
            places.append(f"{', '.join(capped)} of {label}")
    if not places:
        return None
    return f"The card lowered its clocks ({', '.join(sorted(causes))}) during {'; '.join(places)}."


def unrecorded_line(runs: Mapping[str, Mapping[str, Clocks]]) -> str | None:
    """Of which configurations nobody looked at the clocks: silence would read as if none was lowered."""
    labels = [label for label, clocks in runs.items() if not clocks]
    return f"What the card's clocks did meanwhile was not recorded: {', '.join(labels)}." if labels else None


def _cell(one: Clocks) -> str:
    words = []
    if one.sm_mhz is not None:
        low = "" if one.sm_mhz_low is None else f" (low {one.sm_mhz_low:,.0f})"
        words.append(f"{one.sm_mhz:,.0f} MHz{low}")
    if one.power_w is not None:
        high = "" if one.power_w_high is None else f" (high {one.power_w_high:,.0f})"
        words.append(f"{one.power_w:,.0f} W{high}")
    return ", ".join([*words, *(("reasons unknown",) if one.reasons is None else one.reasons)])


def _names(bits: int) -> Iterator[str]:
    for bit in (1 << place for place in range(bits.bit_length())):
        if bits & bit and bit != IDLE:
            yield REASONS.get(bit, f"{bit:#x}")


def _measure(text: str) -> float | None:
    value = read_number(text)
    return value if value is not None and 0 <= value < HIGHEST else None
