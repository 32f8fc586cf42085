"""What a patch is, and what came of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Platform(enum.Enum):
    """Where a patch is meant for."""

    CPU = "cpu"
    GPU = "gpu"


class Need(NamedTuple):
    """Whether this process needs a patch, and the reason in a few words."""

    needed: bool
    reason: str


class State(enum.Enum):
    """What became of a patch in this process."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change to vLLM.

    platform: None for both. changes: what in vLLM becomes different. why: what fails or is worse without it. upstream:
    the link that tracks it, None if there is none. remove_when: the condition to drop it. serves_nvfp4: without it no
    NVFP4 model starts on this platform. needed: asks the vLLM in this process. apply: makes the change; both import
    vLLM and run once.
    """

    name: str
    platform: Platform | None
    changes: str
    why: str
    upstream: str | None
    remove_when: str
    serves_nvfp4: bool = False
    needed: Callable[[], Need]
    apply: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A patch's state with its reason."""

    name: str
    state: State
    reason: str


class Check(NamedTuple):
    """One finding for the doctor or the launcher: `sentence` says what holds, or what fails and what to do."""

    name: str
    ok: bool
    sentence: str
