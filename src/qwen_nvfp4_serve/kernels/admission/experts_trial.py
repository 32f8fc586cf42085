"""How the child of an admission tries a candidate for a block's routed experts: as `trial` does for a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from qwen_nvfp4_serve.kernels import nvfp4, nvfp4_moe
from qwen_nvfp4_serve.kernels.admission.experts import ExpertsCandidate
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, Finding, Shape, Verdict
from qwen_nvfp4_serve.kernels.admission.trial import MARGIN, Timer, WrongResultError, synchronize
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, reference

# The large ones are where a grouped GEMM takes larger tiles, with 8 of 256 experts a token.
CHECKED_TOKENS = (1, 2, 7, 8, 16, 17, 31, 32, 33, 64, 200, 600, 2500)
PADDED = (Shape(128, 256, 16, 4), Shape(256, 384, 24, 3))  # small experts, rows that fill no tile of scales
CROWD = slice(100, 150)  # tokens that all elect the same experts, a few of padding among them
PADDING = (120, 121, 149)
TIMED_ELECTIONS = 8  # of different experts, so that their weights are in no cache


@dataclass(frozen=True, slots=True)
class Case:
    """Random experts, activations, and each token's elected experts with their routing weights."""

    weights: ExpertWeights
    x: torch.Tensor
    ids: torch.Tensor
    shares: torch.Tensor


def make_case(shape: Shape, device: torch.device, *, one_scale: bool, seed: int = 0) -> Case:
    """Random codes and block scales; every global scale another one, unless gate and up must agree."""
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
        up_scale=gate if one_scale else up,
        down_scale=down,
    )
    tokens = max(*TIMED_TOKENS, *CHECKED_TOKENS, CROWD.stop)
    x = torch.randn(tokens, hidden, device=device, generator=generator).bfloat16()
    ids = elections(tokens, shape, device, generator)
    ids[CROWD] = ids[CROWD.start].clone()
    ids[list(PADDING)] = -1
    shares = torch.rand(tokens, shape.top_k, device=device, generator=generator)
    synchronize(device)  # kernels may read weights before the work ahead of them ends
    return Case(weights, x, ids, shares)


def elections(tokens: int, shape: Shape, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Different experts for each token, any as likely as any other: int32 [tokens, k]."""
    drawn = torch.rand(tokens, shape.experts, device=device, generator=generator)
    return drawn.topk(shape.top_k, dim=-1).indices.int()


def check(candidate: ExpertsCandidate, case: Case, say: Callable[[str], None]) -> None:
    """Raises WrongResultError unless every output of every M is within its bound."""
    most = candidate.max_tokens
    tokens = [m for m in CHECKED_TOKENS if most is None or m <= most]
    last = max(tokens[-1], CROWD.stop)
    expected = reference.moe_experts(case.x[:last], case.weights, case.ids[:last], case.shares[:last])
    crowd = slice(CROWD.stop - min(most or CROWD.stop, CROWD.stop - CROWD.start), CROWD.stop)
    for part in (*(slice(0, m) for m in tokens), crowd):
        say("check")
        y = _run_poisoned(candidate, case, part)
        ratio = float(((y.double() - expected.value[part]).abs() / expected.bound[part].clamp_min(1e-30)).max())
        if not ratio <= 1:
            raise WrongResultError(f"error {ratio:.3g} times what is allowed at tokens {part.start} to {part.stop - 1}")


def _run_poisoned(candidate: ExpertsCandidate, case: Case, part: slice) -> torch.Tensor:
    """The output for some tokens, computed twice into memory full of NaN."""
    x, ids, shares = case.x[part], case.ids[part], case.shares[part]
    m, results = x.shape[0], []
    for _ in range(2):
        memory = torch.full((x.numel() + MARGIN,), float("nan"), dtype=torch.bfloat16, device=x.device)
        y = memory[: x.numel()].view(x.shape)
        candidate.run(x, case.weights, ids, shares, y)
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
        yield m, timer([partial(candidate.run, case.x[:m], case.weights, ids, case.shares[:m], y) for ids in drawn])


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
    case = make_case(shape, device, one_scale=candidate.one_scale)
    try:
        say("first")
        candidate.run(case.x[:1], case.weights, case.ids[:1], case.shares[:1], torch.empty_like(case.x[:1]))
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
                check(candidate, make_case(shape, device, one_scale=candidate.one_scale), say)
            except WrongResultError as error:
                return f"{error} (small size {shape})"
    return None
