"""One check's outcome."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """seen and needed as text; says: one sentence; do: the line to type or the setting to change, "" when all is well.

    ok: nothing is wrong. unsupported: this host cannot run what was asked, whatever the settings.
    """

    id: str
    ok: bool
    seen: str
    needed: str
    says: str
    do: str = ""
    unsupported: bool = False


def passed(name: str, seen: str, needed: str, says: str) -> Check:
    """A check that found nothing wrong."""
    return Check(id=name, ok=True, seen=seen, needed=needed, says=says)


def failed(name: str, *, seen: str, needed: str, says: str, do: str, unsupported: bool = False) -> Check:
    """A check that did; its sentence ends with what to do, so that it stands alone in a log."""
    return Check(id=name, ok=False, seen=seen, needed=needed, says=f"{says}: {do}", do=do, unsupported=unsupported)
