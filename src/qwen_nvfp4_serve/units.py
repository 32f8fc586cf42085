"""Byte units and how to print them."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def gib(size_bytes: float) -> str:
    """`size_bytes` as `12.34 GiB`; what would round to almost nothing as `5.6 MiB`."""
    return f"{size_bytes / GIB:.2f} GiB" if abs(size_bytes) >= GIB / 10 else f"{size_bytes / MIB:.1f} MiB"
