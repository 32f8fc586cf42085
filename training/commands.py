"""What `scripts/train_reference_model` can do beside training: export, convert, judge."""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch

from training import checkpoint, export, known_answers, rates, tokenizer, train
from training.calibrate import input_amax
from training.config import MODELS
from training.mixture import training_example
from training.model import ReferenceModel
from training.packing import Batch, Packer, encode
from training.tokenizer import REFERENCE_DIR, FastEncoder
from training.train import Feed, load_state

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "reference-model.md"
RATES = DOCUMENT.parent / "results" / "reference-model"
_SHARED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model_of(folder: Path) -> ReferenceModel:
    """The float32 model of a tracked NVFP4 checkpoint, weights dequantized."""
    config, state = checkpoint.read(folder)
    model = ReferenceModel(config)
    model.load_state_dict(state)
    return model.eval()


def _sample(rows: int, length: int) -> Batch:
    rng, encoder, packer = Random(11), FastEncoder(tokenizer.load()), Packer(rows, length)
    while True:
        ids, target = encode(encoder, training_example(rng, 1.0))
        made = packer.add(ids, target) if len(ids) <= length else None
        if made is not None:
            return made[0]


def export_tracked(arguments: Sequence[str]) -> int:
    """Write a saved training state as the tracked NVFP4 checkpoint of its model."""
    parser = argparse.ArgumentParser(prog="train_reference_model export", description=export_tracked.__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--to", type=Path, help="folder; by default the tracked one")
    options = parser.parse_args(arguments)
    saved = load_state(options.state, options.model)
    if saved is None:
        parser.error(f"no saved state of {options.model} in {options.state}")
    config, state = MODELS[options.model], {name: tensor.float() for name, tensor in saved[0].items()}
    model = ReferenceModel(config)
    model.load_state_dict(state)
    feed = Feed(2, 1024, torch.device("cpu"), torch.float32)
    rows, _ = feed.take(_sample(2, 1024))
    export.write_compressed_tensors(options.to or REFERENCE_DIR / options.model, config, state, input_amax(model, rows))
    return 0


def convert(arguments: Sequence[str]) -> int:
    """Write a tracked checkpoint in another form: ModelOpt NVFP4, or BF16 with the same values."""
    parser = argparse.ArgumentParser(prog="train_reference_model convert", description=convert.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("form", choices=("modelopt", "bf16"))
    parser.add_argument("to", type=Path)
    options = parser.parse_args(arguments)
    if options.form == "modelopt":
        export.convert_to_modelopt(options.folder, options.to)
    else:
        export.convert_to_bf16(options.folder, options.to)
    for name in _SHARED:
        shutil.copyfile(options.folder / name, options.to / name)
    return 0


def answers(arguments: Sequence[str]) -> int:
    """Choose known answers that a tracked checkpoint gives with a margin, and write known_answers.json beside it."""
    parser = argparse.ArgumentParser(prog="train_reference_model answers", description=answers.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args(arguments)
    records, rates = known_answers.choose(model_of(options.folder), options.seed, options.rounds)
    known_answers.write(options.folder / "known_answers.json", records)
    print(f"{len(records)} known answers")
    for kind, rate in rates.items():
        print(f"{kind}: {rate}")
    return 0


def judge(arguments: Sequence[str]) -> int:
    """Check the known answers beside a checkpoint; exit 1 when one is wrong."""
    parser = argparse.ArgumentParser(prog="train_reference_model judge", description=judge.__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    model, encoder = model_of(options.folder), FastEncoder(tokenizer.load())
    wrong = 0
    for record in json.loads((options.folder / "known_answers.json").read_text()):
        judged = known_answers.judge(model, encoder, known_answers.conversation_of(record))
        wrong += not judged.right
        print(f"{record['id']}: {'right' if judged.right else 'WRONG'}, margin {judged.margin:.2f}", flush=True)
    return int(wrong > 0)


def rate(arguments: Sequence[str]) -> int:
    """Measure a tracked checkpoint's held-out accuracy by task and rounding; W4A16 is BF16 with the same weights."""
    parser = argparse.ArgumentParser(prog="train_reference_model rate", description=rate.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=8, help="examples a task and thinking mode")
    parser.add_argument("--needles", type=int, default=4, help="examples a length and thinking mode")
    options = parser.parse_args(arguments)
    RATES.mkdir(parents=True, exist_ok=True)
    keep = RATES / f"{options.folder.name}.json"
    rates.measure(model_of(options.folder), options.count, options.needles, keep)
    return table(())


def table(arguments: Sequence[str]) -> int:
    """Write the table of what `rate` measured into docs/reference-model.md."""
    argparse.ArgumentParser(prog="train_reference_model table", description=table.__doc__).parse_args(arguments)
    rates.write_table(DOCUMENT, RATES)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train.main,
    "export": export_tracked,
    "convert": convert,
    "answers": answers,
    "judge": judge,
    "rate": rate,
    "table": table,
}


def main(arguments: Sequence[str]) -> int:
    """Run one command; `train` when none is named."""
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    return train.main(arguments)
