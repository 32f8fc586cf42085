"""The child of an admission: tries candidates on this card and reports each step as one JSON line.

python -m qwen_nvfp4_serve.kernels.admission.trial REQUEST   where REQUEST is JSON, see `Request`.

A candidate may be wrong, crash or hang here: the parent reads how far it came. Correctness is judged on random data
whose output memory is poisoned, at sizes that need padding, with inputs scaled far up and down; only then is it timed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qwen_nvfp4_serve.kernels import graph_timing, nvfp4
from qwen_nvfp4_serve.kernels.admission import candidates as known
from qwen_nvfp4_serve.kernels.admission import timing
from qwen_nvfp4_serve.kernels.admission.candidates import Candidate
from qwen_nvfp4_serve.kernels.admission.cases import INPUT_AMAX, Case, make_case
from qwen_nvfp4_serve.kernels.admission.parent import SMALL_KERNEL
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, Finding, Shape, Verdict, finding_to_json
from qwen_nvfp4_serve.kernels.admission.timing import Timer, cpu_timer
from qwen_nvfp4_serve.kernels.nvfp4_linear import reference

CHECKED_TOKENS = (1, 2, 7, 8, 16, 17, 33, 64, 65, 200)
PADDED = ((200, 768), (96, 512), (1000, 640))  # rows that fill no tile of scales
SCALED = (2.0**-12, 2.0**12)  # what they multiply: products beyond FP16's range, in both directions
CHECKED_ROWS = 8192  # of the FP64 copy of a weight at a time
MARGIN = 64  # elements behind the output that must stay as they were
COLD_BYTES = 256 * 2**20  # of weights, so that none is in an L2 cache (126 MB on the largest card)
MAX_COPIES = 32
MANY_TOKENS = 256
# A library rounds ties, and quotients, in its own way: this much of the activations' norm may differ from ours.
ROUNDING_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the child is asked. spec: module:function of the candidates. names: which, in order. device: as torch.

    shapes: the numbers of `Shape`; all linear layers or all experts, as the candidates are. spaced: timed calls follow
    the small kernel of `graph_timing`.
    """

    spec: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    device: str
    spaced: bool


@dataclass(frozen=True, slots=True)
class Output:
    """A candidate's y for `factor` times the activations, with or without the bias."""

    y: torch.Tensor
    factor: float = 1.0
    biased: bool = False
    rounded_twice: bool = False

    def __str__(self) -> str:
        return f"M={self.y.shape[0]}, inputs times {self.factor:g}" + (", with bias" if self.biased else "")


class WrongResultError(Exception):
    """A candidate's output is not what the definition says; the text says how."""


def check(candidate: Candidate, case: Case) -> None:
    """Raises WrongResultError unless every output of every M, plain, scaled and with a bias, is within its bound."""
    tokens = [m for m in CHECKED_TOKENS if candidate.max_tokens is None or m <= candidate.max_tokens]
    x = case.x[: tokens[-1]]
    seen = candidate.activations(x, _scales(candidate, case)).double()
    _check_rounding(candidate, x, seen)
    outputs = [Output(_run_poisoned(candidate, case, x[:m])) for m in tokens]
    twice = candidate.rounds_before_bias
    outputs.append(Output(_run_poisoned(candidate, case, x, biased=True), biased=True, rounded_twice=twice))
    # A power of two scales every product and sum exactly, so these are held against the same reference.
    outputs += [Output(_run_poisoned(candidate, case, x, factor=factor), factor) for factor in SCALED]
    _compare(case, seen, outputs)


def _scales(candidate: Candidate, case: Case, factor: float = 1.0) -> torch.Tensor | None:
    """The two scales for activations that are `factor` times the case's."""
    if not candidate.rounds_activations:
        return None
    return case.scales * torch.tensor([1 / factor, factor], device=case.scales.device)


