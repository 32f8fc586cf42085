"""How the child of an admission tries a candidate for a block's routed experts: as `trial` does for a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from qwen_nvfp4_serve.kernels import nvfp4, nvfp4_moe
from qwen_nvfp4_serve.kernels.admission.experts import ExpertsCall, ExpertsCandidate
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, Finding, Shape, Verdict
from qwen_nvfp4_serve.kernels.admission.timing import Timer
from qwen_nvfp4_serve.kernels.admission.trial import MARGIN, WrongResultError, synchronize
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, reference

# The large ones are where a grouped GEMM takes larger tiles, with 8 of 256 experts a token.
CHECKED_TOKENS = (1, 2, 7, 8, 16, 17, 31, 32, 33, 64, 200, 600, 2500)
PADDED = (Shape(128, 256, 16, 4), Shape(256, 384, 24, 3))  # small experts, rows that fill no tile of scales
CROWD = slice(100, 150)  # tokens that all elect the same experts, a few of padding among them
PADDING = (120, 121, 149)
AMAX = (6.0, 200.0)  # of activations and of h, in `make_case`'s sizes: no block scale saturates
ELEMENT_SHARE, TOKEN_SHARE = 0.5, 0.08  # of a token's root mean square, with rounded activations: any output, and all
TINY = 1e-30
TIMED_ELECTIONS = 8  # of different experts, so that their weights are in no cache


@dataclass(frozen=True, slots=True)
class Case:
    """Random experts, activations, each token's elected experts with their routing weights, and input scales."""

    weights: ExpertWeights
    x: torch.Tensor
    ids: torch.Tensor
    shares: torch.Tensor
    input_scales: torch.Tensor

    def call(self, candidate: ExpertsCandidate, part: slice, y: torch.Tensor) -> ExpertsCall:
        """Some of the tokens, for a candidate."""
        return ExpertsCall(
            x=self.x[part],
            weights=self.weights,
            ids=self.ids[part],
            shares=self.shares[part],
            y=y,
            input_scales=self.input_scales if candidate.rounds_activations else None,
        )


