"""How our ops are made known to torch.

`torch.library.custom_op` wraps each call in Python: a kernel that only refuses gradients, a check that nothing returned
is an argument, a switch for Dynamo. A prefill calls hundreds of ops whose work on the card is a few microseconds, so
ours are registered with the dispatcher itself. Therefore a function registered here returns memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMESPACE = "qwen_nvfp4"
BACKENDS = ("CPU", "CUDA")

_libraries: dict[str, torch.library.Library] = {}  # an op lives as long as the library that defined it


def register(
    name: str,
    schema: str,
    function: Callable[..., torch.Tensor],
    fake: Callable[..., torch.Tensor],
    *,
    backends: Sequence[str] = BACKENDS,
) -> Any:
    """The op `torch.ops.qwen_nvfp4.<name>`, one node of a compiled graph, for inference: gradients are not defined.

    schema: "(arguments) -> Tensor", nothing mutated. function: runs on tensors of `backends` and returns new memory.
    fake: the same of tensors without data. A second registration of a name, by a module that is imported again, takes
    the place of the first.
    """
    before = _libraries.pop(name, None)
    if before is not None:
        before._destroy()
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for backend in backends:
        library.impl(name, function, backend)
    # Without this, torch would look at every argument for one that requires a gradient.
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    _libraries[name] = library
    return getattr(getattr(torch.ops, NAMESPACE), name).default
