"""The header of a safetensors file: names, dtypes, shapes and places, without the data.

Layout: 8 bytes with the header's length (little-endian), the header as JSON, then the data; offsets count from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from math import prod
from operator import itemgetter, sub
from typing import Any, NamedTuple

from pydantic_core import from_json

LENGTH_BYTES = 8
LFS_BEGINNING = b"version https://git-lfs"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
# Bits of one element; the names are those of the safetensors format. F4 is two values a byte.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}


class Tensor(NamedTuple):
    """One tensor: `start` is its first byte in the file, `size_bytes` its length, `shard` the file's name."""

    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    size_bytes: int


@dataclass
class HeaderError(Exception):
    """Why a file is no usable safetensors file, as the end of a sentence that begins with its name."""

    reason: str


def header_length(first: bytes, file_bytes: int) -> int:
    """Length of the JSON header from a file's first 8 bytes. Raises HeaderError when the file cannot hold it."""
    if len(first) < LENGTH_BYTES:
        raise HeaderError(f"has {file_bytes:,} bytes, too few for a header")
    if first.startswith(LFS_BEGINNING[:LENGTH_BYTES]):
        raise HeaderError("is a Git LFS pointer, the file itself was not downloaded")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError("does not begin like a safetensors file")
    if LENGTH_BYTES + length > file_bytes:
        raise HeaderError(f"has {file_bytes:,} bytes, its header alone needs {LENGTH_BYTES + length:,}")
    return length


def parse_header(text: bytes, shard: str, file_bytes: int) -> dict[str, Tensor]:
    """The tensors of a header's JSON. Raises HeaderError for what the safetensors library would not open: damage, a
    type it does not know, sizes that contradict each other, data that does not fill the file to its end.
    """
    entries = _entries(text)
    _check_metadata(entries.pop("__metadata__", None))
    base = LENGTH_BYTES + len(text)
    if not entries:
        _check_end(base, file_bytes)
        return {}
    # Column by column rather than tensor by tensor: a large model has 370,000 of them.
    try:
        dtypes, shapes, places = zip(*map(_FIELDS, entries.values()), strict=True)
        starts, ends = zip(*places, strict=True)
        if set(map(type, shapes)) != {list} or set(map(type, chain(starts, ends, *shapes))) != {int}:
            raise TypeError(shapes)  # a fraction, a truth value, a text
        kinds = list(zip(dtypes, map(tuple, shapes), strict=True))
        known = {kind: (_size_bytes(*kind), *kind) for kind in dict.fromkeys(kinds)}
    except (KeyError, TypeError, ValueError):
        raise HeaderError("has a header with an entry that is no tensor") from None
    sizes, dtypes, shapes = zip(*map(known.__getitem__, kinds), strict=True)  # the same objects for all of a kind
    spans = tuple(map(sub, ends, starts))
    if spans != sizes:
        name, shape = next(seen[:2] for seen in zip(entries, shapes, spans, sizes, strict=True) if seen[2] != seen[3])
        raise HeaderError(f"has a header that contradicts itself: {name} of shape {list(shape)}")
    tensors = dict(
        zip(
            entries, map(_new_tensor, zip(dtypes, shapes, repeat(shard), map(base.__add__, starts), sizes)), strict=True
        )
    )
    end = ends[-1] if starts == (0, *ends[:-1]) else _end_of(tensors, base)
    _check_end(base + end, file_bytes)
    return tensors


_FIELDS = itemgetter("dtype", "shape", "data_offsets")
# A named tuple's own __new__ takes twice as long.
_new_tensor: Callable[[Iterable[object]], Tensor] = partial(tuple.__new__, Tensor)


def _entries(text: bytes) -> dict[str, dict[str, Any]]:
    try:
        entries = from_json(text)  # half the time of json.loads, which counts where there are 100,000 tensors
    except ValueError:
        raise HeaderError("has a header that is no JSON") from None
    if not isinstance(entries, dict):
        raise HeaderError("has a header that is no JSON object")
    return entries


def _check_metadata(metadata: object) -> None:
    is_text = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not is_text:
        raise HeaderError("has a header whose __metadata__ is no list of texts")


def _size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in DTYPE_BITS:
        raise HeaderError(f"has a tensor of the unknown type {dtype!r}")
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(shape)
    size, rest = divmod(prod(shape) * DTYPE_BITS[dtype], 8)
    if rest:
        raise HeaderError(f"has a tensor that ends inside a byte: {dtype} of shape {list(shape)}")
    return size


def _end_of(tensors: Mapping[str, Tensor], base: int) -> int:
    """Where the data ends, counted from `base`. Raises HeaderError unless the tensors follow each other from there."""
    place = base
    for start, size, name in sorted((tensor.start, tensor.size_bytes, name) for name, tensor in tensors.items()):
        if start != place:
            fault = "overlaps the one before it" if start < place else "leaves a hole before it"
            raise HeaderError(f"has a header that contradicts itself: {name} {fault}")
        place += size
    return place - base


def _check_end(end: int, file_bytes: int) -> None:
    if end > file_bytes:
        raise HeaderError(f"has {file_bytes:,} bytes, its tensors need {end:,}: it is cut short")
    if end < file_bytes:
        raise HeaderError(f"has {file_bytes:,} bytes, its tensors end at {end:,}: safetensors will not open it")