def _check_rounding(candidate: Candidate, x: torch.Tensor, seen: torch.Tensor) -> None:
    expected, allowed = x.double(), 0.0
    if candidate.rounds_activations:
        scale = INPUT_AMAX / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
        expected, allowed = reference.quantized_activations(x, scale).double(), ROUNDING_SHARE
    share = float((seen - expected).norm() / expected.norm())
    if not share <= allowed:
        raise WrongResultError(f"its rounded activations differ from the format's by {share:.1%} of their norm")


def _run_poisoned(
    candidate: Candidate, case: Case, x: torch.Tensor, *, factor: float = 1.0, biased: bool = False
) -> torch.Tensor:
    """The output for `factor` times x, computed twice into memory full of NaN."""
    m, n = x.shape[0], case.rows
    x, scales, bias = x * factor, _scales(candidate, case, factor), case.bias if biased else None
    results = []
    for _ in range(2):
        memory = torch.full((m * n + MARGIN,), float("nan"), dtype=torch.bfloat16, device=x.device)
        y = memory[: m * n].view(m, n)
        candidate.run(x, case.weight.form, y, bias=bias, scales=scales)
        if not memory[m * n :].isnan().all():
            raise WrongResultError(f"it writes past its output at M={m}")
        results.append(y)
    unwritten = int(results[0].isnan().sum())
    if unwritten:
        column = int(results[0].isnan().any(0).nonzero()[0])
        raise WrongResultError(f"{unwritten} outputs unwritten or NaN at M={m}, from row {column} of the weight on")
    if not torch.equal(*results):
        raise WrongResultError(f"two calls differ at M={m}")
    return results[0]


def _compare(case: Case, seen: torch.Tensor, outputs: Sequence[Output]) -> None:
    """Element by element against FP64, some rows of the weight at a time."""
    for first in range(0, case.rows, CHECKED_ROWS):
        rows = slice(first, min(first + CHECKED_ROWS, case.rows))
        dense = case.weight.dense(rows)
        expected = seen @ dense.T
        bound = reference.error_bound(seen, dense, expected)
        bias = case.bias[rows].double()
        for output in outputs:
            m, extra = output.y.shape[0], bias if output.biased else torch.zeros_like(bias)
            error = (output.y[:, rows].double() / output.factor - expected[:m] - extra).abs()
            allowed = bound[:m] + extra.abs() * 2.0**-8
            if output.rounded_twice:
                allowed = allowed + (expected[:m] + extra).abs() * 2.0**-8
            ratio = float((error / allowed).max())
            if not ratio <= 1:
                where = f"{output}, rows {rows.start} to {rows.stop - 1}"
                raise WrongResultError(f"error {ratio:.3g} times what is allowed at {where}")