def make_case(shape: Shape, device: torch.device, *, seed: int = 0) -> Case:
    """Random codes and block scales; every global scale another one."""
    generator = torch.Generator(device).manual_seed(seed)
    experts, hidden, width = shape.experts, shape.k, shape.n // 2

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, device=device, generator=generator)

    gate, up, down = (torch.rand(experts, device=device, generator=generator) * 1e-4 + 1e-4 for _ in range(3))
    weights = nvfp4_moe.prepare_experts(
        w13=integers(0, 256, experts, 2 * width, hidden // 2),
        w13_block_scale=integers(32, 127, experts, 2 * width, hidden // nvfp4.BLOCK).view(torch.float8_e4m3fn),
        w2=integers(0, 256, experts, hidden, width // 2),
        w2_block_scale=integers(32, 127, experts, hidden, width // nvfp4.BLOCK).view(torch.float8_e4m3fn),
        gate_scale=gate,
        up_scale=up,
        down_scale=down,
    )
    tokens = max(*TIMED_TOKENS, *CHECKED_TOKENS, CROWD.stop)
    x = torch.randn(tokens, hidden, device=device, generator=generator).bfloat16()
    ids = elections(tokens, shape, device, generator)
    ids[CROWD] = ids[CROWD.start].clone()
    ids[list(PADDING)] = -1
    shares = torch.rand(tokens, shape.top_k, device=device, generator=generator)
    amax = torch.tensor(AMAX, device=device).unsqueeze(1)
    factor = 1 + torch.rand(2, experts, device=device, generator=generator)
    input_scales = amax * factor / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
    synchronize(device)  # kernels may read weights before the work ahead of them ends
    return Case(weights, x, ids, shares, input_scales)


def elections(tokens: int, shape: Shape, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Different experts for each token, any as likely as any other: int32 [tokens, k]."""
    drawn = torch.rand(tokens, shape.experts, device=device, generator=generator)
    return drawn.topk(shape.top_k, dim=-1).indices.int()


def check(candidate: ExpertsCandidate, case: Case, say: Callable[[str], None]) -> None:
    """Raises WrongResultError unless every output of every M is within its bound."""
    most = candidate.max_tokens
    tokens = [m for m in CHECKED_TOKENS if most is None or m <= most]
    last = max(tokens[-1], CROWD.stop)
    expected = rounded_reference(case, last) if candidate.rounds_activations else exact_reference(case, last)
    crowd = slice(CROWD.stop - min(most or CROWD.stop, CROWD.stop - CROWD.start), CROWD.stop)
    for part in (*(slice(0, m) for m in tokens), crowd):
        say("check")
        y = _run_poisoned(candidate, case, part)
        error, value = y.double() - expected.value[part], expected.value[part]
        ratio = float((error.abs() / expected.bound[part].clamp_min(TINY)).max())
        if candidate.rounds_activations:
            ratio = max(ratio, float((_rms(error) / (TOKEN_SHARE * _rms(value)).clamp_min(TINY)).max()))
        if not ratio <= 1:
            raise WrongResultError(f"error {ratio:.3g} times what is allowed at tokens {part.start} to {part.stop - 1}")


def exact_reference(case: Case, tokens: int) -> reference.Bounded:
    """What the first tokens give with activations as they are, and what each element may be off."""
    part = slice(0, tokens)
    return reference.moe_experts(case.x[part], case.weights, case.ids[part], case.shares[part])


def rounded_reference(case: Case, tokens: int) -> reference.Bounded:
    """The same with activations rounded before both products.

    Codes that go the other way, because a sum before them was rounded otherwise, are allowed for with a share of the
    token's root mean square.
    """
    x, ids, shares = case.x[:tokens], case.ids[:tokens], case.shares[:tokens]
    value = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(case.weights.experts):
        token, rank = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        own = torch.full((len(token), 1), expert, dtype=torch.int32, device=x.device)
        first, second = case.input_scales[:, expert]
        inputs = nvfp4.quantize_nvfp4(x[token], first).dequantize(torch.float64)
        h = reference.intermediate(inputs, case.weights, own, dtype=torch.float64).value
        middle = nvfp4.quantize_nvfp4(h.flatten(0, 1), second).dequantize(torch.float64).view_as(h)
        value.index_add_(0, token, reference.combine(middle, case.weights, own, shares[token, rank, None]).value)
    return reference.Bounded(value, (ELEMENT_SHARE * _rms(value)).expand_as(value))


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean(-1, keepdim=True).sqrt()


def _run_poisoned(candidate: ExpertsCandidate, case: Case, part: slice) -> torch.Tensor:
    """The output for some tokens, computed twice into memory full of NaN."""
    x = case.x[part]
    m, results = x.shape[0], []
    for _ in range(2):
        memory = torch.full((x.numel() + MARGIN,), float("nan"), dtype=torch.bfloat16, device=x.device)
        y = memory[: x.numel()].view(x.shape)
        candidate.run(case.call(candidate, part, y))
        if not memory[x.numel() :].isnan().all():
            raise WrongResultError(f"it writes past its output at M={m}")
        results.append(y)
    unwritten = int(results[0].isnan().sum())
    if unwritten:
        raise WrongResultError(f"{unwritten} outputs unwritten or NaN at M={m}")
    if not torch.equal(*results):
        raise WrongResultError(f"two calls differ at M={m}")
    return results[0]


def time_tokens(candidate: ExpertsCandidate, case: Case, shape: Shape, timer: Timer) -> Iterator[tuple[int, float]]:
    """(M, microseconds of one call) over TIMED_TOKENS, each call electing other experts."""
    generator = torch.Generator(case.x.device).manual_seed(1)
    for m in TIMED_TOKENS:
        if candidate.max_tokens is not None and m > candidate.max_tokens:
            return
        y = torch.empty(m, shape.k, dtype=torch.bfloat16, device=case.x.device)
        drawn = [elections(m, shape, case.x.device, generator) for _ in range(TIMED_ELECTIONS if m < 512 else 2)]
        call = case.call(candidate, slice(0, m), y)
        yield m, timer([partial(candidate.run, replace(call, ids=ids)) for ids in drawn])


def try_one(
    candidate: ExpertsCandidate,
    shape: Shape,
    *,
    device: torch.device,
    capability: tuple[int, int],
    timer: Timer,
    say: Callable[[str], None],
) -> Finding:
    """As `trial.try_one`, for experts."""
    reason = candidate.unavailable() or candidate.supports(capability, shape)
    if reason:
        return Finding(candidate=candidate.name, shape=shape, verdict=Verdict.UNSUPPORTED, reason=reason)
    case = make_case(shape, device)
    try:
        say("first")
        candidate.run(case.call(candidate, slice(0, 1), torch.empty_like(case.x[:1])))
        synchronize(device)
        check(candidate, case, say)
        say("time")
        times = []
        for pair in time_tokens(candidate, case, shape, timer):
            times.append(pair)
            say("time")
    except WrongResultError as error:
        return Finding(candidate=candidate.name, shape=shape, verdict=Verdict.WRONG, reason=str(error))
    return Finding(candidate=candidate.name, shape=shape, verdict=Verdict.ADMITTED, times_us=tuple(times))


def try_padded(
    candidate: ExpertsCandidate, device: torch.device, capability: tuple[int, int], say: Callable[[str], None]
) -> str | None:
    """What is wrong with it at small sizes, None if nothing, or if it takes none of them."""
    for shape in PADDED:
        if candidate.supports(capability, shape) is None:
            try:
                check(candidate, make_case(shape, device), say)
            except WrongResultError as error:
                return f"{error} (small size {shape})"
    return None
