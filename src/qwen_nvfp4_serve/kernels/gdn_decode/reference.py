"""The delta net's decode step in plain PyTorch and float64, and how far a float32 kernel may be from it.

The convolution's results are rounded to BF16, as vLLM does between its kernels; all else is exact. Whether a value that
lies on the edge between two BF16 numbers is rounded up or down is left open, and counted in the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen_nvfp4_serve.kernels.gdn_decode import HEAD, WIDTH, Step

NORM_EPSILON = 1e-6
# Float32 sums of 128 products, and the functions of the gates, relative to the sum of their absolute terms.
NOISE = 2.0**-19
BF16_HALF_STEP = 2.0**-8  # at most, relative: seven bits are stored


@dataclass(frozen=True, slots=True)
class Near:
    """Values and how far from each a result may be."""

    value: torch.Tensor
    bound: torch.Tensor

    def holds(self, seen: torch.Tensor) -> bool:
        """True if every element of `seen` is within its bound; NaN is not."""
        return bool(((seen.double() - self.value).abs() <= self.bound).all())

    def stored_as(self, dtype: torch.dtype) -> Near:
        """The bound after one more rounding."""
        step = BF16_HALF_STEP if dtype is torch.bfloat16 else 2.0**-24
        return Near(self.value, self.bound + (self.value.abs() + self.bound) * step)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step leaves: outputs, the states of its slots, and bit for bit the conv state and all other slots."""

    out: Near  # [T, HV, 128]
    state: Near  # [T, HV, 128 (v), 128 (k)], of each token's slot; of no meaning where `valid` is False
    valid: torch.Tensor  # [T]
    conv_state: torch.Tensor
    before: torch.Tensor  # all slots' states

    def holds(self, step: Step) -> bool:
        """True if `step`, after it was run, is as expected."""
        slots = step.indices[self.valid].long()
        state = Near(self.state.value[self.valid], self.state.bound[self.valid])
        others = torch.ones(self.before.shape[0], dtype=torch.bool, device=self.before.device)
        others[slots] = False
        kept = _same_bits(step.conv_state, self.conv_state) and _same_bits(step.state[others], self.before[others])
        return kept and self.out.holds(step.out) and state.holds(step.state[slots])


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(torch.equal(x.contiguous().view(torch.int16), y.contiguous().view(torch.int16)))


def expected(step: Step) -> Expected:
    """What `step` must leave behind; it is not changed. Slots of valid tokens must differ from each other."""
    valid = step.indices > 0
    slots = torch.where(valid, step.indices, 0).long()
    past = step.conv_state[slots][:, : WIDTH - 1]
    window = torch.cat((past, step.x[:, None]), dim=1)
    q, k, v = _heads(_convolved(step, window.double()), step)
    q, k = _normalized(q), _normalized(k)
    out, state = _updated(step, q, k, v, step.state[slots].double())
    conv_state = step.conv_state.clone()
    conv_state[slots[valid], : WIDTH - 1] = window[valid, 1:]
    shown = valid[:, None, None]
    out = Near(out.value * shown, out.bound * shown).stored_as(torch.bfloat16)
    return Expected(out, state.stored_as(step.state.dtype), valid, conv_state, step.state.clone())


def _convolved(step: Step, window: torch.Tensor) -> Near:
    """SiLU of the convolution, [T, C], in BF16."""
    terms = window * step.weight.double().T
    bias = torch.zeros(()).to(terms) if step.bias is None else step.bias.double()
    sums = terms.sum(1) + bias
    noise = (terms.abs().sum(1) + bias.abs()) * 2.0**-21
    value = torch.nn.functional.silu(sums)
    # The CUDA programming guide's bound for __expf, and a few roundings.
    slack = 1.1 * noise + value.abs() * (6 + 1.2 * sums.abs()) * 2.0**-23
    low, high = (value - slack).bfloat16().double(), (value + slack).bfloat16().double()
    return Near(value.bfloat16().double(), high - low)


def _heads(channels: Near, step: Step) -> tuple[Near, Near, Near]:
    """q and k for every value head, and v, each [T, HV, 128]."""
    group = step.value_heads // step.key_heads
    widths = [heads * HEAD for heads in (step.key_heads, step.key_heads, step.value_heads)]
    parts = []
    for i, repeat in enumerate((group, group, 1)):
        pair = (channels.value.split(widths, 1)[i], channels.bound.split(widths, 1)[i])
        parts.append(Near(*(p.unflatten(1, (-1, HEAD)).repeat_interleave(repeat, 1) for p in pair)))
    return parts[0], parts[1], parts[2]


def _normalized(x: Near) -> Near:
    square = x.value.square().sum(-1, keepdim=True) + NORM_EPSILON
    relative = (x.value.abs() * x.bound).sum(-1, keepdim=True) / square * 2 + NOISE
    return Near(x.value / square.sqrt(), (x.bound + x.value.abs() * relative) / square.sqrt())


def _updated(step: Step, q: Near, k: Near, v: Near, state: torch.Tensor) -> tuple[Near, Near]:
    """Outputs and states; the last axis is k's."""
    exponent = step.a_log.double().exp() * torch.nn.functional.softplus(step.a.double() + step.dt_bias.double())
    decay, beta = (-exponent).exp()[..., None, None], step.b.double().sigmoid()[..., None]
    decayed, magnitude = state * decay, (state * decay).abs()
    unsure = NOISE * (1 + exponent[..., None, None])  # of the decay, relative
    rest = v.value - (decayed * k.value[..., None, :]).sum(-1)
    delta = rest * beta
    size = magnitude * k.value.abs()[..., None, :]
    delta_bound = (
        v.bound
        + (magnitude * k.bound[..., None, :]).sum(-1)
        + (unsure + NOISE)[..., 0] * (size.sum(-1) + v.value.abs())
    )
    delta_bound = delta_bound * beta + delta.abs() * NOISE
    change = delta[..., None] * k.value[..., None, :]
    change_bound = (
        delta_bound[..., None] * (k.value.abs() + k.bound)[..., None, :]
        + delta.abs()[..., None] * k.bound[..., None, :]
    )
    new = decayed + change
    new_bound = change_bound + magnitude * unsure + (magnitude + change.abs()) * NOISE
    out = (new * q.value[..., None, :]).sum(-1) * step.scale
    terms = (magnitude + change.abs()) * q.value.abs()[..., None, :] * NOISE
    out_bound = new_bound * (q.value.abs() + q.bound)[..., None, :] + new.abs() * q.bound[..., None, :] + terms
    return Near(out, out_bound.sum(-1) * step.scale), Near(new, new_bound)
