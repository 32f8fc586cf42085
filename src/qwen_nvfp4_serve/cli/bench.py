"""`qwen-nvfp4 bench`: measure a running server; compare two runs; make the page of a run again from its data."""

from __future__ import annotations

import json
import secrets
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qwen_nvfp4_serve.cli.measuring import new_folder, numbers, reach
from qwen_nvfp4_serve.cli.paths import path
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from qwen_nvfp4_serve.bench.result import Result
    from qwen_nvfp4_serve.bench.runner import Order

RESULT, INTERRUPTED = "result.json", "interrupted.json"
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

group = typer.Typer(invoke_without_command=True)


class EndpointName(StrEnum):
    """Values of --endpoint."""

    completions = "completions"
    chat = "chat"


class LatencyName(StrEnum):
    """Values of --latency-mode."""

    api = "api"
    generation = "generation"
    none = "none"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="bench")


@group.callback()
def bench(
    context: typer.Context,
    *,
    out: Path | None = typer.Option(None, parser=path, help="Folder for result.json, the page and the charts. Needed."),
    base_url: str = typer.Option("", help="Endpoint to measure; by default the one that the settings serve."),
    depth: str = typer.Option("0", help="Context before the prompt, tokens: 0,4096,8192."),
    prompt: str = typer.Option("2048", help="Prompt, tokens."),
    generate: str = typer.Option("32", help="Answer, tokens."),
    concurrency: str = typer.Option("1", help="Requests sent at the same moment."),
    runs: int = typer.Option(5, help="Counted batches of each case."),
    warmup: int = typer.Option(1, help="Uncounted batches of each case, before the counted ones."),
    seed: int = typer.Option(0, help="Seed of the prompts' words."),
    cached_context: bool = typer.Option(False, help="Send the context first: measure on a filled prefix cache."),
    reuse_prompts: bool = typer.Option(False, help="Same prompts in every run: let the prefix cache answer."),
    ignore_eos: bool = typer.Option(True, help="Ask for exactly the tokens of --generate (vLLM's ignore_eos)."),
    temperature: float = typer.Option(0.0, help="Sampling temperature."),
    endpoint: EndpointName = typer.Option(EndpointName.completions, help="Which API to measure."),
    latency_mode: LatencyName = typer.Option(LatencyName.api, help="What to take off the time to first token."),
    timeout_s: float = typer.Option(600.0, help="A request that takes longer has failed."),
    ttft_ms: float | None = typer.Option(None, help="Goodput: limit of the time to first token."),
    tpot_ms: float | None = typer.Option(None, help="Goodput: limit of the time per token after the first."),
    label: str = typer.Option("", help="Name of this run on the page and in charts."),
    card: str | None = typer.Option(None, help="Name of the card, when the server is on another machine."),
    against: str = typer.Option("", help="Published figures to draw beside: seed_35b,seed_27b_marlin."),
    server_log: Path | None = typer.Option(
        None, parser=path, help="File with the server's log; its kernel lines are kept."
    ),
    plan: Path | None = typer.Option(None, parser=path, help="JSON of `qwen-nvfp4 plan --json`, kept with the result."),
    env_file: Path | None = typer.Option(
        None, "--env-file", parser=path, help="Settings of the server instead of .env; its key is used."
    ),
) -> None:
    """Prefill and decode speed at context depth, from a running server.

    Exit code 0: measured, 1: requests failed (shown in the table), 2: wrong use, 130: interrupted, finished cases kept.
    """
    if context.invoked_subcommand is not None:
        return
    from qwen_nvfp4_serve.bench.files import check_page
    from qwen_nvfp4_serve.bench.published import find_published
    from qwen_nvfp4_serve.bench.runner import Order
    from qwen_nvfp4_serve.bench.subject import subject_of
    from qwen_nvfp4_serve.bench.workload import Workload, check_workload

    workload = Workload(
        endpoint=endpoint.value,
        depths=numbers("--depth", depth),
        prompts=numbers("--prompt", prompt),
        generates=numbers("--generate", generate),
        concurrencies=numbers("--concurrency", concurrency),
        runs=runs,
        warmup_runs=warmup,
        seed=seed,
        cached_context=cached_context,
        reuse_prompts=reuse_prompts,
        ignore_eos=ignore_eos,
        temperature=temperature,
        latency_mode=latency_mode.value,
        timeout_s=timeout_s,
        ttft_limit_ms=ttft_ms,
        tpot_limit_ms=tpot_ms,
    )
    folder = new_folder(out, RESULT)
    check_page(folder)
    names = [name.strip() for name in against.split(",") if name.strip()]
    find_published(names)
    check_workload(workload, 0)
    server = reach(base_url, env_file)
    check_workload(workload, server.max_model_len)
    subject = subject_of(server, label=label or folder.resolve().name, card=card, log=server_log, plan=plan)
    _measure(Order(workload=workload, subject=subject, nonce=secrets.token_hex(8)), folder, names)


