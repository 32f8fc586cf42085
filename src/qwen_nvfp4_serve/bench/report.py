"""The page of one result, from its data alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qwen_nvfp4_serve.bench.published import Published
from qwen_nvfp4_serve.bench.result import Result
from qwen_nvfp4_serve.bench.rows import HEADERS, cell, settings_rows, spread_words, table_rows
from qwen_nvfp4_serve.bench.statistics import HELD_BACK_TOKENS, HELD_BACK_TOKENS_PER_S, came_at_once


def markdown(result: Result, charts: Sequence[Path] = (), against: Sequence[Published] = ()) -> str:
    """The whole page: table, failures, goodput, published figures, settings, charts (by file name)."""
    parts = [f"# {result.label}\n", "" if result.complete else "**Interrupted: some cases are missing.**\n"]
    parts.append(
        markdown_table(HEADERS, [(row.test, *row.cells) for row in table_rows(result)], right=len(HEADERS) - 1)
    )
    spread = spread_words(result.workload)
    parts.append(f"{spread[0].upper()}{spread[1:]}. Measured on: **{result.card}**.\n")
    parts += [_failures(result), _goodput(result), _published(result, against)]
    parts += [f"![{chart.stem}]({chart.name})\n" for chart in charts]
    parts += ["## Settings\n", markdown_table(("setting", "value"), settings_rows(result))]
    if result.server.kernels:
        parts.append(
            "Kernels named in the server's log:\n\n" + "\n".join(f"- `{line}`" for line in result.server.kernels)
        )
    return "\n".join(part for part in parts if part) + "\n"


def _failures(result: Result) -> str:
    failures = [failure for case in result.cases for failure in case.failures]
    total = sum(case.requests for case in result.cases)
    warm = sum(len(case.warmup_failures) for case in result.cases)
    notes = [f"{len(failures)} of {total} measured requests failed" + (f", {warm} in warm-up" if warm else "") + "."]
    counts = Counter((failure.kind, failure.detail) for failure in failures)
    notes += [f"- {count} x {kind}: {one_cell(detail)}" for (kind, detail), count in counts.most_common()]
    notes += odd_answers(result)
    return "\n".join(notes) + "\n"


def odd_answers(result: Result) -> list[str]:
    """A sentence each on answers that ended early, came at once or without text, prompts of another length by the
    server's count than asked, and first tokens that came before the latency was over."""
    early = off = sooner = at_once = silent = 0
    for case in result.cases:
        asked = case.case.depth + case.case.prompt
        for sample in (sample for batch in case.batches for sample in batch.samples if sample.failure is None):
            early += (sample.completion_tokens or 0) < case.case.generate
            at_once += came_at_once(sample)
            silent += bool(sample.completion_tokens) and sample.first_token_s is None
            off += case.case.phase == "request" and sample.prompt_tokens != asked
            if sample.first_token_s is not None:
                sooner += 1000.0 * (sample.first_token_s - sample.start_s) <= result.latency_ms
    notes = [f"{early} answers ended before the tokens asked for."] if early else []
    if at_once:
        notes.append(
            f"{at_once} answers came at once, whole or faster than {HELD_BACK_TOKENS_PER_S:,.0f} tokens/s: as one "
            f"bundle, or held back. They have no decode rate, and from {HELD_BACK_TOKENS} tokens on no prefill rate: "
            "the first one was as late as the last. ttfr and e2e_ttft have them as they came."
        )
    if silent:
        notes.append(f"{silent} answers brought no text, so that no moment of a token is known: they have no rates.")
    if off:
        notes.append(f"{off} prompts were not exactly as long as asked; rates use the true length.")
    if sooner:
        latency = f"{result.latency_ms:.2f} ms"
        notes.append(
            f"{sooner} first tokens came within the {latency} of a small request: their prompts have no prefill rate."
        )
    return notes


def _goodput(result: Result) -> str:
    rows = [
        (
            f"{case.case.prefill}, {case.case.decode}",
            f"{case.goodput.good}/{case.goodput.requests}",
            f"{case.goodput.good_requests_per_s:.2f}",
        )
        for case in result.cases
        if case.goodput is not None
    ]
    if not rows:
        return ""
    workload = result.workload
    limits = [
        f"{name} {limit:g} ms"
        for name, limit in (("first token", workload.ttft_limit_ms), ("each token after", workload.tpot_limit_ms))
        if limit is not None
    ]
    head = f"## Goodput within {', '.join(limits)}\n\n"
    return head + markdown_table(("case", "good", "good requests/s"), rows, right=2)


def _published(result: Result, against: Sequence[Published]) -> str:
    if not against:
        return ""
    rows: list[tuple[str, ...]] = []
    for case in result.cases:
        if case.case.concurrency == 1 and case.case.phase == "request":
            for test, value in (
                (case.case.prefill, case.metrics.prefill_total),
                (case.case.decode, case.metrics.decode_total),
            ):
                rows.append((f"**{test}**", cell(value), result.card, "this run", ""))
    for entry in against:
        for figure in (*entry.of("prefill"), *entry.of("decode")):
            what = f"{entry.title}: {figure.test} {figure.where}"
            rows.append((what, f"{figure.tokens_per_s:,.10g}", entry.card, entry.measured_by, entry.note))
    head = "## Beside figures that others published\n\nNot measured by this project, and on the card named.\n\n"
    return head + markdown_table(("test", "t/s", "card", "measured by", "note"), rows)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> str:
    """A Markdown table; the last `right` columns are numbers."""
    marks = [":--"] * (len(head) - right) + ["--:"] * right
    lines = [head, marks, *([one_cell(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def one_cell(text: str) -> str:
    """`text` in one line that does not end a table cell."""
    return " ".join(text.split()).replace("|", "\\|")
