"""The page of one result, from its data alone."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from qwen_nvfp4_serve.bench.report import markdown_table, one_cell
from qwen_nvfp4_serve.bench.rows import cache_words
from qwen_nvfp4_serve.errors import printable
from qwen_nvfp4_serve.quality.result import Outcome, Result
from qwen_nvfp4_serve.quality.summary import HEADERS, needle_grid, rows, tally
from qwen_nvfp4_serve.quality.task import FAMILIES, Thinking

SAID_CHARS, MOST_MISSES = 120, 200


def quality_markdown(result: Result, chart: Path | None = None) -> str:
    """The whole page: table, needle grids, notes, what was missed, settings."""
    parts = [f"# {one_cell(result.label)}\n", "" if result.complete else f"**Not finished: {result.stopped}.**\n"]
    parts.append(f"{headline(result)}\n")
    parts.append(markdown_table(HEADERS, [row.cells for row in rows(result)]))
    parts += [f"- {note}." for note in result.notes]
    parts += [f"\n![quality]({chart.name})\n"] if chart else [""]
    parts += [_grid(result, mode) for mode in result.exam.thinking]
    parts += [_misses(result), "## Settings\n", markdown_table(("setting", "value"), settings_rows(result))]
    return "\n".join(part for part in parts if part) + "\n"


def headline(result: Result) -> str:
    """The whole in one sentence, then a family each."""
    if not result.outcomes:
        return "No question was answered."
    whole = tally(result.outcomes)
    families = [
        f"{family} {seen.right}/{seen.asked}"
        for family in FAMILIES
        if (seen := tally(one for one in result.outcomes if one.family == family)).asked
    ]
    return f"{whole.right} of {whole.asked} right ({whole.percent:.1f} %): {', '.join(families)}."


def settings_rows(result: Result) -> list[tuple[str, str]]:
    """Names and values of everything that a reader needs to repeat the run."""
    machine, server, exam = result.machine, result.server, result.exam
    found = [
        ("model", server.model),
        ("server", server.base_url),
        ("vLLM", server.vllm),
        ("context (tokens)", server.max_model_len),
        ("cache", cache_words(server.cache or {}) or None),
        ("kernels", "; ".join(server.kernels or ()) or None),
        ("card", machine.title),
        ("host", machine.cpu),
        ("started", result.started),
        ("seconds", f"{result.seconds:.0f}"),
        ("questions", f"{len(result.outcomes)} of {result.asked}"),
        *((entry.name, getattr(exam, entry.name)) for entry in fields(exam)),
    ]
    return [(name, _plain(value)) for name, value in found if value is not None]


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _grid(result: Result, mode: Thinking) -> str:
    lengths, depths, cells = needle_grid(result.outcomes, mode)
    if not lengths:
        return ""
    head = ("depth", *(f"{length:,}" for length in lengths))
    lines = []
    for depth in depths:
        seen = [cells.get((length, depth)) for length in lengths]
        lines.append((f"{depth} %", *(f"{one.right}/{one.asked}" if one else "" for one in seen)))
    return f"## Needles found, thinking {mode}\n\n" + markdown_table(head, lines, right=len(lengths))


def _misses(result: Result) -> str:
    missed = [one for one in result.outcomes if one.miss is not None]
    if not missed:
        return "## Missed\n\nNothing.\n"
    shown = [(one.task, one.thinking, *_why(one)) for one in missed[:MOST_MISSES]]
    rest = len(missed) - len(shown)
    more = f"\nand {rest} more in the JSON.\n" if rest else ""
    return "## Missed\n\n" + markdown_table(("question", "thinking", "reason", "seen", "expected"), shown) + more


def _why(outcome: Outcome) -> tuple[str, str, str]:
    miss = outcome.miss
    if miss is None:
        return ("", "", "")
    return (miss.reason, printable(miss.detail, SAID_CHARS), printable(outcome.expected, SAID_CHARS))
