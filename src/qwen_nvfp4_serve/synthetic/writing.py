"""Writes a checkpoint folder: all of it or nothing, in shards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.synthetic import config, tokenizer
from qwen_nvfp4_serve.synthetic.spec import CheckpointSpec, check_architecture

if TYPE_CHECKING:
    import torch

RECEIPT = "synthetic.json"


def write_checkpoint(dest: Path, spec: CheckpointSpec, *, overwrite: bool = False) -> Path:
    """The folder `dest` with `spec`'s checkpoint, ready to serve.

    It is made beside `dest` under another name and renamed when complete, so an interrupted run never leaves a folder
    that looks whole. Raises UsageError for an impossible spec, or if `dest` holds files and `overwrite` is off.
    """
    check_architecture(spec.architecture)
    spec.rules()
    dest = dest.absolute()
    if not overwrite and dest.exists() and any(dest.iterdir()):
        raise UsageError("checkpoint folder", seen=f"{dest}, not empty", expected="a new or empty folder")
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial = dest.with_name(f".{dest.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_weights(partial, spec)
        _write_documents(partial, spec)
        _swap_in(partial, dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return dest


def ensure_checkpoint(dest: Path, spec: CheckpointSpec) -> Path:
    """`dest`, written only if it does not hold exactly `spec` yet. Raises UsageError if it holds something else that
    was not written here.
    """
    receipt = dest / RECEIPT
    if receipt.is_file():
        if json.loads(receipt.read_text()) == spec.to_json():
            return dest.absolute()
        return write_checkpoint(dest, spec, overwrite=True)
    return write_checkpoint(dest, spec)


def _swap_in(partial: Path, dest: Path) -> None:
    retired = dest.with_name(f".{dest.name}.retired-{os.getpid()}")
    shutil.rmtree(retired, ignore_errors=True)
    if dest.exists():
        dest.rename(retired)
    partial.rename(dest)
    shutil.rmtree(retired, ignore_errors=True)


def _write_weights(folder: Path, spec: CheckpointSpec) -> None:
    from safetensors.torch import save_file

    from qwen_nvfp4_serve.synthetic.tensors import tensors_of

    parts: list[Path] = []
    owner: dict[str, int] = {}
    total_bytes = 0
    for shard in _shards(((item.name, item.tensor) for item in tensors_of(spec)), spec.shard_bytes):
        part = folder / f"part-{len(parts)}"
        save_file(shard, part, metadata={"format": "pt"})
        owner |= dict.fromkeys(shard, len(parts))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        parts.append(part)
    if len(parts) == 1:
        parts[0].rename(folder / "model.safetensors")
        return
    names = [f"model-{index + 1:05}-of-{len(parts):05}.safetensors" for index in range(len(parts))]
    for part, name in zip(parts, names, strict=True):
        part.rename(folder / name)
    weight_map = {tensor: names[index] for tensor, index in owner.items()}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _shards(tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for name, tensor in tensors:
        if shard and size_bytes + tensor.nbytes > shard_bytes:
            yield shard
            shard, size_bytes = {}, 0
        shard[name] = tensor
        size_bytes += tensor.nbytes
    yield shard


def _write_documents(folder: Path, spec: CheckpointSpec) -> None:
    dims = spec.architecture
    documents: dict[str, Any] = {
        "tokenizer.json": tokenizer.tokenizer_json(dims.vocab),
        "tokenizer_config.json": tokenizer.tokenizer_config(dims.max_position),
        "generation_config.json": config.generation_config(),
        "preprocessor_config.json": tokenizer.image_processor_config(),
        "video_preprocessor_config.json": tokenizer.video_processor_config(),
        "hf_quant_config.json": config.hf_quant_config(spec),
        RECEIPT: spec.to_json(),
        "config.json": config.model_config(spec),
    }
    template = files("qwen_nvfp4_serve.synthetic").joinpath("chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
    for name, content in documents.items():
        if content is not None:
            _write_json(folder / name, content)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
