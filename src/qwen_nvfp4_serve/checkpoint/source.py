"""What a checkpoint folder holds: its JSON files and the headers of its shards, read without their data."""

from __future__ import annotations

import gc
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from qwen_nvfp4_serve.checkpoint.header import LENGTH_BYTES, HeaderError, Tensor, header_length, parse_header
from qwen_nvfp4_serve.errors import UsageError

INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_BYTES = 200_000_000
NEAR_BYTES = 256  # read around a scalar: dozens lie there where a writer puts them together, and it costs what 8 do


@contextmanager
def without_collector() -> Iterator[None]:
    """Holds the garbage collector off: headers are some 100,000 small objects without cycles, and it walks them all."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


ScalarReader = Callable[[Sequence[Tensor]], list[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One *.safetensors file. size_bytes None: not there. reason: why it cannot be read, None when it can.

    data_bytes: of all its tensors, 0 when it cannot be read.
    """

    name: str
    size_bytes: int | None
    tensors: Mapping[str, Tensor]
    data_bytes: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint's parts. `place` is the folder or hub id it came from.

    index: the parsed index, None without one. read_scalars: first element of each tensor as a float, None where that
    cannot be had; it may be slow (a request each on the hub), so callers bound how many they ask for.
    """

    place: str
    config: Mapping[str, object]
    hf_quant: Mapping[str, object] | None
    index: Mapping[str, object] | None
    shards: tuple[Shard, ...]
    read_scalars: ScalarReader
    scalars_are_cheap: bool = True


def read_json_file(path: Path) -> Mapping[str, object] | None:
    """The object in a JSON file, None when there is no such file. Raises UsageError when it is anything else."""
    try:
        status = path.stat()
        if other := _other_kind(status.st_mode):
            raise UsageError(f"{path}", seen=other, expected="a readable JSON file")
        if status.st_size > MAX_JSON_BYTES:
            raise UsageError(f"{path}", seen=f"{status.st_size:,} bytes", expected="a small JSON file")
        parsed = parse_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}", seen=error.strerror or str(error), expected="a readable JSON file") from None
    return parsed


def _other_kind(mode: int) -> str | None:
    """What a path is when it is no file: reading a pipe or a device might never end."""
    if stat.S_ISREG(mode):
        return None
    return "a directory" if stat.S_ISDIR(mode) else "a device or a pipe"


def parse_json(text: bytes, name: str) -> Mapping[str, object]:
    """The object that `text` holds; raises UsageError naming the file when it is no JSON object."""
    try:
        parsed = from_json(text)  # half the time of json.loads, for an index of 10 MB
    except ValueError as error:
        raise UsageError(f"{name}", seen=f"no JSON ({error})", expected="a JSON object") from None
    if not isinstance(parsed, dict):
        kind = {list: "list", str: "text", bool: "truth value", type(None): "null"}.get(type(parsed), "number")
        raise UsageError(f"{name}", seen=f"a JSON {kind}", expected="a JSON object")
    return parsed


def shard_names(index: Mapping[str, object] | None, present: Sequence[str]) -> tuple[str, ...]:
    """The shards to read: those that the index names, else all that are present; with a bad index the latter too."""
    weight_map = index.get("weight_map") if index else None
    if not isinstance(weight_map, Mapping):
        return tuple(sorted(present))
    return tuple(sorted(set(map(str, weight_map.values())) or present))


def open_folder(folder: Path) -> Source:
    """The parts of a checkpoint folder. Raises UsageError when it is no folder, or has no or a broken config.json."""
    if not folder.is_dir():
        seen = "a file" if folder.is_file() else "nothing there"
        raise UsageError(f"checkpoint {folder}", seen=seen, expected="a folder with config.json and *.safetensors")
    config = read_json_file(folder / "config.json")
    if config is None:
        raise UsageError(f"checkpoint {folder}", seen="no config.json", expected="config.json and *.safetensors")
    index = read_json_file(folder / INDEX_NAME)
    present = [path.name for path in folder.glob("*.safetensors")]
    return Source(
        place=str(folder),
        config=config,
        hf_quant=read_json_file(folder / "hf_quant_config.json"),
        index=index,
        shards=tuple(read_shard(folder, name) for name in shard_names(index, present)),
        read_scalars=lambda tensors: _read_scalars(folder, tensors),
    )


def read_shard(folder: Path, name: str) -> Shard:
    """The header of one file, or why it cannot be read; never raises."""
    path = folder / name
    if name != path.name or not name.isprintable():
        return Shard(name=name, size_bytes=None, tensors={}, reason="is no file name of the checkpoint's folder")
    try:
        status = path.stat()
        size = status.st_size
        if other := _other_kind(status.st_mode):
            return Shard(name=name, size_bytes=None, tensors={}, reason=f"is {other}, not a file")
        with path.open("rb") as file:
            length = header_length(file.read(LENGTH_BYTES), size)
            tensors = parse_header(file.read(length), name, size)
    except FileNotFoundError:
        return Shard(name=name, size_bytes=None, tensors={}, reason="is not there")
    except OSError as error:
        return Shard(name=name, size_bytes=None, tensors={}, reason=f"cannot be read: {error.strerror}")
    except HeaderError as error:
        return Shard(name=name, size_bytes=size, tensors={}, reason=error.reason)
    return Shard(name=name, size_bytes=size, tensors=tensors, data_bytes=size - LENGTH_BYTES - length)


def decode_scalar(dtype: str, data: bytes) -> float | None:
    """The number in the first bytes of an F32, BF16, F16 or F64 tensor; None for other types and short data."""
    if dtype == "BF16" and len(data) >= 2:
        dtype, data = "F32", b"\0\0" + data[:2]
    layout = _SCALARS.get(dtype)
    return None if layout is None or len(data) < layout.size else float(layout.unpack_from(data)[0])


_SCALARS = {"F32": struct.Struct("<f"), "F16": struct.Struct("<e"), "F64": struct.Struct("<d")}


def _read_scalars(folder: Path, tensors: Sequence[Tensor]) -> list[float | None]:
    values: list[float | None] = [None] * len(tensors)
    by_shard: dict[str, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_shard.setdefault(tensor.shard, []).append(place)
    for shard, places in by_shard.items():
        try:
            with (folder / shard).open("rb", buffering=0) as file:
                _read_in_order(file.fileno(), tensors, places, values)
        except OSError:
            continue
    return values


def _read_in_order(handle: int, tensors: Sequence[Tensor], places: Sequence[int], values: list[float | None]) -> None:
    """Read `places` of `tensors` into `values`; scalars that lie close together, as most writers put them, at once."""
    start, data = 0, b""
    for place in sorted(places, key=lambda place: tensors[place].start):
        dtype, at = tensors[place].dtype, tensors[place].start - start
        if at + 8 > len(data):
            start, at = tensors[place].start, 0
            data = os.pread(handle, NEAR_BYTES, start)
        values[place] = decode_scalar(dtype, data[at : at + 8])
