"""What a plan says: the verdict, the settings, the bytes, and the sentences that go with them."""

from __future__ import annotations

from dataclasses import dataclass

from qwen_nvfp4_serve.planner.cache import CacheLayout
from qwen_nvfp4_serve.planner.request import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBytes:
    """Bytes of one card, apart from each other, so that with `headroom` they sum to what is free.

    embeddings: token embedding and output head. kv_pool + state: the pinned pool; `state` is what the recurrent state
    of max_num_seqs sequences takes of it. None where it depends on a card or a pool that was not given.
    """

    weights: int
    embeddings: int
    kv_pool: int | None
    state: int
    graphs: int
    workspaces: int
    vision: int
    mtp: int
    headroom: int | None

    @property
    def fixed(self) -> int:
        """Everything but the pool and the headroom."""
        return self.weights + self.embeddings + self.graphs + self.workspaces + self.vision + self.mtp


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Upper bounds on one stream's tokens per second from memory bandwidth; None without a card."""

    at_4k: float | None
    at_context: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The verdict and the settings. fits is None when neither a card nor a pool was given.

    pool_bytes: the whole cache pool to pin on each card. largest_context: tokens, None without a pool. reasons: why
    the verdict and the numbers are what they are; notices: what was changed or deserves a look.
    """

    model: str
    gpu: str | None
    fits: bool | None
    max_model_len: int
    block_size_tokens: int
    blocks_per_request: int
    pool_blocks: int | None
    pool_tokens: int | None
    concurrency: float | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float | None
    bytes: PlanBytes
    roofline_tokens_per_s: Roofline
    notices: tuple[str, ...]
    reasons: tuple[str, ...]
    pool_bytes: int | None
    largest_context: int | None
    layout: CacheLayout
    request: PlanRequest

    @property
    def on_cpu(self) -> bool:
        """Whether it is for the CPU backend."""
        return self.request.attention_backend == "cpu"


# What `--json` prints, in order; the rest of a Plan is for callers inside the project.
JSON_KEYS = (
    "model",
    "gpu",
    "fits",
    "max_model_len",
    "block_size_tokens",
    "blocks_per_request",
    "pool_blocks",
    "pool_tokens",
    "concurrency",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "bytes",
    "roofline_tokens_per_s",
    "notices",
    "reasons",
    "pool_bytes",
    "largest_context",
)
