"""Can this host serve? Facts in, checks out; every failure says what was seen, what is needed and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qwen_nvfp4_serve.doctor import card_checks, host_checks, setup_checks
from qwen_nvfp4_serve.doctor.check import Check
from qwen_nvfp4_serve.doctor.facts import Facts, facts_from

__all__ = ["CHECKS", "Check", "Diagnosis", "Facts", "diagnose", "facts_from"]

# In the order they are shown. A check returns None when the facts it needs are unknown.
CHECKS: tuple[Callable[[Facts], Check | None], ...] = (
    card_checks.check_card,
    card_checks.check_cards,
    card_checks.check_driver,
    card_checks.check_compat,
    card_checks.check_torch,
    card_checks.check_wsl,
    card_checks.check_unified,
    card_checks.check_memory,
    host_checks.check_docker,
    host_checks.check_compose,
    host_checks.check_toolkit,
    host_checks.check_shm,
    host_checks.check_disk,
    host_checks.check_cache_owner,
    host_checks.check_port,
    host_checks.check_jobs,
    setup_checks.check_env,
    setup_checks.check_access,
    setup_checks.check_versions,
    setup_checks.check_plugin,
    setup_checks.check_patches,
    setup_checks.check_kernels,
    setup_checks.check_compile_cache,
    setup_checks.check_unused,
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks that had facts to judge. ok: none failed. unsupported: one failed that no setting can mend."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True when no check failed."""
        return all(check.ok for check in self.checks)

    @property
    def unsupported(self) -> bool:
        """True when this host cannot run what was asked."""
        return any(check.unsupported for check in self.checks)


def diagnose(facts: Facts) -> Diagnosis:
    """The outcome of every check on these facts."""
    outcomes = (check(facts) for check in CHECKS)
    return Diagnosis(tuple(outcome for outcome in outcomes if outcome is not None))