@group.command()
def compare(
    first: Path = typer.Argument(parser=path, help="result.json, or the folder it is in: the baseline."),
    second: Path = typer.Argument(parser=path, help="result.json, or the folder it is in: what is compared with it."),
    out: Path | None = typer.Option(None, parser=path, help="Folder for a page and a chart."),
) -> None:
    """Ratios of two runs with equal settings; refuses others and names what differs."""
    from rich.markup import escape
    from rich.table import Table

    from qwen_nvfp4_serve.bench.compare import compare as compare_results
    from qwen_nvfp4_serve.bench.compare import comparison_markdown, differences, draw_comparison, left_out
    from qwen_nvfp4_serve.bench.files import PAGE, check_page, write_whole, writing
    from qwen_nvfp4_serve.bench.result import read_result
    from qwen_nvfp4_serve.bench.rows import cell
    from qwen_nvfp4_serve.cli.bench_screen import screen

    one, other = read_result(first), read_result(second)
    if out is not None:
        check_page(out)
    found = compare_results(one, other)
    console = screen()
    for name, here, there in differences(one, other):
        console.print(f"{name} differs: {here} and {there}", markup=False)
    for name, lacking in left_out(one, other):
        console.print(f"{name} is left out: nothing measured by {printable(lacking)}", markup=False)
    table = Table("test", *(escape(printable(run.label)) for run in (one, other)), "ratio", "")
    for row in found:
        table.add_row(row.name, cell(row.first), cell(row.second), row.ratio_words, row.verdict)
    console.print(table)
    if out is not None:
        with writing(out):
            draw_comparison(one, other, found, out)
            write_whole(out / PAGE, comparison_markdown(one, other, found).encode())
        console.print(f"wrote {out / PAGE}", markup=False)


@group.command()
def report(
    result: Path = typer.Argument(parser=path, help="result.json, or the folder it is in."),
    out: Path | None = typer.Option(None, parser=path, help="Folder to write to; by default the one of the result."),
    against: str = typer.Option("", help="Published figures to draw beside."),
) -> None:
    """Make the page and the charts of a run again, from its data alone."""
    from qwen_nvfp4_serve.bench.files import check_page, writing
    from qwen_nvfp4_serve.bench.result import read_result
    from qwen_nvfp4_serve.cli.bench_screen import screen

    names = [name.strip() for name in against.split(",") if name.strip()]
    folder = out or (result if result.is_dir() else result.parent)
    found = read_result(result)
    check_page(folder)
    with writing(folder):
        _write_page(found, folder, names, screen())


@group.command()
def engine(
    *,
    folder: Path = typer.Argument(parser=path, help="Folder with config.json and tokenizer; its weights are not read."),
    out: Path = typer.Option(..., parser=path, help="Folder for engine.json and the page."),
    config: list[str] = typer.Option(
        ["stock={}"], help="LABEL=JSON, keyword arguments of vllm.LLM, and nvfp4_backend; once for each configuration."
    ),
    streams: str = typer.Option("1,2,4,8", help="Requests decoded at once."),
    prefill: str = typer.Option("8192", help="Prompts of the prefill rate, tokens."),
    rounds: int = typer.Option(3, help="Measurements of each figure."),
    profile: int = typer.Option(64, help="Decode steps to profile; 0 for none."),
    restarts: int = typer.Option(0, help="Starts in new processes after the first, which then finds empty caches."),
    model: str | None = typer.Option(None, help="Catalogue name, for the byte roofline."),
) -> None:
    """One engine configuration against another on dummy weights, without HTTP.

    Our kernels serve a configuration with "nvfp4_backend": "hybrid", vLLM's one with "stock".
    """
    from qwen_nvfp4_serve.bench.engine import EngineSpec
    from qwen_nvfp4_serve.cli.bench_screen import run_engine

    configurations: dict[str, dict[str, object]] = {}
    for label, options in map(_configuration, config):
        if label in configurations:
            raise UsageError("--config", seen=f"{label} twice", expected="another label for each configuration")
        configurations[label] = options
    spec = EngineSpec(
        model_folder=str(folder.resolve()),
        configurations=configurations,
        streams=numbers("--streams", streams),
        prefills=numbers("--prefill", prefill),
        rounds=rounds,
        profile_tokens=profile,
        restarts=restarts,
    )
    run_engine(spec, out, model)


