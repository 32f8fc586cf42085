"""One token's step of the gated delta net for each request, in one launch.

Convolution, SiLU, norms of q and k, gates, state and output. `reference` is the definition. No torch code of its own:
`decode` launches the kernel.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch

from qwen_nvfp4_serve.kernels import cards
from qwen_nvfp4_serve.kernels.gdn_decode import binding
from qwen_nvfp4_serve.kernels.nvfp4_linear import CAPABILITIES

HEAD = 128
WIDTH = 4  # of the convolution
GROUPS = (1, 2, 3, 4)  # value heads to a key head
MAX_TOKENS = 65535
MAX_VALUE_HEADS = 1024

__all__ = ["HEAD", "MAX_TOKENS", "WIDTH", "Step", "counters", "decode", "supports"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one decode step reads and writes, for H key heads and HV value heads of 128; C = (2 H + HV) 128 channels.

    x: bf16 [T, C], the channels of q, of k, then of v. weight: bf16 [C, 4], the oldest token first. bias: bf16 [C] or
    None. a, b: bf16 [T, HV]. a_log, dt_bias: float32 or bf16 [HV]. indices: int32 [T], a token's slot; a token whose
    index is not positive belongs to no request. conv_state: bf16 [slots, 3 or more, C], the first three are the last
    tokens, updated. state: float32 or bf16 [slots, HV, 128 (v), 128 (k)], updated. out: bf16 [T, HV, 128], written.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    indices: torch.Tensor
    conv_state: torch.Tensor
    state: torch.Tensor
    out: torch.Tensor
    scale: float = HEAD**-0.5

    @property
    def value_heads(self) -> int:
        return int(self.state.shape[1])

    @property
    def key_heads(self) -> int:
        return int((self.weight.shape[0] // HEAD - self.value_heads) // 2)

    def with_states_of_its_own(self) -> Step:
        """The same step on copies of what it writes."""
        return replace(self, conv_state=self.conv_state.clone(), state=self.state.clone(), out=self.out.clone())


def supports(capability: tuple[int, int], step: Step) -> str | None:
    """None if the kernel takes this step on a card of this compute capability, else the reason it does not."""
    if capability not in CAPABILITIES:
        return f"compute capability {capability[0]}.{capability[1]} is not among those compiled"
    return _heads(step) or _types(step) or _places(step)


def _heads(step: Step) -> str | None:
    if step.state.dim() != 4 or tuple(step.state.shape[2:]) != (HEAD, HEAD):
        return f"a state of {tuple(step.state.shape)} is not of heads of {HEAD}"
    (channels, width), heads, key_heads = step.weight.shape, step.value_heads, step.key_heads
    if width != WIDTH:
        return f"a convolution over {width} tokens, not {WIDTH}"
    if channels % HEAD or (channels // HEAD - heads) % 2 or key_heads < 1:
        return f"{channels} channels do not fit {heads} value heads"
    if heads > MAX_VALUE_HEADS or heads % key_heads or heads // key_heads not in GROUPS:
        return f"{heads} value heads for {key_heads} key heads"
    return _shapes(step, channels, heads)


def _shapes(step: Step, channels: int, heads: int) -> str | None:
    tokens = step.x.shape[0]
    if not 0 < tokens <= MAX_TOKENS:
        return f"{tokens} tokens are not in 1..{MAX_TOKENS}"
    of_tokens, of_heads = (tokens, heads), (heads,)
    shapes = (
        (step.x, (tokens, channels)),
        (step.a, of_tokens),
        (step.b, of_tokens),
        (step.a_log, of_heads),
        (step.dt_bias, of_heads),
        (step.indices, (tokens,)),
        (step.out, (tokens, heads, HEAD)),
        (step.bias, (channels,)),
    )
    for operand, shape in shapes:
        if operand is not None and operand.shape != shape:
            return f"an operand of shape {tuple(operand.shape)}, not {shape}"
    conv = step.conv_state
    fits = conv.dim() == 3 and conv.shape[1] >= WIDTH - 1 and conv.shape[2] == channels
    return None if fits else f"a conv state of shape {tuple(conv.shape)}"


def _types(step: Step) -> str | None:
    for operand in (step.x, step.weight, step.bias, step.a, step.b, step.conv_state, step.out):
        if operand is not None and operand.dtype is not torch.bfloat16:
            return f"an operand in {operand.dtype}"
    for operand in (step.state, step.a_log, step.dt_bias):
        if operand.dtype is not torch.bfloat16 and operand.dtype is not torch.float32:
            return f"an operand in {operand.dtype}"
    return None if step.indices.dtype is torch.int32 else f"an operand in {step.indices.dtype}"


def _places(step: Step) -> str | None:
    """Rows that are contiguous, and addresses as the kernel's loads need them."""
    whole = [step.weight, step.a_log, step.dt_bias, step.out, step.state[0], step.bias]
    if not all([t is None or t.is_contiguous() for t in whole]):  # noqa: C419 - a generator takes longer
        return "an operand is not contiguous"
    (x_stride, x_step), conv_strides = step.x.stride(), step.conv_state.stride()
    if (x_step, step.a.stride(-1), step.b.stride(-1), conv_strides[-1]) != (1, 1, 1, 1):
        return "an operand's rows are not contiguous"
    if (x_stride | conv_strides[0] | conv_strides[1]) % 2 or (step.x.data_ptr() | step.conv_state.data_ptr()) % 4:
        return "channels do not begin at multiples of 4 bytes"
    bytes_ = step.state.stride(0) * step.state.element_size()
    if bytes_ % 16 or step.state.data_ptr() % 16 or step.weight.data_ptr() % 16:
        return "states or weights do not begin at multiples of 16 bytes"
    return None


