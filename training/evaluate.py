"""Exact-match accuracy without generating: a greedy answer is right when every next token given its true start is."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from training import tokenizer
from training.chat import Conversation
from training.mixture import evaluation_examples
from training.model import ReferenceModel, Rows
from training.packing import Batch, Packer, encode
from training.tokenizer import FastEncoder


@dataclass(frozen=True, slots=True)
class Scored:
    """Evaluation batches and the label of each row's documents, in order."""

    batches: tuple[Batch, ...]
    labels: tuple[tuple[tuple[str, ...], ...], ...]


def label(example: Conversation, tokens: int) -> str:
    """What an example is counted under: its task, thinking or not, and for needles length and depth."""
    mode = "think" if any(turn.think is not None for turn in example.turns) else "direct"
    if example.task == "needle":
        length = next(size for size in (1024, 2048, 4096, 1 << 30) if tokens <= size)
        return f"needle/{length}/depth {int((example.depth or 0) * 4) * 25}%"
    return f"{example.task}/{mode}"


def prepare(count: int, rows: int, length: int, seed: int = 20260101, longer_than: int = 0) -> Scored:
    """Held-out examples of up to `length` tokens, packed into batches of one shape."""
    encoder = FastEncoder(tokenizer.load())
    packer = Packer(rows, length)
    made, known, names = [], [], {}
    for example in evaluation_examples(count, seed):
        ids, target = encode(encoder, example)
        if not longer_than < len(ids) <= length:
            continue
        text = label(example, len(ids))
        full = packer.add(ids, target, names.setdefault(text, len(names)))
        if full is not None:
            made.append(full)
    while packer.pending:
        made.append(packer.rest())
    texts = list(names)
    for _, row_names in made:
        known.append(tuple(tuple(texts[index] for index in row) for row in row_names))
    return Scored(tuple(batch for batch, _ in made), tuple(known))


def targets(rows: Rows, target: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
    """Token `ahead` places on, and its loss weight where the model must write it in the same document, else 0."""
    wanted = rows.tokens.roll(-ahead, -1)
    counted = target.roll(-ahead, -1) * (rows.document.roll(-ahead, -1) == rows.document)
    counted[:, -ahead:] = 0
    return wanted, counted


def _wanted(rows: Rows, target: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
    tokens, weight = targets(rows, target, ahead)
    return tokens, weight > 0


def _hits(model: ReferenceModel, rows: Rows, drafts: int) -> list[Tensor]:
    """Argmax of the head and of each draft, [B, T] each."""
    hidden, _ = model.trunk(rows)
    found = [model.lm_head(hidden).argmax(-1)]
    for step in range(1, drafts + 1):
        hidden, _ = model.draft(hidden, rows, step)
        found.append(model.lm_head(hidden).argmax(-1))
    return [part.detach() for part in found]


def evaluate(
    model: ReferenceModel, scored: Scored, rows_of: Callable[[Batch], tuple[Rows, Tensor]], drafts: bool = True
) -> dict[str, float]:
    """Share of exactly right documents by label, and `mtp acceptance`: accepted over offered drafts, two at a time.

    A draft counts from positions where the model itself is right; the second only when the first was. Without `drafts`
    they are not computed, and the acceptance is 0.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    offered = accepted = 0
    for batch, labels in zip(scored.batches, scored.labels, strict=True):
        rows, target = rows_of(batch)
        first, *drafted = _hits(model, rows, 2 if drafts else 0)
        wanted, counted = _wanted(rows, target, 1)
        wrong = ((first != wanted) & counted).cpu()
        document = rows.document.cpu()
        for index, row in enumerate(labels):
            misses = torch.zeros(len(row) + 1, dtype=torch.long).index_add_(
                0, document[index].long().clamp(max=len(row)), wrong[index].long()
            )
            for place, name in enumerate(row):
                right[name].append(misses[place].item() == 0)
        if not drafted:
            continue
        one, counted1 = _wanted(rows, target, 2)
        two, counted2 = _wanted(rows, target, 3)
        hit1 = (drafted[0] == one) & counted1
        hit2 = hit1 & (drafted[1] == two) & counted2
        offered += int(counted1.sum() + counted2.sum())
        accepted += int(hit1.sum() + hit2.sum())
    shares = {name: sum(values) / len(values) for name, values in sorted(right.items())}
    shares["mtp acceptance"] = accepted / max(1, offered)
    return shares
