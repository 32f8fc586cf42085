"""What a measurement is of: a running server, how to reach it, and the name that the run goes by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qwen_nvfp4_serve.bench.machine import Card, Machine, describe_machine, is_remote, query_cards
from qwen_nvfp4_serve.bench.result import ServerFacts
from qwen_nvfp4_serve.bench.server import describe_server
from qwen_nvfp4_serve.smoke import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """label: the run's name. remote: the server is not on this machine; card_name is then what the user said.

    reference: the model is one that comes with this package, small and trained on few phrasings.
    """

    server: ServerFacts
    api_key: str | None
    label: str
    remote: bool
    card_name: str | None = None
    reference: bool = False


def subject_of(
    server: Server, *, label: str, card: str | None = None, log: Path | None = None, plan: Path | None = None
) -> Subject:
    """A subject that the server is asked about; log and plan as `describe_server` takes them.

    Raises UsageError when a file that was named cannot be read.
    """
    return Subject(
        server=describe_server(server, log=log, plan=plan),
        api_key=server.api_key,
        label=label,
        remote=is_remote(server.base_url),
        card_name=card,
        reference=bool(server.known),
    )


def machine_of(subject: Subject, before: tuple[Card, ...] | None) -> Machine:
    """This machine at the end of a run. before: its cards as they were at the beginning."""
    return describe_machine(remote=subject.remote, card_name=subject.card_name, before=before, after=query_cards())
