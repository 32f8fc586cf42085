"""ctypes declarations for csrc/bf16_linear.h."""

from __future__ import annotations

import ctypes
from functools import cache

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.kernels import build


class Bf16LinearCall(ctypes.Structure):
    """`struct Bf16LinearCall`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "x", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride")),
        *((name, ctypes.c_int32) for name in ("m", "n", "k", "variant", "dependent")),
    )


class Bf16LinearVariant(ctypes.Structure):
    """`struct Bf16LinearVariant`."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("tokens", "warps", "blocks", "rows", "loads", "few_rows", "least_columns")
    )


def variants(loaded: ctypes.CDLL) -> list[Bf16LinearVariant]:
    """The library's variant table, in the order in which a call tries them. Needs no card."""
    table: list[Bf16LinearVariant] = []
    row = Bf16LinearVariant()
    while loaded.bf16_linear_variant(len(table), ctypes.byref(row)) == 0:
        table.append(row)
        row = Bf16LinearVariant()
    return table


@cache
def library() -> ctypes.CDLL:
    """The loaded library with its signatures declared. Raises UnsupportedHostError if it was not built."""
    loaded = build.load(build.BF16_LINEAR)
    loaded.bf16_error_name.restype = ctypes.c_char_p
    loaded.bf16_linear.argtypes = (ctypes.POINTER(Bf16LinearCall), ctypes.c_void_p)
    for function in (loaded.bf16_linear, loaded.bf16_linear_call_bytes):
        function.restype = ctypes.c_int32
    if loaded.bf16_linear_call_bytes() != ctypes.sizeof(Bf16LinearCall):
        raise QwenNvfp4Error("kernel library bf16_linear", seen="another call layout", do="Rebuild it.")
    return loaded


def check(error: int, what: str) -> None:
    """Raises QwenNvfp4Error if a call returned a CUDA error."""
    if error:
        raise QwenNvfp4Error(what, seen=library().bf16_error_name(error).decode())
