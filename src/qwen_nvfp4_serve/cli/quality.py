"""`qwen-nvfp4 quality`: does a running model still answer right; compare two runs; make the page of a run again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qwen_nvfp4_serve.cli.measuring import new_folder, numbers, reach
from qwen_nvfp4_serve.cli.paths import path
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from qwen_nvfp4_serve.quality.result import Result
    from qwen_nvfp4_serve.quality.runner import Order
    from qwen_nvfp4_serve.quality.task import Exam

INTERRUPTED_FILE, PAGE = "quality-interrupted.json", "quality.md"
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

group = typer.Typer(invoke_without_command=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="quality")


@group.callback()
def quality(
    context: typer.Context,
    *,
    out: Path | None = typer.Option(None, parser=path, help="Folder for quality.json, the page and the chart. Needed."),
    base_url: str = typer.Option("", help="Endpoint to ask; by default the one that the settings serve."),
    model: str | None = typer.Option(None, help="Which of the endpoint's models; by default the first it lists."),
    api_key: str | None = typer.Option(
        None, help="Its key, '' for none; by default that of the settings, which no process list shows."
    ),
    quick: bool = typer.Option(False, help="A first look: fewer and shorter questions, unless options say otherwise."),
    families: str | None = typer.Option(None, help="Of needle,arithmetic,tools,long; by default all."),
    thinking: str | None = typer.Option(
        None, help="Of off,on,default (what the server does by itself); by default off,on."
    ),
    lengths: str | None = typer.Option(None, help="Needle prompts, tokens; by default 1024,4096,16384,65536."),
    depths: str | None = typer.Option(None, help="Where the needle stands, %; by default 0,25,50,75,100."),
    needles: int | None = typer.Option(None, help="Needles at each length and depth; by default 2."),
    each: int | None = typer.Option(None, help="Questions of each kind but needles; by default 8."),
    think_tokens: int | None = typer.Option(None, help="Room for thinking; by default 4096."),
    long_tokens: int | None = typer.Option(None, help="Room for a long answer; by default 1024."),
    seed: int = typer.Option(0, help="Seed of the questions."),
    concurrency: int | None = typer.Option(None, help="Questions asked at once; by default 8."),
    timeout_s: float | None = typer.Option(None, help="An answer that takes longer is missed; by default 600."),
    at_least: float | None = typer.Option(None, help="Exit with 1 below this share of right answers, %."),
    label: str = typer.Option("", help="Name of this run on the page and in the chart."),
    card: str | None = typer.Option(None, help="Name of the card, when the server is on another machine."),
    server_log: Path | None = typer.Option(
        None, parser=path, help="File with the server's log; its kernel lines are kept."
    ),
    env_file: Path | None = typer.Option(
        None, "--env-file", parser=path, help="Settings of the server instead of .env; its key is used."
    ),
) -> None:
    """Questions with one right answer to any OpenAI endpoint: needles, arithmetic, tool calls, long answers.

    Exit code 0: asked, whatever the score, 1: below --at-least or no answer, 2: wrong use, 130: interrupted.
    """
    if context.invoked_subcommand is not None:
        return
    from qwen_nvfp4_serve.bench.subject import subject_of
    from qwen_nvfp4_serve.quality.result import FILE
    from qwen_nvfp4_serve.quality.runner import Order

    exam = _exam(
        quick,
        seed=seed,
        families=_words(families),
        thinking=_words(thinking),
        lengths=_numbers("--lengths", lengths),
        depths=_numbers("--depths", depths),
        needles=needles,
        each=each,
        think_tokens=think_tokens,
        long_tokens=long_tokens,
        concurrency=concurrency,
        timeout_s=timeout_s,
    )
    if at_least is not None and not (math.isfinite(at_least) and 0 <= at_least <= 100):
        raise UsageError("--at-least", seen=f"{at_least:g}", expected="a share from 0 to 100 %")
    folder = new_folder(out, FILE)
    server = reach(base_url, env_file, api_key=api_key, model=model)
    subject = subject_of(server, label=label or folder.resolve().name, card=card, log=server_log)
    _ask(Order(exam=exam, subject=subject), folder, at_least)


@group.command()
def compare(
    first: Path = typer.Argument(parser=path, help="quality.json, or the folder it is in: the baseline."),
    second: Path = typer.Argument(parser=path, help="quality.json, or the folder it is in: what is compared with it."),
    out: Path | None = typer.Option(None, parser=path, help="Folder for a page and a chart."),
) -> None:
    """Two runs question by question, and whether they differ by more than chance."""
    from rich.box import SIMPLE
    from rich.table import Table

    from qwen_nvfp4_serve.bench.files import write_whole, writing
    from qwen_nvfp4_serve.cli.bench_screen import screen
    from qwen_nvfp4_serve.quality.compare import HEADERS, comparison_markdown, differences, draw_comparison, warnings
    from qwen_nvfp4_serve.quality.compare import compare as compare_results
    from qwen_nvfp4_serve.quality.result import read_result

    one, other = read_result(first), read_result(second)
    found = compare_results(one, other)
    console = screen()
    for name, here, there in differences(one, other):
        console.print(printable(f"{name} differs: {here} and {there}"), markup=False)
    for note in warnings(found):
        console.print(f"note: {note}", markup=False)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for header in HEADERS:
        table.add_column(header, justify="left" if header == HEADERS[0] else "right")
    for row in (*found.kinds, found.whole):
        table.add_row(*row.cells)
    console.print(table)
    console.print(f"both wrote exactly the same in {found.same_words} of {found.whole.pairs} pairs", markup=False)
    console.print(found.sentence, markup=False)
    if out is None:
        return
    with writing(out):
        chart: str | None = None
        try:
            chart = draw_comparison(one, other, found, out).name
        except QwenNvfp4Error as error:
            console.print(f"WARNING: {error}", markup=False)
        page = comparison_markdown(one, other, found, chart=chart)
        write_whole(out / "quality-compare.md", page.encode())
        console.print(f"wrote {out / 'quality-compare.md'}", markup=False)


@group.command()
def report(
    result: Path = typer.Argument(parser=path, help="quality.json, or the folder it is in."),
    out: Path | None = typer.Option(None, parser=path, help="Folder to write to; by default the one of the result."),
) -> None:
    """Make the page and the chart of a run again, from its data alone."""
    from qwen_nvfp4_serve.bench.files import writing
    from qwen_nvfp4_serve.cli.bench_screen import screen
    from qwen_nvfp4_serve.quality.result import read_result

    folder = out or (result if result.is_dir() else result.parent)
    found = read_result(result)
    with writing(folder):
        _write_page(found, folder, screen())


@group.command()
def schema() -> None:
    """Print the JSON Schema of quality.json."""
    from qwen_nvfp4_serve.quality.result import result_schema

    typer.echo(json.dumps(result_schema(), indent=1))


def _exam(quick: bool, **options: Any) -> Exam:
    from qwen_nvfp4_serve.quality.task import FULL, QUICK, check_exam

    exam = replace(QUICK if quick else FULL, **{name: value for name, value in options.items() if value is not None})
    check_exam(exam)
    return exam


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(","))


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    return None if text is None else numbers(option, text)


def _ask(order: Order, folder: Path, at_least: float | None) -> None:
    from qwen_nvfp4_serve.bench.files import writing
    from qwen_nvfp4_serve.cli.bench_screen import screen, under_progress
    from qwen_nvfp4_serve.quality.result import FILE, write_result
    from qwen_nvfp4_serve.quality.runner import INTERRUPTED, run_quality

    console = screen()
    result = under_progress(lambda observe: run_quality(order, observe), failed="missed")
    file = folder / (FILE if result.complete else INTERRUPTED_FILE)
    with writing(folder):
        write_result(file, result)
    _show(result, console)
    console.print(f"wrote {file}", markup=False)
    if result.stopped == INTERRUPTED:
        raise typer.Exit(EXIT_INTERRUPTED)
    if result.stopped:
        raise QwenNvfp4Error(
            "the run was given up", seen=result.stopped, expected="a server that lives", do="See its log."
        )
    with writing(folder):
        _write_page(result, folder, console)
    if at_least is not None and (result.percent or 0.0) < at_least:
        said = f"{result.right} of {len(result.outcomes)} right, {result.percent or 0.0:.1f} %"
        raise QwenNvfp4Error("too few right answers", seen=said, expected=f"--at-least {at_least:g} %")


def _show(result: Result, console: Console) -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from qwen_nvfp4_serve.quality.report import headline
    from qwen_nvfp4_serve.quality.summary import HEADERS, rows

    table = Table(title=escape(printable(f"{result.label}: {result.server.model}")), box=SIMPLE, padding=(0, 1, 0, 0))
    for header in HEADERS:
        table.add_column(header, justify="right" if header in ("right", "%") else "left", no_wrap=header == HEADERS[0])
    for row in rows(result):
        table.add_row(*row.cells)
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    console.print(headline(result), markup=False)


def _write_page(result: Result, folder: Path, console: Console) -> None:
    """Chart and page. Without matplotlib the page is made without the chart, and one line says so."""
    from qwen_nvfp4_serve.bench.files import write_whole
    from qwen_nvfp4_serve.quality.charts import draw_quality
    from qwen_nvfp4_serve.quality.report import quality_markdown

    chart: Path | None = None
    try:
        chart = draw_quality(result, folder)
    except QwenNvfp4Error as error:
        console.print(f"WARNING: {error}", markup=False)
    write_whole(folder / PAGE, quality_markdown(result, chart).encode())
    console.print(f"wrote {folder / PAGE}" + (f" and {chart.name}" if chart else ""), markup=False)
