"""How right a tracked checkpoint is, by task and by rounding of products and cache: a JSON file, and a table."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from training.evaluate import Scored, evaluate, prepare
from training.model import ReferenceModel, Switches
from training.train import Feed

ROUNDINGS = {
    "W4A16": (False, False),
    "W4A16, FP8 KV": (False, True),
    "W4A4": (True, False),
    "W4A4, FP8 KV": (True, True),
}
MTP = "mtp acceptance"
LENGTHS = (512, 1280, 2304, 4096)  # of packed rows: attention costs their square on a CPU


def counts(scored: Scored) -> dict[str, int]:
    """Examples by label."""
    found: dict[str, int] = defaultdict(int)
    for batch in scored.labels:
        for row in batch:
            for label in row:
                found[label] += 1
    return dict(sorted(found.items()))


@torch.no_grad()
def measure(model: ReferenceModel, count: int, needles: int, keep: Path | None = None) -> dict[str, Any]:
    """Shares of right answers by rounding and label, and the number of examples behind each.

    count: examples a task and thinking mode; needles: of each length and mode. The result so far is written to `keep`
    after every rounding. Drafts are judged on the short examples. W4A16 is BF16 with the same weights: both multiply
    dequantized weights with unrounded inputs, here in float32, on the CPU.
    """
    parts = [
        (
            prepare(2 * needles if shorter else count, 1, longest, longer_than=shorter),
            Feed(1, longest, torch.device("cpu"), torch.float32),
        )
        for shorter, longest in pairwise((0, *LENGTHS))
    ]
    examples = sum((Counter(counts(scored)) for scored, _ in parts), Counter[str]())
    shares: dict[str, dict[str, float]] = {}
    for name, (Switches.quantize_activations, Switches.quantize_cache) in ROUNDINGS.items():
        found = [evaluate(model, scored, feed.take, drafts=index == 0) for index, (scored, feed) in enumerate(parts)]
        right: dict[str, float] = defaultdict(float)
        for part, (scored, _) in zip(found, parts, strict=True):
            for label, number in counts(scored).items():
                right[label] += part[label] * number
        shares[name] = {label: right[label] / number for label, number in examples.items()} | {MTP: found[0][MTP]}
        print(name, f"{mean(shares[name], examples):.3f}", flush=True)
        if keep is not None:
            keep.write_text(json.dumps({"examples": dict(sorted(examples.items())), "shares": shares}, indent=1) + "\n")
    Switches.quantize_activations = Switches.quantize_cache = False
    return {"examples": dict(sorted(examples.items())), "shares": shares}


def mean(shares: dict[str, float], examples: dict[str, int]) -> float:
    """Right answers of all examples."""
    return sum(shares[label] * number for label, number in examples.items()) / sum(examples.values())


def grouped(measured: dict[str, Any]) -> dict[str, Any]:
    """The same with needles of all lengths together, by depth and by length."""
    examples: dict[str, int] = defaultdict(int)
    right: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for label, number in measured["examples"].items():
        for group in _groups(label):
            examples[group] += number
            for rounding, shares in measured["shares"].items():
                right[rounding][group] += shares[label] * number
    return {"examples": examples, "right": right}


def _groups(label: str) -> tuple[str, ...]:
    if not label.startswith("needle/"):
        return (label.replace("/", ", "),)
    _, length, depth = label.split("/")
    return (f"needle, {depth}", f"needle, to {length} tokens")


def table(measured: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Markdown: a row a task, a column a model and rounding, right answers of all asked."""
    by_model = [(name, one, grouped(one)) for name, one in measured]
    head = [f"{name} {rounding}" for name, one, _ in by_model for rounding in one["shares"]]
    rows = ["| | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for group in sorted(by_model[0][2]["examples"]):
        cells = [
            f"{of['right'][rounding][group]:.0f} of {of['examples'][group]}"
            for _, one, of in by_model
            for rounding in one["shares"]
        ]
        rows.append(f"| {group} | " + " | ".join(cells) + " |")
    columns = [(shares, one["examples"]) for _, one, _ in by_model for shares in one["shares"].values()]
    total = [f"{mean(shares, examples):.1%}" for shares, examples in columns]
    drafts = [f"{shares[MTP]:.1%}" for _, one, _ in by_model for shares in one["shares"].values()]
    rows += ["| **all** | " + " | ".join(total) + " |", "| drafts accepted, 2 a step | " + " | ".join(drafts) + " |"]
    return "\n".join(rows) + "\n"


def write_table(document: Path, folder: Path) -> None:
    """Replace what stands between the marks in `document` by the table of the JSON files in `folder`."""
    measured = [(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"), reverse=True)]
    start, end = "<!-- rates: generated, train_reference_model table -->\n", "<!-- end of rates -->\n"
    before, _, rest = document.read_text().partition(start)
    _, _, after = rest.partition(end)
    document.write_text(f"{before}{start}{table(measured)}{end}{after}")
