"""Who computes a linear layer that a checkpoint leaves in BF16, and the op that follows what was found.

torch.ops.qwen_nvfp4.bf16_linear(x, weight, bias)
torch.ops.qwen_nvfp4.bf16_linear_of_two(x, first, second)

The ops look at the number of tokens, and at the plan for their weight's shape, when they run: neither is compiled into
a graph. Without a plan they are the vendor's GEMM. The second is of two layers of the same input, x [first; second]^T:
one product where the second weight begins in memory where the first ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import bf16_linear, build, ops
from qwen_nvfp4_serve.kernels.admission.candidates import Candidate, Capability
from qwen_nvfp4_serve.kernels.admission.table import BF16_BITS, Shape, Span, Table, serving

ALIGNMENT_BYTES = 16


class _Bf16:
    """What both share: activations as they are."""

    rounds_activations = False
    one_scale = False
    compiles = False

    def activations(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        """Unchanged."""
        return x


class SmallM(_Bf16):
    """Our kernel: its weights are under way before the kernel ahead has ended."""

    name = "qwen-bf16-small-m"
    max_tokens: int | None = bf16_linear.MAX_TOKENS
    rounds_before_bias = False

    def unavailable(self) -> str | None:
        """No library, no candidate."""
        return None if build.find(build.BF16_LINEAR) else "kernel library bf16_linear is not built"

    def supports(self, capability: Capability, n: int, k: int) -> str | None:
        """As the kernel says."""
        return bf16_linear.supports(capability, n, k)

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,  # noqa: ARG002
    ) -> None:
        """One launch."""
        bf16_linear.small_m(x, weight, bias, y)


class Vendor(_Bf16):
    """What torch takes."""

    name = "vendor-bf16"
    max_tokens: int | None = None
    rounds_before_bias = True

    def unavailable(self) -> str | None:
        """Always there."""
        return None

    def supports(self, capability: Capability, n: int, k: int) -> str | None:  # noqa: ARG002
        """Everything."""
        return None

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,  # noqa: ARG002
    ) -> None:
        """One GEMM, or two launches."""
        if bias is None:
            torch.mm(x, weight.T, out=y)
        else:
            torch.addmm(bias, x, weight.T, out=y)


def default_candidates() -> tuple[Candidate, ...]:
    """Ours first."""
    return (SmallM(), Vendor())


_plans: dict[tuple[int, int], tuple[Span, ...]] = {}


def follow(table: Table, shapes: Sequence[Shape]) -> Mapping[tuple[int, int], tuple[Span, ...]]:
    """From now on the op serves weights of these shapes as the table says; what it follows."""
    _plans.clear()
    _plans.update({(shape.n, shape.k): serving(table, shape) for shape in shapes if shape.bits == BF16_BITS})
    return _plans


def _bf16_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    n, k = weight.shape
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16 or x.shape[-1] != k:
        seen = f"{x.dtype} {tuple(x.shape)} with a weight in {weight.dtype}"
        raise UsageError("activations of a BF16 layer", seen=seen, expected=f"bfloat16 [.., {k}], twice")
    if not (_is_ours(x, n, k) and _is_plain(weight, bias)):
        return torch.nn.functional.linear(x, weight, bias)
    tokens = x if x.dim() == 2 else x.reshape(-1, k)
    if tokens.stride(-1) != 1 or tokens.stride(0) * tokens.element_size() % ALIGNMENT_BYTES:
        tokens = tokens.contiguous()
    if tokens.data_ptr() % ALIGNMENT_BYTES:
        tokens = tokens.clone()
    y = tokens.new_empty((tokens.shape[0], n))
    bf16_linear.small_m(tokens, weight, bias, y)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


def _is_ours(x: torch.Tensor, n: int, k: int) -> bool:
    """Whether the plan gives these tokens, if there are any, to our kernel."""
    spans = _plans.get((n, k), ())
    m = x.numel() // k if spans else 0
    for span in spans:
        if m <= span.until:
            return m > 0 and span.candidate == SmallM.name
    return False


def _is_plain(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether our kernel can read them where they lie."""
    if weight.data_ptr() % ALIGNMENT_BYTES or not weight.is_contiguous():
        return False
    return bias is None or (bias.dtype is torch.bfloat16 and bias.is_contiguous())


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """[first; second] where they lie, of weights [N1, K] and [N2, K]; None unless one begins where the other ends."""
    (rows, k), more = first.shape, second.shape[0]
    one_memory = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    plain = first.is_contiguous() and second.is_contiguous() and first.dtype is second.dtype and second.shape[1] == k
    if not (one_memory and plain and second.storage_offset() == first.storage_offset() + rows * k):
        return None
    return first.as_strided((rows + more, k), (k, 1))


def _bf16_linear_of_two(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    weight = joined(first, second)
    if weight is None:
        return torch.cat([_bf16_linear(x, first, None), _bf16_linear(x, second, None)], dim=-1)
    return _bf16_linear(x, weight, None)


def _fake_of_two(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], first.shape[0] + second.shape[0]))


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


op = ops.register("bf16_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _bf16_linear, _fake)
op_of_two = ops.register(
    "bf16_linear_of_two", "(Tensor x, Tensor first, Tensor second) -> Tensor", _bf16_linear_of_two, _fake_of_two
)
