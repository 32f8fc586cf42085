"""Admission with candidates that are broken on purpose: each is left out, with its reason."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels import admission_candidates as broken

from qwen_nvfp4_serve.host import Gpu
from qwen_nvfp4_serve.kernels import admission
from qwen_nvfp4_serve.kernels.admission import Finding, Limits, Shape, Table, Verdict, left_out, store, trial
from qwen_nvfp4_serve.kernels.admission.parent import SMALL_KERNEL, try_all

ROOT = Path(__file__).parents[2]
SPEC = "tests.kernels.admission_candidates:every"
SHAPES = (Shape(128, 128), Shape(96, 256))
CARD = Gpu(name="Test Card", capability=(12, 0), memory_bytes=None, free_bytes=None, driver="590.1")


def judge(candidate: broken.Right, shape: Shape = SHAPES[0]) -> Finding:
    """The finding of this process, timed by a clock that every call takes 5 us of."""
    stages: list[str] = []
    found = trial.try_one(
        candidate, shape, device=torch.device("cpu"), capability=(12, 0), timer=lambda _: 5.0, say=stages.append
    )
    assert stages == ["first", "check", "time"][: len(stages)]
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("candidate", [broken.Right(), broken.FewTokens(), broken.Rounds()], ids=lambda c: c.name)
def test_right_candidate_is_admitted_with_a_time_for_each_m_it_takes(candidate: broken.Right, shape: Shape) -> None:
    found = judge(candidate, shape)
    assert (found.verdict, found.reason) == (Verdict.ADMITTED, "")
    assert [m for m, _ in found.times_us][-1] == (candidate.max_tokens or 4096)
    assert {us for _, us in found.times_us} == {5.0}


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (broken.OneScaleOff(), "times what is allowed"),
        (broken.WritesPast(), "past its output"),
        (broken.HalfPrecision(), "inputs times"),
        (broken.ForgetsBias(), "with bias"),
        (broken.OneScaleForAll(), "times what is allowed"),
        (broken.Restless(), "two calls differ"),
        (broken.RoundsBadly(), "rounded activations differ"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_wrong_candidate_is_left_out_with_what_is_wrong(candidate: broken.Right, words: str) -> None:
    found = judge(candidate)
    assert found.verdict is Verdict.WRONG
    assert words in found.reason


def test_candidate_that_leaves_padding_is_seen_at_padded_sizes_though_the_model_has_none() -> None:
    candidate = broken.LeavesPadding()
    assert judge(candidate, Shape(128, 128)).verdict is Verdict.ADMITTED
    said: list[str] = []
    reason = trial.try_padded(candidate, 4, torch.device("cpu"), (12, 0), said.append)
    assert said == ["first"]  # before each size, of which the first was enough
    assert reason is not None
    assert "unwritten or NaN at M=1, from row 128" in reason
    assert "[200, 768]" in reason


def test_candidate_that_does_not_take_the_shape_is_unsupported_and_never_run() -> None:
    found = judge(broken.Raises(), Shape(64, 192))
    assert (found.verdict, found.reason) == (Verdict.UNSUPPORTED, "K = 192")


def table_of(findings: Sequence[Finding]) -> Table:
    return Table(facts={}, findings=tuple(findings), took_s=1.0)


@pytest.fixture(scope="module")
def tried() -> Table:
    """Real children, one candidate after another, among them those that end or block their process."""
    names = (
        "right",
        "few",
        "one-scale-off",
        "leaves-padding",
        "crashes",
        "raises",
        "hangs",
        "compiles",
        "absent",
        "slow",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = partial(admission.start_process, shapes=SHAPES[:1], device="cpu", spec=SPEC, environment=environment)
    limits = Limits(start_s=60, silence_s=3, total_s=110)
    return table_of(try_all(names, SHAPES[:1], start=start, limits=limits))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("right", Verdict.ADMITTED, ""),
        ("few", Verdict.ADMITTED, ""),
        ("one-scale-off", Verdict.WRONG, "times what is allowed"),
        ("leaves-padding", Verdict.WRONG, "unwritten"),
        ("crashes", Verdict.CRASHED, "SIGSEGV"),
        ("raises", Verdict.CRASHED, "no kernel image is available"),
        ("hangs", Verdict.HUNG, "no report for 3 s"),
        ("compiles", Verdict.NOT_READY, "no report for 3 s"),
        ("absent", Verdict.UNSUPPORTED, "not installed"),
    ],
)
def test_child_processes_leave_each_candidate_out_with_its_reason(
    tried: Table, name: str, verdict: Verdict, words: str
) -> None:
    (found,) = [finding for finding in tried.findings if finding.candidate == name]
    assert found.verdict is verdict, found.reason
    assert words in found.reason


@pytest.mark.slow
def test_slow_candidate_is_measured_and_left_out_as_slow(tried: Table) -> None:
    reasons = dict(left_out(tried, SHAPES[0]))
    assert reasons["slow"].startswith("slow: ")
    assert "right" not in reasons
    assert not tried.final  # a library was still building


class Script:
    """A child that reports what it is told to, on a clock of its own: None is silence, an exception its end."""

    def __init__(self, clock: list[float], reports: Sequence[Mapping[str, Any] | type[EOFError] | None]) -> None:
        self.clock, self.reports = clock, list(reports)

    def receive(self, timeout_s: float) -> Mapping[str, Any] | None:
        report = self.reports.pop(0)
        self.clock[0] += timeout_s if report is None else 1.0
        if report is EOFError:
            raise EOFError
        return report  # type: ignore[return-value]

    def stop(self) -> str:
        return "SIGABRT, out of luck"


def step(name: str, stage: str = "check", *, compiles: bool = False) -> dict[str, Any]:
    return {"step": {"candidate": name, "n": 128, "k": 128, "stage": stage, "compiles": compiles}}


def good(name: str) -> dict[str, Any]:
    times = [[m, 1.0] for m in (1, 2)]
    return {"finding": {"candidate": name, "n": 128, "k": 128, "verdict": "admitted", "reason": "", "times_us": times}}


def follow(*scripts: Sequence[Any], names: Sequence[str] = ("a", "b")) -> tuple[dict[str, Finding], list[list[str]]]:
    clock, asked, waiting = [0.0], [], list(scripts)

    def start(left: Sequence[str]) -> Script:
        asked.append(list(left))
        return Script(clock, waiting.pop(0))

    found = try_all(names, SHAPES[:1], start=start, limits=Limits(), clock=lambda: clock[0])
    return {finding.candidate: finding for finding in found}, asked


START: dict[str, Any] = {"step": {"stage": "start"}}


def test_crash_costs_the_candidate_at_work_and_the_next_child_goes_on() -> None:
    found, asked = follow((START, step("a"), EOFError), (START, step("b"), good("b"), {"done": True}))
    assert asked == [["a", "b"], ["b"]]
    assert found["a"].verdict is Verdict.CRASHED
    assert found["a"].reason == "ended the process at [128, 128] in its check stage: SIGABRT, out of luck"
    assert found["b"].verdict is Verdict.ADMITTED


def test_crash_after_its_findings_does_not_undo_them() -> None:
    found, asked = follow((START, step("a"), good("a"), EOFError), (START, step("b"), good("b"), {"done": True}))
    assert asked == [["a", "b"], ["b"]]
    assert found["a"].verdict is Verdict.ADMITTED


@pytest.mark.parametrize(("compiles", "verdict"), [(False, Verdict.HUNG), (True, Verdict.NOT_READY)])
def test_silence_is_a_hang_unless_a_library_may_be_compiling(compiles: bool, verdict: Verdict) -> None:
    found, _ = follow((START, step("a", compiles=compiles), None), (START, step("b"), good("b"), {"done": True}))
    assert found["a"].verdict is verdict


def test_child_that_does_not_start_judges_nobody() -> None:
    found, asked = follow((EOFError,))
    assert len(asked) == 1
    assert {finding.verdict for finding in found.values()} == {Verdict.NOT_READY}
    assert "SIGABRT" in found["b"].reason


@pytest.mark.parametrize("end", [EOFError, None])
def test_small_kernel_that_ends_or_blocks_a_child_costs_no_candidate_and_is_not_tried_again(
    end: type[EOFError] | None,
) -> None:
    clock, spaced = [0.0], []
    scripts = [(START, {"step": {"stage": SMALL_KERNEL}}, end), (START, step("a"), good("a"), {"done": True})]

    def start(_: Sequence[str], **how: bool) -> Script:
        spaced.append(how.get("spaced", True))
        return Script(clock, scripts.pop(0))

    (found,) = try_all(("a",), SHAPES[:1], start=start, limits=Limits(), clock=lambda: clock[0])
    assert found.verdict is Verdict.ADMITTED
    assert spaced == [True, False]


def test_end_of_the_time_judges_nobody() -> None:
    busy = [step("a")] * 39
    found, _ = follow((START, *busy, None))
    assert {finding.verdict for finding in found.values()} == {Verdict.NOT_READY}
    assert found["b"].reason == "not tried in 45 s"


def test_end_of_the_time_undoes_no_finding() -> None:
    clock, shapes = [0.0], (Shape(128, 128), Shape(96, 256))
    script = (START, step("a"), good("a"), *[step("a")] * 39, None)
    found = try_all(("a",), shapes, start=lambda _: Script(clock, script), limits=Limits(), clock=lambda: clock[0])
    assert [finding.verdict for finding in found] == [Verdict.ADMITTED, Verdict.NOT_READY]


def admit(directory: Path, *scripts: Sequence[Any], shapes: Sequence[Shape] = SHAPES[:1], card: Gpu = CARD) -> Table:
    waiting = list(scripts)
    return admission.admit(
        shapes, card=card, names=("a",), directory=directory, start=lambda _: Script([0.0], waiting.pop(0))
    )


RIGHT = (START, step("a"), good("a"), {"done": True})


def test_admit_twice_reads_the_kept_table_and_starts_no_child(tmp_path: Path) -> None:
    first = admit(tmp_path, RIGHT)
    assert admit(tmp_path) == first
    assert store.kept(tmp_path) == (first,)
    assert first.facts["card"] == "Test Card"


@pytest.mark.parametrize(
    "change", [{"driver": "590.2"}, {"name": "Another Card"}], ids=lambda change: next(iter(change))
)
def test_admit_after_a_change_of_driver_or_card_asks_again(tmp_path: Path, change: dict[str, Any]) -> None:
    import dataclasses

    admit(tmp_path, RIGHT)
    admit(tmp_path, RIGHT, card=dataclasses.replace(CARD, **change))
    assert len(store.kept(tmp_path)) == 2


def test_admit_for_another_model_asks_again(tmp_path: Path) -> None:
    admit(tmp_path, RIGHT)
    with pytest.raises(IndexError):  # no script left: a child was started
        admit(tmp_path, shapes=SHAPES[1:])


def test_admit_after_a_library_was_not_ready_asks_again(tmp_path: Path) -> None:
    first = admit(tmp_path, (START, step("a", compiles=True), None))
    assert not first.final
    assert admit(tmp_path, RIGHT).final


def test_admit_takes_what_another_worker_found_while_it_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_final = admit(tmp_path, (START, step("a", compiles=True), None))
    (path,) = tmp_path.glob("*.json")
    wait = store.alone

    @contextlib.contextmanager
    def busy(waited_for: Path) -> Iterator[None]:
        with wait(waited_for):
            later_s = time.time() + 5
            os.utime(path, (later_s, later_s))
            yield

    monkeypatch.setattr(store, "alone", busy)
    assert admit(tmp_path) == not_final


def test_admit_with_a_damaged_table_asks_again(tmp_path: Path) -> None:
    first = admit(tmp_path, RIGHT)
    (path,) = tmp_path.glob("*.json")
    path.write_text('{"facts": {}')
    assert admit(tmp_path, RIGHT).findings == first.findings


def test_facts_change_with_the_kernels_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = store.facts(CARD)
    extra = tmp_path / "more.py"
    extra.write_text("x = 1")
    assert store.source_digest() == before["sources"] != store.source_digest(extra)
    monkeypatch.setattr(store, "SOURCES", ("nvfp4.py",))
    assert store.facts(CARD)["sources"] != before["sources"]
