"""The op that a model calls: one opaque call, which looks at M only when it runs.

torch.ops.qwen_nvfp4.admitted_linear(x, packed, scales, row_scale, shards, plan, input_scales, bias)

Everything that differs between checkpoints or admissions is a tensor: numbers in a traced graph would be compiled into
it, and outlive both in vLLM's compile cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import ops
from qwen_nvfp4_serve.kernels.admission import candidates
from qwen_nvfp4_serve.kernels.admission.candidates import Candidate, Tiled
from qwen_nvfp4_serve.kernels.admission.table import Span
from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight, tiled

ALIGNMENT_BYTES = 16


@cache
def servers() -> tuple[Candidate, ...]:
    """The candidates, by the index that a plan holds."""
    return candidates.default_candidates()


def plan_tensor(spans: Sequence[Span]) -> torch.Tensor:
    """int64 [spans, 2] on the CPU: the largest M of each span and the index of who serves it."""
    index = {candidate.name: i for i, candidate in enumerate(servers())}
    unknown = [span.candidate for span in spans if span.candidate not in index]
    if unknown or not spans:
        raise UsageError("kernel plan", seen=", ".join(unknown) or "no spans", expected=", ".join(index))
    return torch.tensor([[span.until, index[span.candidate]] for span in spans], dtype=torch.int64, device="cpu")


def shard_tensor(weight: LinearWeight) -> torch.Tensor:
    """float64 [shards, 2] on the CPU: rows and global scale of each shard, both exact."""
    pairs = zip(weight.shard_rows, weight.shard_scales, strict=True)
    return torch.tensor([[float(rows), scale] for rows, scale in pairs], dtype=torch.float64, device="cpu")


def warm_up(spans: Sequence[Span], weight: LinearWeight) -> None:
    """Compiles what calls of any number of tokens will need: a CUDA graph capture does not allow it.

    The workspaces of the others belong to streams: a call on the capture's stream makes them.
    """
    if any(span.candidate == Tiled.name for span in spans):
        tiled.warm_up(weight)


def _admitted(  # noqa: PLR0917
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    shards: torch.Tensor,
    plan: torch.Tensor,
    input_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    n, k = packed.shape[0], x.shape[-1]
    if x.dtype is not torch.bfloat16 or k != packed.shape[1] * 2:
        raise UsageError("activations", seen=f"{x.dtype} {tuple(x.shape)}", expected=f"bfloat16 [.., {k}]")
    tokens = (x if x.dim() == 2 else x.reshape(-1, k)).contiguous()
    if tokens.data_ptr() % ALIGNMENT_BYTES:
        tokens = tokens.clone()
    m = tokens.shape[0]
    y = tokens.new_empty((m, n))
    if m:
        rows, multipliers = zip(*shards.tolist(), strict=True)
        weight = LinearWeight(packed, scales, row_scale, tuple(map(int, rows)), multipliers)
        _server(plan, m).run(tokens, weight, y, bias=bias, scales=input_scales)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


def _server(plan: torch.Tensor, m: int) -> Candidate:
    spans: list[tuple[int, int]] = plan.tolist()
    for until, index in spans:
        if m <= until:
            return servers()[index]
    raise UsageError("kernel plan", seen=f"nobody for {m} tokens", expected="a last span without a limit")


def _fake(  # noqa: PLR0917
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,  # noqa: ARG001
    row_scale: torch.Tensor,  # noqa: ARG001
    shards: torch.Tensor,  # noqa: ARG001
    plan: torch.Tensor,  # noqa: ARG001
    input_scales: torch.Tensor | None,  # noqa: ARG001
    bias: torch.Tensor | None,  # noqa: ARG001
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


_SCHEMA = (
    "(Tensor x, Tensor packed, Tensor scales, Tensor row_scale, Tensor shards, Tensor plan, Tensor? input_scales,"
    " Tensor? bias) -> Tensor"
)
# x: bf16 [.., K], any strides. packed, scales, row_scale: as LinearWeight. input_scales: float32 [2] or None.
admitted_linear = ops.register("admitted_linear", _SCHEMA, _admitted, _fake)
