"""Packed rows of tokenized conversations, made by worker processes so that the trainer never waits."""

import multiprocessing as mp
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty
from random import Random

import numpy as np
from numpy.typing import NDArray

from training import tokenizer
from training.chat import Conversation, segments
from training.mixture import training_example
from training.tokenizer import FastEncoder

DOCUMENTS_PER_ROW = 56
# Answers of few tokens that take most learning would drown among long easy ones.
LOSS_WEIGHTS = {"count": 4, "subtract": 3, "add": 2, "compare": 2, "lookup": 2, "needle": 2, "recall": 2}
_OPEN_ROWS = 6
_STALE_AFTER_S = 120


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed documents, each array [rows, length].

    `tokens` int16; `target` uint8, the loss weight where the model must write the token, 0 elsewhere; `document`
    int16, counted from 0 in each row, the unused tail being a document of its own.
    """

    tokens: NDArray[np.int16]
    target: NDArray[np.uint8]
    document: NDArray[np.int16]


@dataclass(slots=True)
class _Row:
    ids: list[int]
    target: list[int]
    lengths: list[int]
    names: list[int]


def encode(encoder: FastEncoder, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and a loss weight for each id that the model must write, 0 elsewhere."""
    ids: list[int] = []
    target: list[int] = []
    weight = LOSS_WEIGHTS.get(conversation.task, 1)
    for text, trained in segments(conversation):
        piece = encoder(text)
        ids += piece
        target += [weight * trained] * len(piece)
    return ids, target


def _finish(rows: list[_Row], length: int) -> Batch:
    tokens = np.zeros((len(rows), length), np.int16)
    target = np.zeros((len(rows), length), np.uint8)
    document = np.zeros((len(rows), length), np.int16)
    for index, row in enumerate(rows):
        used = len(row.ids)
        tokens[index, :used] = row.ids
        target[index, :used] = row.target
        document[index, :used] = np.repeat(np.arange(len(row.lengths)), row.lengths)
        document[index, used:] = len(row.lengths)
    return Batch(tokens, target, document)


class Packer:
    """Places documents first-fit into open rows and yields full batches."""

    def __init__(self, rows: int, length: int) -> None:
        self._rows, self._length = rows, length
        self._open: list[_Row] = [_Row([], [], [], []) for _ in range(_OPEN_ROWS)]
        self._full: list[_Row] = []

    def add(self, ids: list[int], target: list[int], name: int = 0) -> tuple[Batch, list[list[int]]] | None:
        """Take one document; when that completes a batch, return it with the names of each row's documents."""
        fitting = [
            row
            for row in self._open
            if len(row.ids) + len(ids) <= self._length and len(row.lengths) < DOCUMENTS_PER_ROW - 1
        ]
        if fitting:
            row = max(fitting, key=lambda candidate: len(candidate.ids))
        else:
            fullest = max(range(_OPEN_ROWS), key=lambda index: len(self._open[index].ids))
            self._full.append(self._open[fullest])
            row = self._open[fullest] = _Row([], [], [], [])
        row.ids += ids
        row.target += target
        row.lengths.append(len(ids))
        row.names.append(name)
        return self._batch() if len(self._full) == self._rows else None

    def rest(self) -> tuple[Batch, list[list[int]]]:
        """The last batch, filled with empty rows."""
        self._full += [row for row in self._open if row.ids]
        self._open = [_Row([], [], [], []) for _ in range(_OPEN_ROWS)]
        if len(self._full) > self._rows:
            extra = self._full[self._rows :]
            self._full = self._full[: self._rows]
            self._open[: len(extra)] = extra
        self._full += [_Row([], [], [], []) for _ in range(self._rows - len(self._full))]
        return self._batch()

    @property
    def pending(self) -> bool:
        """True while documents wait in open or full rows."""
        return any(row.ids for row in (*self._open, *self._full))

    def _batch(self) -> tuple[Batch, list[list[int]]]:
        rows, self._full = self._full, []
        return _finish(rows, self._length), [row.names for row in rows]


def _produce(
    queue: "mp.Queue[Batch]", progress: "mp.sharedctypes.Synchronized[float]", seed: int, rows: int, length: int
) -> None:
    rng = Random(seed)
    encoder = FastEncoder(tokenizer.load())
    packer = Packer(rows, length)
    while True:
        ids, target = encode(encoder, training_example(rng, progress.value))
        if len(ids) > length:
            continue
        made = packer.add(ids, target)
        if made is not None:
            queue.put(made[0])


class BatchStream:
    """Training batches from `workers` processes; `progress` (0 to 1) may be set while it runs."""

    def __init__(self, *, rows: int, length: int, workers: int, seed: int) -> None:
        context = mp.get_context("fork")
        self._queue: mp.Queue[Batch] = context.Queue(maxsize=4 * workers)
        self._progress = context.Value("d", 0.0)
        self._processes = [
            context.Process(
                target=_produce, args=(self._queue, self._progress, seed * 1000 + index, rows, length), daemon=True
            )
            for index in range(workers)
        ]
        for process in self._processes:
            process.start()

    def set_progress(self, value: float) -> None:
        """Tell the workers how far training is."""
        self._progress.value = value

    def __iter__(self) -> Iterator[Batch]:
        while True:
            try:
                yield self._queue.get(timeout=_STALE_AFTER_S)
            except Empty as error:
                raise RuntimeError("no batch for 120 s: the data workers have stopped") from error

    def close(self) -> None:
        """Stop the workers."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout=5)