def counters(device: torch.device | str, tokens: int, key_heads: int) -> torch.Tensor:
    """What launches of one layer, of at most `tokens`, may share: they come after each other. Zero, and left zero."""
    return torch.zeros(tokens, key_heads, dtype=torch.int32, device=device)


def decode(step: Step, counts: torch.Tensor, *, rows: int = 0, early: bool = False, dependent: bool = True) -> None:
    """Runs `step` on the current stream. No checks: callers have made them.

    counts: `counters` for at least as many tokens. rows: of a state to a CTA, 16, 32 or 64, for measurements. early:
    indices, states and counts may be touched before the kernel ahead has ended: all that wrote them must have ended
    before that one began.
    """
    call = call_of(step, counts, rows=rows, early=early, dependent=dependent)
    error = cards.launch(binding.library().gdn_decode, step.x.device, ctypes.byref(call))
    if error:
        binding.check(error, f"delta net step of {step.x.shape[0]} tokens, {step.value_heads} heads")


def call_of(step: Step, counts: torch.Tensor, *, rows: int, early: bool, dependent: bool) -> binding.GdnDecodeCall:
    """The call's record; it holds addresses, so `step` must outlive it."""
    return binding.GdnDecodeCall(
        x=step.x.data_ptr(),
        weight=step.weight.data_ptr(),
        bias=None if step.bias is None else step.bias.data_ptr(),
        a=step.a.data_ptr(),
        b=step.b.data_ptr(),
        a_log=step.a_log.data_ptr(),
        dt_bias=step.dt_bias.data_ptr(),
        indices=step.indices.data_ptr(),
        conv_state=step.conv_state.data_ptr(),
        state=step.state.data_ptr(),
        out=step.out.data_ptr(),
        counters=counts.data_ptr(),
        x_stride=step.x.stride(0),
        a_stride=step.a.stride(0),
        b_stride=step.b.stride(0),
        index_stride=step.indices.stride(0),
        conv_slot_stride=step.conv_state.stride(0),
        conv_token_stride=step.conv_state.stride(1),
        state_slot_stride=step.state.stride(0),
        scale=step.scale,
        tokens=step.x.shape[0],
        key_heads=step.key_heads,
        value_heads=step.value_heads,
        state_is_bf16=int(step.state.dtype is torch.bfloat16),
        a_log_is_bf16=int(step.a_log.dtype is torch.bfloat16),
        dt_bias_is_bf16=int(step.dt_bias.dtype is torch.bfloat16),
        rows=rows,
        early=int(early),
        dependent=int(dependent),
    )
