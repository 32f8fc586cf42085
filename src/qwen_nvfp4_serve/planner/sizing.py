"""The numbers of a plan, settled in order: batched tokens, sequences, pool, context."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwen_nvfp4_serve.models import Recommendation
from qwen_nvfp4_serve.planner.cache import CacheLayout, cache_layout
from qwen_nvfp4_serve.planner.memory import graph_bytes, headroom_bytes, workspaces
from qwen_nvfp4_serve.planner.request import PlanRequest
from qwen_nvfp4_serve.planner.result import PlanBytes
from qwen_nvfp4_serve.units import GIB

DEFAULT_SEQS = 4
DEFAULT_BATCHED_TOKENS = 4096
LARGE_CARD_BYTES = 70 * GIB  # where vLLM 0.33 itself takes 8,192 (engine/arg_utils.py); unified memory does not count
LARGE_CARD_BATCHED_TOKENS = 8192
LEAST_CONTEXT = 16  # tokens; no chat template fits in less


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of one card: in all, free, and what may be used of the free ones."""

    total: int
    free: int
    usable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A request with everything settled but the verdict. pool_bytes and blocks are None without a card or a pool."""

    request: PlanRequest
    layout: CacheLayout
    budget: Budget | None
    batched_tokens: int
    seqs: int
    pool_bytes: int | None = None

    @property
    def blocks(self) -> int | None:
        """Blocks in the pool."""
        return None if self.pool_bytes is None else self.layout.pool_blocks(self.pool_bytes)

    @property
    def largest_context(self) -> int | None:
        """Tokens of the longest request that the pool and the model admit; None without a pool."""
        if self.blocks is None:
            return None
        return min(self.request.model.dims.max_context, self.layout.largest_context(self.blocks))

    @property
    def context(self) -> int:
        """Tokens: what was asked, else the largest that fits, else the model's own."""
        most = self.request.model.dims.max_context
        if self.request.context is not None:
            return self.request.context
        largest = self.largest_context
        return most if largest is None or largest < LEAST_CONTEXT else largest


def advice_for(request: PlanRequest) -> Recommendation | None:
    """The catalogue's settings for this model on this card."""
    name = request.gpu.name if request.gpu else None
    return next((row for row in request.model.recommended if row.gpu == name), None)


def settle(request: PlanRequest) -> Sizing:
    """The sizing for a request that `check_request` has passed."""
    layout, advice, budget = cache_layout(request), advice_for(request), _budget(request)
    batched = request.batched_tokens or (advice.batched_tokens if advice else _default_batched_tokens(request))
    per_seq = 1 + request.speculative_tokens
    batched = max(batched, per_seq, layout.block_tokens if request.prefix_caching else 0)
    seqs = min(request.seqs or (advice.seqs if advice else DEFAULT_SEQS), batched // per_seq)
    return _with_most_seqs(Sizing(request=request, layout=layout, budget=budget, batched_tokens=batched, seqs=seqs))


def _with_most_seqs(wish: Sizing) -> Sizing:
    """The most sequences up to the wish that the pool left beside their own buffers and graphs takes, at least one."""
    least, most = 1, wish.seqs
    while least < most:  # more sequences leave a smaller pool, so the counts that fit have an end: halve towards it
        middle = (least + most + 1) // 2
        if _takes_its_seqs(_with_pool(replace(wish, seqs=middle))):
            least = middle
        else:
            most = middle - 1
    return _with_pool(replace(wish, seqs=least))


def _with_pool(sizing: Sizing) -> Sizing:
    return replace(sizing, pool_bytes=_pool_bytes(sizing))


def _takes_its_seqs(sizing: Sizing) -> bool:
    return sizing.blocks is None or sizing.layout.most_seqs(sizing.blocks) >= sizing.seqs


def _default_batched_tokens(request: PlanRequest) -> int:
    gpu = request.gpu
    large = gpu is not None and gpu.memory_bytes >= LARGE_CARD_BYTES and not gpu.unified_memory
    return LARGE_CARD_BATCHED_TOKENS if large else DEFAULT_BATCHED_TOKENS


def _budget(request: PlanRequest) -> Budget | None:
    gpu = request.gpu
    if gpu is None:
        return None
    # vLLM takes its fraction of what CUDA sees, which is less than what nvidia-smi lists.
    seen = gpu.memory_bytes if gpu.unified_memory else gpu.usable_bytes
    total = min(request.total_bytes or seen, seen)
    free = min(total, gpu.usable_bytes if request.free_bytes is None else request.free_bytes)
    usable = free - headroom_bytes(total, unified=gpu.unified_memory)
    if request.utilization is not None:
        usable = min(usable, int(total * request.utilization))
    return Budget(total=total, free=free, usable=max(0, usable))


def _pool_bytes(sizing: Sizing) -> int | None:
    """The pool asked for, or all that the budget leaves, in whole blocks."""
    if sizing.request.kv_pool_bytes is not None or sizing.budget is None:
        return sizing.request.kv_pool_bytes
    left = sizing.budget.usable - plan_bytes(sizing).fixed
    return sizing.layout.pool_blocks(left) * sizing.layout.block_bytes


def plan_bytes(sizing: Sizing) -> PlanBytes:
    """The bytes of one card for this sizing."""
    request, pool = sizing.request, sizing.pool_bytes
    weights = request.model.weights.on_card(request.tensor_parallel)
    state = sizing.seqs * sizing.layout.state_blocks * sizing.layout.block_bytes
    if pool is not None:
        state = min(state, pool)
    parts = workspaces(request, sizing.layout, sizing.seqs, sizing.batched_tokens)
    sizes = PlanBytes(
        weights=weights.decoder,
        embeddings=weights.embeddings,
        kv_pool=None if pool is None else pool - state,
        state=state,
        graphs=graph_bytes(request, sizing.seqs),
        workspaces=sum(part.size_bytes for part in parts),
        vision=weights.vision if request.vision else 0,
        mtp=weights.mtp if request.speculative_tokens else 0,
        headroom=None,
    )
    if sizing.budget is None or pool is None:
        return sizes
    return replace(sizes, headroom=max(0, sizing.budget.free - sizes.fixed - pool))


def utilization(sizing: Sizing) -> float | None:
    """Fraction of the card's total for vLLM, which will not start unless that much is free; None without a card."""
    if sizing.budget is None:
        return None
    # Rounded down to a thousandth; the last term undoes the float error of a fraction that was asked for.
    return int(sizing.budget.usable / sizing.budget.total * 1000 + 1e-3) / 1000
