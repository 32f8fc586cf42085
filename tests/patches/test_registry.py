"""Which patches are applied, and what is said before vLLM starts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_nvfp4_patches import registry
from qwen_nvfp4_patches.patch import Need, Patch, Platform, State
from qwen_nvfp4_serve.errors import UnsupportedHostError, UsageError

applied: list[str] = []
PATCH = Patch(
    name="probe",
    platform=Platform.CPU,
    changes="nothing",
    why="to test",
    upstream=None,
    remove_when="never",
    needed=lambda: Need(True, "the probe is missing"),
    apply=lambda: applied.append("probe"),
)


@pytest.fixture(autouse=True)
def forget() -> None:
    applied.clear()


def settle(patch: Patch = PATCH, *, version: str = "0.32.0", enabled: bool = True) -> registry.Outcome:
    return registry._settle(patch, Platform.CPU, version, enabled)


def test_needed_patch_inside_the_window_is_applied() -> None:
    assert settle().state is State.APPLIED
    assert applied == ["probe"]


def test_patch_that_is_not_needed_says_why_and_changes_nothing() -> None:
    patch = dataclasses.replace(PATCH, needed=lambda: Need(False, "vLLM has its own"))
    assert settle(patch) == registry.Outcome("probe", State.NOT_NEEDED, "vLLM has its own")
    assert applied == []


def test_patch_for_another_platform_is_not_even_asked() -> None:
    def explode() -> Need:
        raise AssertionError

    patch = dataclasses.replace(PATCH, platform=Platform.GPU, needed=explode)
    assert settle(patch).state is State.NOT_NEEDED


def test_needed_patch_with_patches_off_is_left_out_with_the_reason() -> None:
    outcome = settle(enabled=False)
    assert outcome.state is State.OFF
    assert "the probe is missing" in outcome.reason
    assert applied == []


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0"])
def test_needed_patch_outside_the_window_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(UnsupportedHostError) as caught:
        settle(version=version)
    assert version in str(caught.value)
    assert ">=0.32,<0.34" in str(caught.value)
    assert applied == []


def test_patch_outside_the_window_that_is_not_needed_does_not_stop_the_start() -> None:
    patch = dataclasses.replace(PATCH, needed=lambda: Need(False, "merged upstream"))
    assert settle(patch, version="0.40.0").state is State.NOT_NEEDED


def test_vllm_that_cannot_be_asked_counts_as_in_need() -> None:
    def gone() -> Need:
        raise AttributeError("no such list")

    patch = dataclasses.replace(PATCH, needed=gone)
    with pytest.raises(UnsupportedHostError, match="no such list"):
        settle(patch, version="0.40.0")


def test_records_are_complete_and_names_unique() -> None:
    names = [patch.name for patch in registry.PATCHES]
    assert len(set(names)) == len(names)
    for patch in registry.PATCHES:
        assert patch.changes
        assert patch.why
        assert patch.remove_when
        assert patch.upstream is None or patch.upstream.startswith("https://")


def test_checks_nvfp4_on_cpu_with_patches_off_is_refused_naming_the_patches() -> None:
    bad = [check for check in registry.checks(vllm_version="0.32.0", enabled=False) if not check.ok]
    assert [check.name for check in bad] == ["nvfp4-without-patches"]
    assert "cpu-nvfp4-linear, cpu-nvfp4-moe" in bad[0].sentence
    assert "PATCHES=on" in bad[0].sentence


@pytest.mark.parametrize(("nvfp4", "gpu", "version"), [(False, False, "0.32.0"), (True, True, "0.33.0")])
def test_checks_patches_off_is_fine_where_none_is_vital(nvfp4: bool, gpu: bool, version: str) -> None:
    assert all(check.ok for check in registry.checks(vllm_version=version, gpu=gpu, nvfp4=nvfp4, enabled=False))


def test_checks_outside_the_window_names_both_versions() -> None:
    bad = [check for check in registry.checks(vllm_version="0.32.0", gpu=True) if not check.ok]
    assert "0.32.0" in bad[0].sentence
    assert ">=0.33,<0.34" in bad[0].sentence


@pytest.mark.parametrize("value", ["0", "yes", "OFF"])
def test_switch_with_an_unknown_value_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(registry.SWITCH, value)
    with pytest.raises(UsageError, match="expected on or off"):
        registry.patches_enabled()


def test_importing_the_plugin_imports_nothing_else() -> None:
    code = "import sys, qwen_nvfp4_patches; print([m for m in ('torch', 'vllm', 'packaging') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_register_twice_applies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import qwen_nvfp4_patches

    calls: list[int] = []
    monkeypatch.setattr(qwen_nvfp4_patches, "_registered", False)
    monkeypatch.setattr(registry, "apply_all", lambda: calls.append(1))
    qwen_nvfp4_patches.register()
    qwen_nvfp4_patches.register()
    assert calls == [1]


def test_docs_show_the_records_as_they_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "patches.md").read_text()
    shown = text.partition("holds it -->\n")[2].partition("<!-- end of table -->")[0]
    assert shown == registry.table()
