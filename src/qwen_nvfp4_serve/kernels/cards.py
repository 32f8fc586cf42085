"""The card of a tensor, and calls to our libraries there, without the microseconds that torch's own questions take.

A forward pass asks hundreds of times. Whoever asks has a tensor on a card, so torch has been set up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a tensor's device."""
    # Kept for cards alone: a device without an index is whichever is current, or none.
    if device.index is not None:
        return _capability(device.index)
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


@cache
def _capability(index: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


def stream_key(device: torch.device) -> tuple[int, int]:
    """What tells torch's current stream on a tensor's device from those of all devices: its index and handle."""
    index = device.index
    return index, torch._C._cuda_getCurrentRawStream(index)


def is_current(device: torch.device) -> bool:
    """Whether a tensor's card is the current one."""
    return bool(device.index == torch._C._cuda_getDevice())


def launch(function: Callable[..., int], device: torch.device, *arguments: object) -> int:
    """`function(*arguments, stream)` with `device`, that of the tensors, as the current one; what it returns."""
    index = device.index
    if index == torch._C._cuda_getDevice():  # as `is_current`, without a call
        return function(*arguments, torch._C._cuda_getCurrentRawStream(index))
    with torch.cuda.device(index):
        return function(*arguments, torch._C._cuda_getCurrentRawStream(index))
