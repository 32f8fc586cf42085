"""The gated delta rule in chunks, over rows that hold several documents.

Within a chunk of 64 tokens everything is a batched matrix product; between chunks the state follows
    S[c+1] = decay[c] * S[c] + N[c] - P[c] @ S[c]
which is one small loop of two kernels a step, forward and backward. A document's first token starts from a zero state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.config import CHUNK

_LEAF = 8


def _neumann_inverse(strict: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower 8x8 blocks: the series ends at L^7."""
    eye = torch.eye(_LEAF, device=strict.device, dtype=strict.dtype)
    power = -strict
    result = eye + power
    for _ in range(2):
        power = power @ power
        result = result @ (eye + power)
    return result


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    count = matrix.shape[-1] // size
    return matrix.unflatten(-1, (count, size)).unflatten(-3, (count, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


@torch.library.custom_op("reference::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(strict: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower triangular L, float32 [n, CHUNK, CHUNK], by halves; full float32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    inverse = _neumann_inverse(_diagonal_blocks(strict, _LEAF))
    size = _LEAF
    while size < CHUNK:
        upper, lower = inverse[:, 0::2], inverse[:, 1::2]
        corner = _diagonal_blocks(strict, 2 * size)[..., size:, :size]
        merged = torch.zeros(*upper.shape[:2], 2 * size, 2 * size, device=strict.device, dtype=strict.dtype)
        merged[..., :size, :size] = upper
        merged[..., size:, size:] = lower
        merged[..., size:, :size] = -(lower @ corner @ upper)
        inverse, size = merged, 2 * size
    torch.backends.cuda.matmul.allow_tf32 = before
    return inverse.reshape(strict.shape).clone()


@unit_lower_inverse.register_fake
def _(strict: Tensor) -> Tensor:
    return torch.empty_like(strict, memory_format=torch.contiguous_format)


def _inverse_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    del inputs
    ctx.save_for_backward(output)


def _inverse_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    turned = inverse.transpose(-1, -2)
    return -(turned @ grad @ turned).tril(-1)


unit_lower_inverse.register_autograd(_inverse_backward, setup_context=_inverse_context)


@torch.library.custom_op("reference::scan_states", mutates_args=())
def scan_states(transition: Tensor, update: Tensor, decay: Tensor) -> Tensor:
    """States before each chunk, float32 [chunks, n, D, D]; transition P and update N alike, decay [chunks, n, 1, 1]."""
    states = torch.zeros_like(update)
    for index in range(update.shape[0] - 1):
        torch.addcmul(update[index], decay[index], states[index], out=states[index + 1])
        states[index + 1].baddbmm_(transition[index], states[index], alpha=-1)
    return states


@scan_states.register_fake
def _(transition: Tensor, update: Tensor, decay: Tensor) -> Tensor:
    del transition, decay
    return torch.empty_like(update)


@torch.library.custom_op("reference::scan_states_backward", mutates_args=())
def scan_states_backward(grad: Tensor, transition: Tensor, decay: Tensor) -> Tensor:
    """Gradients of the states after each chunk, [chunks, n, D, D]; the last is zero."""
    after = torch.zeros_like(grad)
    for index in range(grad.shape[0] - 2, -1, -1):
        torch.addcmul(grad[index + 1], decay[index + 1], after[index + 1], out=after[index])
        after[index].baddbmm_(transition[index + 1].transpose(-1, -2), after[index + 1], alpha=-1)
    return after


@scan_states_backward.register_fake
def _(grad: Tensor, transition: Tensor, decay: Tensor) -> Tensor:
    del transition, decay
    return torch.empty_like(grad)


def _scan_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor
) -> None:
    ctx.save_for_backward(inputs[0], inputs[2], output)


def _scan_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    transition, decay, states = ctx.saved_tensors
    after = scan_states_backward(grad.contiguous(), transition, decay)
    return -(after @ states.transpose(-1, -2)), after, (after * states).sum((-1, -2), keepdim=True)


scan_states.register_autograd(_scan_backward, setup_context=_scan_context)


def _chunked(tensor: Tensor) -> Tensor:
    """[B, T, H, …] as [chunks, B, H, CHUNK, …]."""
    return tensor.unflatten(1, (-1, CHUNK)).movedim(3, 2).movedim(1, 0)


def gated_delta_rule(
    *, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, document: Tensor
) -> Tensor:
    """Output [B, T, Hv, D] of the gated delta rule with L2-normalized queries and keys.

    query, key: [B, T, Hk, D]; value: [B, T, Hv, D]; log_decay (<= 0), beta: float32 [B, T, Hv]; document: [B, T],
    equal within a document and non-decreasing. T is a multiple of CHUNK. Value head h reads key head h * Hk // Hv.
    Products run in the dtype of `value`, states and decays in float32.
    """
    work = value.dtype
    groups = value.shape[2] // key.shape[2]
    q, k, v = _chunked(query), _chunked(key), _chunked(value)
    q = (F.normalize(q.float(), dim=-1, eps=1e-6) * q.shape[-1] ** -0.5).to(work)
    k = F.normalize(k.float(), dim=-1, eps=1e-6).to(work)
    key_key = (k @ k.transpose(-1, -2)).repeat_interleave(groups, 2).float()
    query_key = (q @ k.transpose(-1, -2)).repeat_interleave(groups, 2).float()
    q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    total = _chunked(log_decay).cumsum(-1)
    rate = _chunked(beta).unsqueeze(-1)

    doc = document.unflatten(1, (-1, CHUNK)).movedim(1, 0).unsqueeze(2)  # [chunks, B, 1, CHUNK]
    last = doc[..., -1:]
    before = torch.cat((torch.full_like(last[:1], -1), last[:-1]))
    continues, survives = (doc == before).float(), (doc == last).float()
    same = (doc.unsqueeze(-1) == doc.unsqueeze(-2)).tril()
    pair = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~same, float("-inf")).exp()
    into = (total.exp() * continues).unsqueeze(-1)
    out_of = ((total[..., -1:] - total).exp() * survives).unsqueeze(-1)
    carry = (total[..., -1:].exp() * (last == before).float()).unsqueeze(-1)

    shape = pair.shape
    inverse = unit_lower_inverse((key_key * pair * rate).tril(-1).flatten(0, 2)).view(shape).to(work)
    fresh = inverse @ (v * rate).to(work)
    read = inverse @ (k * (rate * into)).to(work)
    kept = (k * out_of).to(work).transpose(-1, -2)
    states = scan_states(
        (kept @ read).float().flatten(1, 2), (kept @ fresh).float().flatten(1, 2), carry.flatten(1, 2).contiguous()
    )
    states = states.unflatten(1, shape[1:3]).to(work)
    values = fresh - read @ states
    output = (q * into).to(work) @ states + (query_key * pair).to(work) @ values
    return output.movedim(0, 1).movedim(2, 3).flatten(1, 2)