def time_tokens(candidate: Candidate, case: Case, timer: Timer) -> Iterator[tuple[int, float]]:
    """(M, microseconds of one call) over TIMED_TOKENS, weights going round so that none is cached."""
    copies = min(max(2, -(-COLD_BYTES // case.weight.size_bytes)), MAX_COPIES) if case.x.is_cuda else 1
    weights = [case.weight.form] + [case.weight.copy().form for _ in range(copies - 1)]
    scales = case.scales if candidate.rounds_activations else None
    for m in TIMED_TOKENS:
        if candidate.max_tokens is not None and m > candidate.max_tokens:
            return
        x = case.x[:m]
        y = torch.empty(m, case.rows, dtype=torch.bfloat16, device=x.device)
        used = weights if m <= MANY_TOKENS else weights[:2]
        yield m, timer([partial(candidate.run, x, weight, y, scales=scales) for weight in used])


def try_one(
    candidate: Candidate,
    shape: Shape,
    *,
    device: torch.device,
    capability: tuple[int, int],
    timer: Timer,
    say: Callable[[str], None],
) -> Finding:
    """Everything about one candidate and one shape. `say` is told each stage before it begins: first, check, time."""
    reason = candidate.unavailable() or candidate.supports(capability, shape.n, shape.k)
    if reason:
        return Finding(candidate=candidate.name, shape=shape, verdict=Verdict.UNSUPPORTED, reason=reason)
    case = make_case(shape, device, one_scale=candidate.one_scale)
    try:
        say("first")
        scales = case.scales if candidate.rounds_activations else None
        y = torch.empty(1, shape.n, dtype=torch.bfloat16, device=device)
        candidate.run(case.x[:1], case.weight.form, y, scales=scales)
        synchronize(device)
        say("check")
        check(candidate, case)
        say("time")
        times = tuple(time_tokens(candidate, case, timer))
    except WrongResultError as error:
        return Finding(candidate=candidate.name, shape=shape, verdict=Verdict.WRONG, reason=str(error))
    return Finding(candidate=candidate.name, shape=shape, verdict=Verdict.ADMITTED, times_us=times)


def try_padded(
    candidate: Candidate, bits: int, device: torch.device, capability: tuple[int, int], say: Callable[[str], None]
) -> str | None:
    """What is wrong with it at sizes that need padding, None if nothing, or if it takes none of them.

    `say` is told before each: one that compiles does so for each size.
    """
    for n, k in PADDED:
        if candidate.supports(capability, n, k) is None:
            say("first")
            try:
                check(candidate, make_case(Shape(n, k, bits=bits), device, one_scale=candidate.one_scale))
            except WrongResultError as error:
                return f"{error} (padded size [{n}, {k}])"
    return None


def synchronize(device: torch.device) -> None:
    """Waits for a card."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _methods(shapes: Sequence[Shape]) -> tuple[Callable[..., Finding], Callable[..., str | None]]:
    """How one candidate is tried, for linear layers or for experts."""
    if not any(shape.experts for shape in shapes):
        return try_one, partial(try_padded, bits=shapes[0].bits)
    from qwen_nvfp4_serve.kernels.admission import experts_trial

    return experts_trial.try_one, experts_trial.try_padded


def _timer(device: torch.device, spaced: bool, emit: Callable[[dict[str, Any]], None]) -> Timer:
    """How calls on a device are timed. A small kernel that ends or blocks this process does so in a step of its own."""
    if device.type != "cuda":
        return cpu_timer
    if not spaced:
        return timing.bare_cuda_timer
    synchronize(device)  # what torch takes to set a card up belongs to the start
    emit({"step": {"stage": SMALL_KERNEL}})
    graph_timing.try_small_kernel()
    return timing.cuda_timer


def serve(request: Request, emit: Callable[[dict[str, Any]], None]) -> None:
    """Tries every candidate on every shape, candidate by candidate, and emits its steps and findings."""
    device = torch.device(request.device)
    shapes = [Shape(*numbers) for numbers in request.shapes]
    capability = (0, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        capability = torch.cuda.get_device_capability(device)
    found = known.load(request.spec)
    attempt, padded = _methods(shapes)
    timer = _timer(device, request.spaced, emit)
    for name in request.names:
        candidate, wrong = found[name], None
        for index, shape in enumerate(shapes):

            def say(stage: str, shape: Shape = shape, candidate: Candidate = candidate) -> None:
                step = {"candidate": candidate.name, **dataclasses.asdict(shape), "stage": stage}
                emit({"step": step | {"compiles": candidate.compiles}})

            say("begin")
            if index == 0 and candidate.unavailable() is None:
                say("first")
                wrong = padded(candidate, device=device, capability=capability, say=say)
            if wrong is None:
                one = attempt(candidate, shape, device=device, capability=capability, timer=timer, say=say)
            else:
                one = Finding(candidate=name, shape=shape, verdict=Verdict.WRONG, reason=wrong)
            emit({"finding": finding_to_json(one)})


def main() -> int:
    """Runs the request of the first argument. A candidate's exception ends the process, as a crash would."""
    # Libraries print where they like: our lines go to what was standard output, everything else to standard error.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=reports, flush=True)

    value = json.loads(sys.argv[1])
    shapes = tuple(tuple(int(number) for number in shape) for shape in value["shapes"])
    emit({"step": {"stage": "start"}})
    names, device, spaced = tuple(value["names"]), value["device"], value["spaced"]
    serve(Request(spec=value["spec"], names=names, shapes=shapes, device=device, spaced=spaced), emit)
    emit({"done": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
