"""ctypes declarations for csrc/moe.h."""

from __future__ import annotations

import ctypes
from functools import cache

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.kernels import build


class Experts(ctypes.Structure):
    """`struct Nvfp4Experts`."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("w13", "w13_scales", "w2", "w2_scales", "gate_scale", "up_scale", "down_scale")
        ),
        *((name, ctypes.c_int32) for name in ("count", "intermediate")),
    )


class MoeCall(ctypes.Structure):
    """`struct Nvfp4MoeCall`."""

    _fields_ = (
        ("routed", Experts),
        ("shared", Experts),
        *((name, ctypes.c_void_p) for name in ("x", "y", "ids", "weights", "shared_share", "intermediate")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride")),
        *((name, ctypes.c_int32) for name in ("m", "hidden", "top_k", "dependent", "octets")),
    )


class RouteCall(ctypes.Structure):
    """`struct Nvfp4RouteCall`."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "router", "shared_gate", "logits", "ids", "weights", "shared_share", "slots")
        ),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("m", "hidden", "experts", "top_k", "renormalize", "dependent")),
    )


@cache
def library() -> ctypes.CDLL:
    """The loaded library with its signatures declared. Raises UnsupportedHostError if it was not built."""
    loaded = build.load(build.NVFP4_MOE)
    pointer, int32 = ctypes.c_void_p, ctypes.c_int32
    loaded.nvfp4_moe_error_name.restype = ctypes.c_char_p
    loaded.nvfp4_moe_experts.argtypes = (ctypes.POINTER(MoeCall), pointer)
    loaded.nvfp4_moe_route.argtypes = (ctypes.POINTER(RouteCall), pointer)
    for function in (
        loaded.nvfp4_moe_experts,
        loaded.nvfp4_moe_route,
        loaded.nvfp4_moe_tokens,
        loaded.nvfp4_moe_slots,
    ):
        function.restype = int32
    ours = (ctypes.sizeof(MoeCall), ctypes.sizeof(RouteCall))
    if (loaded.nvfp4_moe_call_bytes(), loaded.nvfp4_route_call_bytes()) != ours:
        raise QwenNvfp4Error("kernel library nvfp4_moe", seen="another call layout", do="Rebuild it.")
    return loaded


def check(error: int, what: str) -> None:
    """Raises QwenNvfp4Error if a call returned a CUDA error."""
    if error:
        raise QwenNvfp4Error(what, seen=library().nvfp4_moe_error_name(error).decode())
