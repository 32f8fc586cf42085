"""The training loop: slices of a fixed time, resumable, on a GPU or as a smoke on a CPU."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.checkpoint import read as read_checkpoint
from training.config import MODELS
from training.evaluate import Scored, evaluate, prepare, targets
from training.model import Block, ReferenceModel, Rows, Switches, initialize, rotary
from training.optim import MasterWeights, Optimizer
from training.packing import DOCUMENTS_PER_ROW, Batch, BatchStream

PART_BYTES = 15 << 20
EAGER_FORWARD = Block.forward


@dataclass(frozen=True, slots=True)
class Rounding:
    """What the forward pass sees rounded: four-bit weights, four-bit inputs, an eight-bit key-value cache.

    With `alternate`, inputs and cache are rounded in every other row only.
    """

    weights: bool = False
    activations: bool = False
    cache: bool = False
    alternate: bool = False


ROUNDINGS = {
    "bf16": Rounding(),
    "bf16, fp8 kv": Rounding(cache=True),
    "nvfp4 w4a16": Rounding(weights=True),
    "nvfp4 w4a16, fp8 kv": Rounding(weights=True, cache=True),
    "nvfp4 w4a4": Rounding(weights=True, activations=True),
    "nvfp4 w4a4, fp8 kv": Rounding(weights=True, activations=True, cache=True),
}
TRAINED_ROUNDING = Rounding(weights=True, activations=True, cache=True, alternate=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run. Times in seconds; `quantize_from` is the share of training after which weights and inputs are NVFP4."""

    model: str
    state: Path
    start_from: Path | None
    total_seconds: float
    slice_seconds: float
    max_steps: int
    rows: int
    length: int
    workers: int
    seed: int
    muon_rate: float
    adam_rate: float
    cooldown: float
    quantize_from: float
    evaluate_every: float
    evaluate_count: int
    graph: bool
    compiled: bool
    pause_file: Path | None


