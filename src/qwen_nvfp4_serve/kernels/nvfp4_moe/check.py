"""Random blocks and elections, and how far the kernels are from the definition on them. For tests and measurements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen_nvfp4_serve.kernels.nvfp4_moe import launch, reference
from qwen_nvfp4_serve.kernels.nvfp4_moe.weights import ExpertWeights, MoeDims, prepare_experts

# Dimensions from the models' config.json; "embedded" is the model that this package carries.
SHAPES = {
    "35b": MoeDims(hidden=2048, intermediate=512, experts=256, top_k=8, shared_intermediate=512),
    "35b/tp2": MoeDims(hidden=2048, intermediate=256, experts=256, top_k=8, shared_intermediate=256),
    "397b": MoeDims(hidden=4096, intermediate=1024, experts=512, top_k=10, shared_intermediate=1024),
    "embedded": MoeDims(hidden=256, intermediate=64, experts=16, top_k=4, shared_intermediate=128),
}
ELECTIONS = ("uniform", "one", "apart")
MARGIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A whole block on a card. router: bf16 [E, H]. shared_gate: bf16 [H]."""

    dims: MoeDims
    experts: ExpertWeights
    router: torch.Tensor
    shared: ExpertWeights | None
    shared_gate: torch.Tensor | None


def random_experts(experts: int, hidden: int, intermediate: int, generator: torch.Generator) -> ExpertWeights:
    """Random codes, block scales from 0.5 to 7.5 (E4M3 48 to 79), unequal global scales for gates of about one."""
    device = generator.device

    def codes(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (experts, rows, columns)
        packed = torch.randint(
            0, 256, (*shape[:2], columns // 2), dtype=torch.uint8, device=device, generator=generator
        )
        bytes_ = torch.randint(
            48, 80, (*shape[:2], columns // 16), dtype=torch.uint8, device=device, generator=generator
        )
        return packed, bytes_.view(torch.float8_e4m3fn)

    def scale(columns: int) -> torch.Tensor:
        # A code's root mean square is about 3, a block scale's about 3.5.
        return (0.5 + torch.rand(experts, device=device, generator=generator)) / (10 * columns**0.5)

    w13, w13_scale = codes(2 * intermediate, hidden)
    w2, w2_scale = codes(hidden, intermediate)
    return prepare_experts(
        w13=w13,
        w13_block_scale=w13_scale,
        w2=w2,
        w2_block_scale=w2_scale,
        gate_scale=scale(hidden),
        up_scale=scale(hidden),
        down_scale=scale(intermediate),
    )


def random_block(dims: MoeDims, seed: int = 0, device: str = "cuda") -> Block:
    """A block of these dimensions; synchronizes, since the kernels read weights before they wait for other work."""
    generator = torch.Generator(device).manual_seed(seed)
    shared = dims.shared_intermediate
    block = Block(
        dims=dims,
        experts=random_experts(dims.experts, dims.hidden, dims.intermediate, generator),
        router=random_rows(dims.experts, dims.hidden, generator),
        shared=None if shared is None else random_experts(1, dims.hidden, shared, generator),
        shared_gate=None if shared is None else random_rows(1, dims.hidden, generator)[0],
    )
    if device == "cuda":
        torch.cuda.synchronize()
    return block


def random_rows(rows: int, hidden: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 [rows, H] whose products with activations of unit variance have unit variance."""
    return (torch.randn(rows, hidden, device=generator.device, generator=generator) / hidden**0.5).bfloat16()


def election(kind: str, m: int, dims: MoeDims, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 [m, k] and ids int32 [m, k]. uniform: each token its own; one: all the same; apart: no two alike
    as long as there are experts."""
    device = generator.device
    if kind == "apart":
        pairs = torch.arange(m * dims.top_k, device=device).view(m, -1)
        ids = (pairs % dims.experts).int()
        return torch.rand(ids.shape, device=device, generator=generator), ids
    logits = torch.randn(m, dims.experts, device=device, generator=generator)
    return reference.select_experts(logits[:1].expand(m, -1) if kind == "one" else logits, dims.top_k)


def worst_error(block: Block, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor, *, with_shared: bool) -> float:
    """The largest error as a fraction of what is allowed, over h and then over y from that same h.

    Infinity for an element left unwritten, one written beside the result, or a call that does not repeat bit for bit.
    """
    shared = block.shared if with_shared else None
    generator = torch.Generator(x.device).manual_seed(x.shape[0])
    shared_share = torch.rand(x.shape[0], device=x.device, generator=generator) if with_shared else None
    y, h = run_poisoned(block.experts, x, ids, share, shared=shared, shared_share=shared_share)
    again, _ = run_poisoned(block.experts, x, ids, share, shared=shared, shared_share=shared_share)
    if y is None or again is None or not torch.equal(y, again):
        return float("inf")
    routed = h[: ids.numel() * block.experts.intermediate].view(*ids.shape, -1)
    ratios, value, bound = [], torch.zeros_like(y, dtype=torch.float64), torch.zeros_like(y, dtype=torch.float64)
    zeros = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
    parts = [(block.experts, ids, share, routed)]
    if shared is not None and shared_share is not None:
        own = h[routed.numel() :].view(x.shape[0], 1, -1)
        parts.append((shared, zeros, shared_share.unsqueeze(1), own))
    for weights, chosen, factor, middle in parts:
        exact = reference.intermediate(x, weights, chosen, dtype=torch.float64)
        ratios.append(_ratio(middle, exact))
        result = reference.combine(middle.double(), weights, chosen, factor)
        value, bound = value + result.value, bound + result.bound
    ratios.append(_ratio(y, reference.Bounded(value, bound)))
    return max(ratios)


def run_poisoned(
    weights: ExpertWeights,
    x: torch.Tensor,
    ids: torch.Tensor,
    share: torch.Tensor,
    *,
    shared: ExpertWeights | None = None,
    shared_share: torch.Tensor | None = None,
    dependent: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """y and h out of memory full of NaN; no y if anything was written beside it."""
    m, hidden = x.shape
    memory = torch.full((m + 1, hidden + MARGIN), float("nan"), dtype=torch.bfloat16, device=x.device)
    h = torch.full_like(launch.intermediate_buffer(x, weights, ids.shape[1], shared), float("nan"))
    launch.experts(
        x,
        weights,
        ids,
        share,
        memory[:m, :hidden],
        shared=shared,
        shared_share=shared_share,
        intermediate=h,
        dependent=dependent,
    )
    intact = bool(memory[m].isnan().all()) and bool(memory[:, hidden:].isnan().all())
    return (memory[:m, :hidden].contiguous() if intact else None), h


def moved_elections(block: Block, x: torch.Tensor) -> tuple[int, int]:
    """Tokens whose elected experts are not those of the FP64 logits: how many, and of how many the logits do not
    explain it, lying further apart than one BF16 step."""
    choice = launch.route(x, block.router, block.dims.top_k, True, block.shared_gate)
    exact = x.double() @ block.router.double().T
    wanted = exact.topk(block.dims.top_k).indices
    step = exact.abs() * 2.0**-7
    moved = unexplained = 0
    for token in range(x.shape[0]):
        got, meant = set(choice.ids[token].tolist()), set(wanted[token].tolist())
        if got != meant:
            moved += 1
            near = exact[token] + step[token]
            lowest = min(float(exact[token, expert]) for expert in meant)
            unexplained += any(float(near[expert]) < lowest for expert in got - meant)
    return moved, unexplained


def _ratio(values: torch.Tensor, exact: reference.Bounded) -> float:
    off = (values.double() - exact.value).abs() / exact.bound.clamp(min=torch.finfo(torch.float64).tiny)
    return float(off.nan_to_num(nan=float("inf")).max().item())
