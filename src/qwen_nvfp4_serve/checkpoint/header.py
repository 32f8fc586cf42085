"""The header of a safetensors file: names, dtypes, shapes and places, without the data.

Layout: 8 bytes with the header's length (little-endian), the header as JSON, then the data; offsets count from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

LENGTH_BYTES = 8
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
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError("does not begin like a safetensors file")
    if LENGTH_BYTES + length > file_bytes:
        raise HeaderError(f"has {file_bytes:,} bytes, its header alone needs {LENGTH_BYTES + length:,}")
    return length


def parse_header(text: bytes, shard: str, file_bytes: int) -> dict[str, Tensor]:
    """The tensors of a header's JSON. Raises HeaderError for damage and for data that ends beyond the file."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        raise HeaderError("has a header that is no JSON") from None
    if not isinstance(entries, Mapping):
        raise HeaderError("has a header that is no JSON object")
    base = LENGTH_BYTES + len(text)
    tensors: dict[str, Tensor] = {}
    data_bytes = 0
    try:
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            first, end = entry["data_offsets"]
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            bits = DTYPE_BITS.get(dtype)
            if first < 0 or (bits is not None and prod(shape) * bits != 8 * (end - first)):
                raise HeaderError(f"has a header that contradicts itself: {name} of shape {list(shape)}")
            data_bytes = max(data_bytes, end)
            tensors[name] = Tensor(dtype, shape, shard, base + first, end - first)
    except (KeyError, TypeError, ValueError):
        raise HeaderError("has a header with an entry that is no tensor") from None
    if base + data_bytes > file_bytes:
        raise HeaderError(f"has {file_bytes:,} bytes, its tensors need {base + data_bytes:,}: it is cut short")
    return tensors
