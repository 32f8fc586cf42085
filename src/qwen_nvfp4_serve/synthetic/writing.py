"""Writes a checkpoint folder: all of it or nothing, in shards."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.synthetic import config, tokenizer
from qwen_nvfp4_serve.synthetic.spec import CheckpointSpec, check_architecture

if TYPE_CHECKING:
    import torch

RECEIPT = "synthetic.json"


def write_checkpoint(dest: Path, spec: CheckpointSpec, *, overwrite: bool = False) -> Path:
    """The folder `dest` with `spec`'s checkpoint, ready to serve.

    It is made beside `dest` under another name and renamed when complete, so an interrupted run never leaves a folder
    that looks whole. Raises UsageError for an impossible spec, if `dest` holds files and `overwrite` is off, or if no
    folder can be made there; QwenNvfp4Error when the disk fails or is full.
    """
    check_architecture(spec.architecture)
    spec.rules()
    dest = dest.absolute()
    partial = _beside(dest, "partial")
    try:
        _check_place(dest, overwrite=overwrite)
        dest.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(dest)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise UsageError(
            f"checkpoint folder {dest}",
            seen=error.strerror or str(error),
            expected="a place where a folder can be made",
        ) from None
    try:
        _write_weights(partial, spec)
        _write_documents(partial, spec)
        _swap_in(partial, dest)
    except OSError as error:
        raise QwenNvfp4Error(
            f"checkpoint folder {dest} cannot be written",
            seen=error.strerror or str(error),
            do="Make room there, or name another folder.",
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return dest


def ensure_checkpoint(dest: Path, spec: CheckpointSpec) -> Path:
    """`dest`, written only if it does not hold exactly `spec` yet. Raises UsageError if it holds something else that
    was not written here, and what `write_checkpoint` raises.
    """
    receipt = dest / RECEIPT
    try:
        found = json.loads(receipt.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return write_checkpoint(dest, spec)
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(
            f"checkpoint folder {dest}",
            seen=f"a {RECEIPT} that cannot be read",
            expected="a folder that was written here",
            do="Remove the folder to have it written anew.",
        )
    if found == spec.to_json():
        return dest.absolute()
    return write_checkpoint(dest, spec, overwrite=True)


def _check_place(dest: Path, *, overwrite: bool) -> None:
    if dest.exists() and not dest.is_dir():
        raise UsageError(f"checkpoint folder {dest}", seen="a file", expected="a new or empty folder")
    if not overwrite and dest.exists() and any(dest.iterdir()):
        raise UsageError(f"checkpoint folder {dest}", seen="not empty", expected="a new or empty folder")


def _beside(dest: Path, role: str) -> Path:
    return dest.with_name(f".{dest.name}.{role}-{os.getpid()}")


def _remove_leftovers(dest: Path) -> None:
    """What killed runs left beside `dest`; a process that still runs keeps its own."""
    leftover = re.compile(rf"\.{re.escape(dest.name)}\.(?:partial|retired)-([0-9]+)")
    for entry in list(dest.parent.iterdir()):
        match = leftover.fullmatch(entry.name)
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(entry, ignore_errors=True)


def _swap_in(partial: Path, dest: Path) -> None:
    retired = _beside(dest, "retired")
    shutil.rmtree(retired, ignore_errors=True)
    replaces = dest.exists()
    if replaces:
        dest.rename(retired)
    try:
        partial.rename(dest)
    except OSError:
        if replaces:
            retired.rename(dest)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def _write_weights(folder: Path, spec: CheckpointSpec) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from qwen_nvfp4_serve.synthetic.tensors import tensors_of

    parts: list[Path] = []
    owner: dict[str, int] = {}
    total_bytes = 0
    for shard in _shards(((item.name, item.tensor) for item in tensors_of(spec)), spec.shard_bytes):
        part = folder / f"part-{len(parts)}"
        try:
            save_file(shard, part, metadata={"format": "pt"})
        except SafetensorError as error:  # its word for a full disk
            raise OSError(str(error)) from None
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