def _configuration(text: str) -> tuple[str, dict[str, object]]:
    label, _, options = text.partition("=")
    try:
        value = json.loads(options, parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = None
    if not label or not isinstance(value, dict):
        raise UsageError("--config", seen=text, expected='LABEL={"linear_backend": "marlin"}')
    return label, value


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is no JSON")


@group.command("published")
def published_figures(
    card: str = typer.Argument("rtx-5090", help="Card of the table, as `qwen-nvfp4 plan --gpu` takes it."),
    out: Path = typer.Option(Path("docs/results"), parser=path, help="Folder for the page and the chart."),
) -> None:
    """Write what others published for a card beside what its bandwidth allows; measures nothing."""
    from qwen_nvfp4_serve.bench.files import write_whole, writing
    from qwen_nvfp4_serve.bench.landscape import draw_landscape, landscape_markdown
    from qwen_nvfp4_serve.cli.bench_screen import screen
    from qwen_nvfp4_serve.gpus import find_gpu

    row = find_gpu(card)
    with writing(out):
        chart = draw_landscape(row, out)
        page = out / f"{row.name}.md"
        write_whole(page, landscape_markdown(row, chart).encode())
    screen().print(f"wrote {page} and its chart", markup=False)


@group.command("record")
def card_record(
    card: str = typer.Argument("h200", help="Card of the record, as `qwen-nvfp4 plan --gpu` takes it."),
    take: Path | None = typer.Option(
        None, parser=path, help="Folder of a visit to the card: its engine-<size>-<label>.json first."
    ),
    size: str | None = typer.Option(None, help="Take this size alone, 35b or 27b."),
    code: str | None = typer.Option(None, help="Commit that the visit measured."),
    out: Path = typer.Option(
        Path("docs/results"), parser=path, help="Folder with engine-<size>-<card>.json; pages and charts too."
    ),
) -> None:
    """Write the pages and charts of what was measured on a card, from its JSON alone; measures nothing."""
    from qwen_nvfp4_serve.bench.files import writing
    from qwen_nvfp4_serve.bench.record import read_visit, write_card_record
    from qwen_nvfp4_serve.cli.bench_screen import screen
    from qwen_nvfp4_serve.gpus import find_gpu

    row = find_gpu(card)
    if take is None and (size or code):
        raise UsageError("--size, --code", seen="no --take", expected="--take, of which they are options")
    with writing(out):
        written = write_card_record(out, row, None if take is None else read_visit(take, row, size, code))
    screen().print("wrote", ", ".join(map(str, written)), markup=False)


@group.command()
def schema() -> None:
    """Print the JSON Schema of result.json."""
    from qwen_nvfp4_serve.bench.result import result_schema

    typer.echo(json.dumps(result_schema(), indent=1))


def _measure(order: Order, folder: Path, against: list[str]) -> None:
    from qwen_nvfp4_serve.bench.files import writing
    from qwen_nvfp4_serve.bench.result import write_result
    from qwen_nvfp4_serve.cli.bench_screen import run_with_progress, screen, show_result

    console = screen()
    result = run_with_progress(order)
    file = folder / (RESULT if result.complete else INTERRUPTED)
    with writing(folder):
        write_result(file, result)
    show_result(result, console)
    console.print(f"wrote {file}", markup=False)
    if not result.complete:
        raise typer.Exit(EXIT_INTERRUPTED)
    with writing(folder):
        _write_page(result, folder, against, console)
    raise typer.Exit(EXIT_FAILED if result.failure_counts() else 0)


def _write_page(result: Result, folder: Path, names: list[str], console: Console) -> None:
    """Charts and page. Without matplotlib the page is made without charts, and one line says so."""
    from qwen_nvfp4_serve.bench.charts import draw_charts
    from qwen_nvfp4_serve.bench.files import PAGE, write_whole
    from qwen_nvfp4_serve.bench.published import find_published
    from qwen_nvfp4_serve.bench.report import markdown

    against = find_published(names)
    charts: tuple[Path, ...] = ()
    try:
        charts = draw_charts(result, folder, against)
    except QwenNvfp4Error as error:
        console.print(f"WARNING: {error}", markup=False)
    write_whole(folder / PAGE, markdown(result, charts, against).encode())
    console.print(f"wrote {folder / PAGE} and {len(charts)} charts", markup=False)
