"""What `qwen-nvfp4 bench` runs and shows: the progress bar, the table, the engine bench."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

if TYPE_CHECKING:
    from qwen_nvfp4_serve.bench.engine import EngineSpec
    from qwen_nvfp4_serve.bench.result import Result
    from qwen_nvfp4_serve.bench.runner import Order, Step
    from qwen_nvfp4_serve.models import ModelRow

PAGE_ONLY = ("peak t/s (req)", "ttfr (ms)", "est_ppt (ms)")  # columns too many for a terminal
PIPE_WIDTH = 120
Found = TypeVar("Found")


def run_with_progress(order: Order) -> Result:
    """Runs the benchmark under a progress bar on standard error."""
    from qwen_nvfp4_serve.bench.runner import run_bench

    return under_progress(lambda observe: run_bench(order, observe))


def under_progress(work: Callable[[Callable[[Step], None]], Found], *, failed: str = "failed") -> Found:
    """What `work` returns; it is given a function that moves a progress bar on standard error.

    failed: the word for what a step counts as failures.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("starting", total=None)

        def observe(step: Step) -> None:
            counted = f"  [red]{step.failures} {failed}[/]" if step.failures else ""
            progress.update(task, total=step.total, completed=step.done, description=step.doing + counted)

        return work(observe)


def show_result(result: Result, console: Console) -> None:
    """Prints the table, then what failed or was odd and the goodput."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from qwen_nvfp4_serve.bench.report import odd_answers
    from qwen_nvfp4_serve.bench.rows import HEADERS, table_rows
    from qwen_nvfp4_serve.errors import printable

    shown = [index for index, header in enumerate(HEADERS) if header not in PAGE_ONLY]
    title = escape(printable(f"{result.label}: {result.server.model} on {result.card}"))
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for index in shown:
        table.add_column(HEADERS[index], justify="right" if index else "left", no_wrap=not index)
    for row in table_rows(result):
        words = (row.test, *row.cells)
        table.add_row(*(words[index] for index in shown), style="red" if row.failed else None)
    console.print(table)
    for kind, count in result.failure_counts().items():
        console.print(f"failed measured requests: {count} {kind}", style="red", markup=False)
    warm = sum(len(case.warmup_failures) for case in result.cases)
    if warm:
        console.print(f"failed requests in warm-up: {warm}", style="red", markup=False)
    for note in odd_answers(result):
        console.print(note, style="yellow", markup=False)
    for case in result.cases:
        if case.goodput is not None:
            seen = case.goodput
            name = f"{case.case.prefill}, {case.case.decode}"
            console.print(
                f"goodput of {name}: {seen.good}/{seen.requests}, {seen.good_requests_per_s:.2f} requests/s",
                markup=False,
            )


def screen() -> Console:
    """Standard output, wide enough for the table when it is not a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=PIPE_WIDTH)


def run_engine(spec: EngineSpec, out: Path, model: str | None) -> None:
    """Runs the worker in a process that becomes the engine, then writes and prints the page. A run that fails changes
    nothing in `out`."""
    from qwen_nvfp4_serve.bench.engine import check_spec, read_engine
    from qwen_nvfp4_serve.bench.engine_checks import check_engines
    from qwen_nvfp4_serve.bench.engine_page import engine_markdown
    from qwen_nvfp4_serve.bench.files import PAGE, check_page, write_whole, writing
    from qwen_nvfp4_serve.bench.measured import measured_model
    from qwen_nvfp4_serve.errors import UnsupportedHostError
    from qwen_nvfp4_serve.host import detect_gpus
    from qwen_nvfp4_serve.versions import check_vllm

    row = None if model is None else _model_row(model)
    check_engines(check_spec(spec))
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedHostError(check_vllm(None, gpu=bool(detect_gpus())).sentence)
    check_page(out)
    with writing(out), tempfile.TemporaryFile(dir=out):
        pass  # not to find that out after measuring
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        result_file = _measure_in(Path(own), spec)
        with writing(out):
            write_whole(out / result_file.name, result_file.read_bytes())
        result = read_engine(result_file)  # the one in `out` may be another run's by now
        page = engine_markdown(result, None if row is None else measured_model(row, result.runs))
    with writing(out):
        write_whole(out / PAGE, page.encode())
    screen().print(page, markup=False)


def _measure_in(own: Path, spec: EngineSpec) -> Path:
    """The file that the worker wrote. own: a folder of this run alone, also for what an interrupted worker leaves."""
    from qwen_nvfp4_serve.bench.engine import dump_spec
    from qwen_nvfp4_serve.bench.engine_worker import MODULE, SCRATCH
    from qwen_nvfp4_serve.bench.orphans import die_with_parent
    from qwen_nvfp4_serve.errors import QwenNvfp4Error
    from qwen_nvfp4_serve.preflight import installed_kind
    from qwen_nvfp4_serve.shims import python_path

    spec_file, result_file = own / "engine-spec.json", own / "engine.json"
    spec_file.write_bytes(dump_spec(spec))
    inherited = os.environ.get("PYTHONPATH")
    path = python_path(inherited) if installed_kind() == "cpu" else inherited
    environment = dict(os.environ) | {SCRATCH: str(own)} | ({"PYTHONPATH": path} if path else {})
    worker = [sys.executable, "-m", MODULE, str(spec_file), str(result_file)]
    code = subprocess.run(worker, env=environment, check=False, preexec_fn=die_with_parent).returncode
    if code != 0:
        raise QwenNvfp4Error("the engine bench failed", seen=f"exit code {code}", do="Its output is above.")
    return result_file


def _model_row(name: str) -> ModelRow:
    from qwen_nvfp4_serve.errors import UsageError
    from qwen_nvfp4_serve.models import find_model

    row = find_model(name)
    if row is None or row.dims is None:
        raise UsageError(
            "--model", seen=name, expected="a catalogue name with dimensions: `qwen-nvfp4 models` lists them"
        )
    return row
