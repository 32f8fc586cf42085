"""ctypes declarations for csrc/linear.h."""

from __future__ import annotations

import ctypes
from functools import cache

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.kernels import build


class LinearCall(ctypes.Structure):
    """`struct Nvfp4LinearCall`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "row_scale", "bias", "x", "y", "workspace")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride")),
        *((name, ctypes.c_int32) for name in ("m", "n", "k", "variant", "grid", "dependent")),
    )


class LinearVariant(ctypes.Structure):
    """`struct Nvfp4LinearVariant`."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in ("tokens", "warps", "blocks", "capability", "layers", "step_columns", "rows", "shared_bytes")
    )

    def takes(self, m: int, k: int, capability: tuple[int, int]) -> bool:
        """Whether a card of this capability can be asked for it, with m tokens and k columns."""
        major, minor = capability
        runs = self.capability in {0, 10 * major + minor}
        return bool(runs and m <= self.tokens and k % self.step_columns == 0)


def variants(loaded: ctypes.CDLL) -> list[LinearVariant]:
    """The library's variant table, in the order in which a call tries them. Needs no card."""
    table: list[LinearVariant] = []
    row = LinearVariant()
    while loaded.nvfp4_linear_variant(len(table), ctypes.byref(row)) == 0:
        table.append(row)
        row = LinearVariant()
    return table


@cache
def library() -> ctypes.CDLL:
    """The loaded library with its signatures declared. Raises UnsupportedHostError if it was not built."""
    loaded = build.load(build.NVFP4_LINEAR)
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    loaded.nvfp4_linear_workspace_bytes.restype = int64
    loaded.nvfp4_error_name.restype = ctypes.c_char_p
    loaded.nvfp4_linear.argtypes = (ctypes.POINTER(LinearCall), pointer)
    loaded.nvfp4_dequantize.argtypes = (pointer, pointer, pointer, int64, int64, int64, int64, pointer)
    for function in (loaded.nvfp4_linear, loaded.nvfp4_dequantize, loaded.nvfp4_linear_call_bytes):
        function.restype = int32
    if loaded.nvfp4_linear_call_bytes() != ctypes.sizeof(LinearCall):
        raise QwenNvfp4Error("kernel library nvfp4_linear", seen="another call layout", do="Rebuild it.")
    return loaded


def check(error: int, what: str) -> None:
    """Raises QwenNvfp4Error if a call returned a CUDA error."""
    if error:
        raise QwenNvfp4Error(what, seen=library().nvfp4_error_name(error).decode())
