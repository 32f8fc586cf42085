"""ctypes declarations for csrc/gdn_decode.h."""

from __future__ import annotations

import ctypes
from functools import cache

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.kernels import build

POINTERS = ("x", "weight", "bias", "a", "b", "a_log", "dt_bias", "indices", "conv_state", "state", "out", "counters")
STRIDES = ("x", "a", "b", "index", "conv_slot", "conv_token", "state_slot")
NUMBERS = (
    *("tokens", "key_heads", "value_heads", "state_is_bf16", "a_log_is_bf16", "dt_bias_is_bf16"),
    *("rows", "early", "dependent"),
)


class GdnDecodeCall(ctypes.Structure):
    """`struct GdnDecodeCall`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((f"{name}_stride", ctypes.c_int64) for name in STRIDES),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in NUMBERS),
    )


@cache
def library() -> ctypes.CDLL:
    """The loaded library with its signatures declared. Raises UnsupportedHostError if it was not built."""
    return declared(build.load(build.GDN_DECODE))


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """`loaded` with its signatures. Raises QwenNvfp4Error if it was compiled for another layout of a call."""
    loaded.gdn_error_name.restype = ctypes.c_char_p
    loaded.gdn_decode.argtypes = (ctypes.POINTER(GdnDecodeCall), ctypes.c_void_p)
    for function in (loaded.gdn_decode, loaded.gdn_decode_call_bytes):
        function.restype = ctypes.c_int32
    if loaded.gdn_decode_call_bytes() != ctypes.sizeof(GdnDecodeCall):
        raise QwenNvfp4Error("kernel library gdn_decode", seen="another call layout", do="Rebuild it.")
    return loaded


def check(error: int, what: str) -> None:
    """Raises QwenNvfp4Error if a call returned a CUDA error."""
    if error:
        raise QwenNvfp4Error(what, seen=library().gdn_error_name(error).decode())
