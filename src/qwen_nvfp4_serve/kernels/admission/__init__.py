"""Which kernel serves which number of tokens, found on the user's own card before the weights load.

    admit(shapes, card=...) -> Table      in a second when it was found before, in up to 45 s otherwise

Each candidate for each shape must support it, be right, and is then timed; see `trial`. Importing this needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path

from qwen_nvfp4_serve.host import Gpu
from qwen_nvfp4_serve.kernels.admission import store
from qwen_nvfp4_serve.kernels.admission.parent import Child, Limits, Process, try_all
from qwen_nvfp4_serve.kernels.admission.table import Finding, Shape, Span, Table, Verdict, left_out, serving, summary

CANDIDATES = ("qwen-small-m", "qwen-dequantized", "qwen-tiled", "flashinfer-cutlass", "flashinfer-b12x")
EXACT = CANDIDATES[:3]  # those that leave activations as they are and have a scale for each row
SPEC = "qwen_nvfp4_serve.kernels.admission.candidates:default_candidates"
EXPERTS = ("qwen-experts-small-m", "qwen-experts-grouped", "flashinfer-experts-grouped")
EXACT_EXPERTS = EXPERTS[:2]  # those that leave activations as they are
EXPERTS_SPEC = "qwen_nvfp4_serve.kernels.admission.experts:default_candidates"
BF16 = ("qwen-bf16-small-m", "vendor-bf16")
BF16_SPEC = "qwen_nvfp4_serve.kernels.admission.bf16:default_candidates"
EXPERTS_LIMITS = Limits(silence_s=30.0, total_s=75.0)  # Triton compiles a kernel in seconds, on a busy machine in ten

__all__ = [
    "BF16", "BF16_SPEC", "CANDIDATES", "EXACT", "EXACT_EXPERTS", "EXPERTS", "EXPERTS_LIMITS", "EXPERTS_SPEC", "Finding",
    "Limits", "Shape", "Span", "Table", "Verdict", "admit", "left_out", "serving", "start_process", "summary",
]  # fmt: skip


def start_process(
    names: Sequence[str],
    *,
    shapes: Sequence[Shape],
    device: str,
    spec: str = SPEC,
    environment: Mapping[str, str] | None = None,
    spaced: bool = True,
) -> Child:
    """A child that tries the candidates `names` of `spec` on `device`. spaced: timed calls follow a small kernel."""
    request = {
        "spec": spec,
        "names": list(names),
        "shapes": [list(astuple(shape)) for shape in shapes],
        "device": device,
        "spaced": spaced,
    }
    return Process(request, environment)


def admit(
    shapes: Sequence[Shape],
    *,
    card: Gpu,
    device: str = "cuda:0",
    names: Sequence[str] = CANDIDATES,
    spec: str = SPEC,
    directory: Path | None = None,
    start: Callable[..., Child] | None = None,
    limits: Limits | None = None,
) -> Table:
    """The table for these shapes on this card: the one kept, if it is valid and final, else a new one, kept.

    names, spec: the candidates for linear layers unless told otherwise; for experts EXPERTS of EXPERTS_SPEC.
    device: as the child process sees the card. start: how a child is begun, to be replaced in tests.
    """
    valid_for = store.facts(card) | {"candidates": ",".join(names)}
    path = store.path_of(directory or store.folder(), valid_for, shapes)
    asked_s = time.time()
    with store.alone(path):
        known = store.read(path)
        # What another worker found while this one waited is as good as what it would find itself.
        if known is not None and (known.final or path.stat().st_mtime >= asked_s):
            return known
        begin = time.monotonic()
        start = start or partial(start_process, shapes=shapes, device=device, spec=spec)
        findings = try_all(names, shapes, start=start, limits=limits)
        table = Table(facts=valid_for, findings=findings, took_s=time.monotonic() - begin)
        store.write(path, table)
    return table