def boundaries(document: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Starts of the documents in the flattened rows, padded with the end to a fixed length, int32."""
    rows, length = document.shape
    starts = np.ones((rows, length), bool)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    found = np.flatnonzero(starts)
    result = np.full(rows * DOCUMENTS_PER_ROW + 1, rows * length, np.int32)
    result[: len(found)] = found
    return result


class Feed:
    """Fixed device tensors that hold the current batch."""

    def __init__(self, rows: int, length: int, device: torch.device, work: torch.dtype) -> None:
        shape = (rows, length)
        self.device = device
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.target = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.document = torch.zeros(shape, dtype=torch.int32, device=device)
        self.bounds = torch.zeros(rows * DOCUMENTS_PER_ROW + 1, dtype=torch.int32, device=device)
        cos, sin = rotary(length, device, work)
        used = self.bounds if device.type == "cuda" else None
        self.rows = Rows(self.tokens, self.document, cos, sin, used)

    def take(self, batch: Batch) -> tuple[Rows, Tensor]:
        """Copy a batch in; returns the rows and the target mask that the model reads."""
        self.tokens.copy_(torch.from_numpy(batch.tokens.astype(np.int64)))
        self.target.copy_(torch.from_numpy(batch.target))
        self.document.copy_(torch.from_numpy(batch.document.astype(np.int32)))
        self.bounds.copy_(torch.from_numpy(boundaries(batch.document)))
        return self.rows, self.target


def head_loss(hidden: Tensor, weight: Tensor, wanted: Tensor, counted: Tensor) -> Tensor:
    """Mean cross-entropy, weighted by `counted`."""
    logits = F.linear(hidden, weight).float()
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    mask = counted.flatten().float()
    return (losses * mask).sum() / mask.sum().clamp(min=1)


class Trainer:
    """A model, its optimizer and the step that joins them."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options, self.device = options, device
        work = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = ReferenceModel(MODELS[options.model])
        initialize(self.model, options.seed)
        self.weights = MasterWeights(self.model, device, work)
        self.optimizer = Optimizer(self.weights, device)
        self.feed = Feed(options.rows, options.length, device, work)
        self.losses = torch.zeros(4, device=device)
        self.rounding = Rounding()
        self._graph: Any = None

    def forward_backward(self) -> None:
        """Gradients of one batch; the losses land in `losses`: next token, drafts 1 and 2, balance."""
        rows, target = self.feed.rows, self.feed.target
        for parameter in self.model.parameters():
            parameter.grad = None
        hidden, balance = self.model.trunk(rows)
        weight = self.model.lm_head.weight
        parts = [head_loss(hidden, weight, *targets(rows, target, 1))]
        for step in (1, 2):
            hidden, extra = self.model.draft(hidden, rows, step)
            balance = balance + extra
            parts.append(head_loss(hidden, weight, *targets(rows, target, 1 + step)))
        total = parts[0] + 0.3 * parts[1] + 0.1 * parts[2] + 0.003 * balance
        total.backward()
        self.losses.copy_(torch.stack([*(part.detach() for part in parts), balance.detach().float()]))

    def _whole_step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.weights.refresh(quantized=self.rounding.weights)

    def step(self) -> None:
        """One update from the batch in `feed`."""
        if not (self.options.graph and self.device.type == "cuda"):
            self._whole_step()
            return
        if self._graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._whole_step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._whole_step()
            return
        self._graph.replay()

    def set_rounding(self, rounding: Rounding) -> None:
        """Show the forward pass weights, inputs and cache rounded so from now on."""
        if rounding != self.rounding:
            self.rounding = rounding
            Switches.quantize_activations = rounding.activations
            Switches.quantize_cache = rounding.cache
            Switches.every_other_row = rounding.alternate
            self._graph = None
            torch._dynamo.reset()
        self.weights.refresh(quantized=rounding.weights)

    @torch.no_grad()
    def score(self, scored: Scored) -> dict[str, float]:
        """Held-out accuracy under the current rounding, without compiled code: its shapes and modes are other ones."""
        compiled, Block.forward = Block.forward, EAGER_FORWARD  # type: ignore[method-assign]
        try:
            return evaluate(self.model, scored, self.feed.take)
        finally:
            Block.forward = compiled  # type: ignore[method-assign]


def schedule(progress: float, steps_here: int, cooldown: float) -> float:
    """Learning-rate factor: a short warm-up in every slice, flat, then linear to 2 percent."""
    warm = min(1.0, (steps_here + 1) / 60)
    return warm * max(0.02, min(1.0, (1.0 - progress) / cooldown))


def save_state(folder: Path, name: str, state: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write the masters as parts of at most 15 MiB, with what is needed to go on."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in state.items():
        if size + tensor.nbytes > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][key] = tensor
        size += tensor.nbytes
    for index, part in enumerate(parts):
        save_file(part, str(folder / f"{name}.state{index}.safetensors"))
    (folder / f"{name}.json").write_text(json.dumps(meta, indent=1) + "\n")


def load_state(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The saved masters and notes, or None when there are none."""
    notes = folder / f"{name}.json"
    if not notes.exists():
        return None
    state: dict[str, Tensor] = {}
    for part in sorted(folder.glob(f"{name}.state*.safetensors")):
        state |= load_file(str(part))
    return state, json.loads(notes.read_text())


def _report(text: str) -> None:
    print(text, flush=True)


def _table(title: str, shares: dict[str, float]) -> str:
    tasks = [share for name, share in shares.items() if name != "mtp acceptance"]
    weak = [f"{name} {share:.3f}" for name, share in shares.items() if share < 0.98 or name == "mtp acceptance"]
    return f"{title}: mean {sum(tasks) / len(tasks):.4f}, below 0.98: " + ", ".join(weak[:24])


def run(options: Options) -> dict[str, Any]:
    """Train one slice and return the notes that were saved."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    torch.manual_seed(options.seed)
    if device.type == "cpu":
        torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    saved = load_state(options.state, options.model)
    if saved is None and options.start_from is not None:
        saved = read_checkpoint(options.start_from)[1], {"step": 0, "seconds": 0.0, "log": []}
    meta: dict[str, Any] = saved[1] if saved else {"step": 0, "seconds": 0.0, "log": []}
    stream = BatchStream(
        rows=options.rows, length=options.length, workers=options.workers, seed=options.seed + meta["step"]
    )
    if options.compiled:
        Block.forward = torch.compile(Block.forward, dynamic=False)  # type: ignore[method-assign]
        globals()["head_loss"] = torch.compile(head_loss, dynamic=False)
    try:
        trainer = Trainer(options, device)
        if saved:
            trainer.weights.load(saved[0])
        trainer.weights.refresh(quantized=False)
        _loop(trainer, stream, meta, started)
    finally:
        stream.close()
    save_state(options.state, options.model, trainer.weights.state(), meta)
    return meta


def _loop(trainer: Trainer, stream: BatchStream, meta: dict[str, Any], started: float) -> None:
    options = trainer.options
    scored = prepare(options.evaluate_count, options.rows, options.length) if options.evaluate_count else None
    batches = iter(stream)
    before = meta["seconds"]
    here, shown, evaluated, window = 0, time.monotonic(), time.monotonic(), 0
    while here < options.max_steps:
        rested = _rest(options.pause_file)
        started, shown, evaluated = started + rested, shown + rested, evaluated + rested
        spent = time.monotonic() - started
        if spent > options.slice_seconds:
            break
        meta["seconds"] = before + spent
        progress = min(1.0, meta["seconds"] / options.total_seconds)
        stream.set_progress(progress)
        if progress >= options.quantize_from and not trainer.rounding.weights:
            trainer.set_rounding(TRAINED_ROUNDING)
        factor = schedule(progress, here, options.cooldown)
        trainer.optimizer.muon_rate.fill_(options.muon_rate * factor)
        trainer.optimizer.adam_rate.fill_(options.adam_rate * factor)
        trainer.feed.take(next(batches))
        _step(trainer)
        here, window, meta["step"] = here + 1, window + 1, meta["step"] + 1
        now = time.monotonic()
        if now - shown > 5 or here <= 2 or here == options.max_steps:
            losses = [round(value, 4) for value in trainer.losses.tolist()]
            now = time.monotonic()
            rate = window * options.rows * options.length / (now - shown)
            line = f"step {meta['step']} at {meta['seconds']:.0f}s loss {losses} {rate / 1e3:.0f}k tok/s"
            meta["log"].append(line)
            _report(line)
            shown, window = now, 0
        if scored and now - evaluated > options.evaluate_every:
            _report(_table(f"held out at {meta['seconds']:.0f}s", trainer.score(scored)))
            evaluated = shown = time.monotonic()
            window = 0
    if scored:
        for title, rounding in ROUNDINGS.items():
            trainer.set_rounding(rounding)
            meta[title] = trainer.score(scored)
            _report(_table(title, meta[title]))


def _rest(pause: Path | None) -> float:
    """Waits while the file is there; how long that took, in seconds."""
    if pause is None or not pause.exists():
        return 0.0
    began = time.monotonic()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    _report("resting")
    while pause.exists():
        time.sleep(0.1)
    return time.monotonic() - began


def _step(trainer: Trainer) -> None:
    """One step; when the compiler cannot take rounded inputs, go on with rounded weights only and say so."""
    try:
        trainer.step()
    except RuntimeError as error:
        if not trainer.rounding.activations:
            raise
        _report(f"WARNING: no compiled step with rounded inputs ({error}); training on with rounded weights only")
        trainer.set_rounding(ROUNDINGS["nvfp4 w4a16"])
        trainer.step()


def options_from(arguments: Sequence[str] | None = None) -> Options:
    """Options from a command line."""
    parser = argparse.ArgumentParser(prog="train_reference_model train", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="moe")
    parser.add_argument(
        "--state", type=Path, default=Path(".work/reference/state"), help="folder to resume from and save to"
    )
    parser.add_argument("--start-from", type=Path, help="NVFP4 checkpoint to start from when there is no saved state")
    parser.add_argument(
        "--total-seconds", type=float, default=600, help="length of the whole training, over all slices"
    )
    parser.add_argument("--slice-seconds", type=float, default=480, help="length of this slice, start-up included")
    parser.add_argument("--max-steps", type=int, default=1 << 30)
    parser.add_argument("--rows", type=int, default=16, help="packed rows per step")
    parser.add_argument("--length", type=int, default=4096, help="tokens per row, a multiple of 64")
    parser.add_argument("--workers", type=int, default=6, help="data processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.003)
    parser.add_argument("--cooldown", type=float, default=0.5, help="share of training over which the rate falls")
    parser.add_argument("--quantize-from", type=float, default=0.6)
    parser.add_argument("--evaluate-every", type=float, default=60)
    parser.add_argument("--evaluate-count", type=int, default=64)
    parser.add_argument("--pause-file", type=Path, help="rest while this file is there; that time does not count")
    parser.add_argument("--no-graph", dest="graph", action="store_false")
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `scripts/train_reference_model train`."""
    run(options_from(arguments))
    return 0
