"""What `qwen-nvfp4 bench` shows: the progress bar and the table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from qwen_nvfp4_serve.bench.result import Result
    from qwen_nvfp4_serve.bench.runner import Order

PAGE_ONLY = ("peak t/s (req)", "ttfr (ms)", "est_ppt (ms)")  # columns too many for a terminal
PIPE_WIDTH = 120


def run_with_progress(order: Order) -> Result:
    """Runs the benchmark under a progress bar on standard error."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from qwen_nvfp4_serve.bench.runner import Step, run_bench

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
            failed = f"  [red]{step.failures} failed[/]" if step.failures else ""
            progress.update(task, total=step.total, completed=step.done, description=step.doing + failed)

        return run_bench(order, observe)


def show_result(result: Result, console: Console) -> None:
    """Prints the table, then what failed and the goodput."""
    from rich.box import SIMPLE
    from rich.table import Table

    from qwen_nvfp4_serve.bench.rows import HEADERS, table_rows

    shown = [index for index, header in enumerate(HEADERS) if header not in PAGE_ONLY]
    table = Table(title=f"{result.label}: {result.server.model} on {result.card}", box=SIMPLE, padding=(0, 1, 0, 0))
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
