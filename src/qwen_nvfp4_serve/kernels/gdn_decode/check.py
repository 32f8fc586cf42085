"""The kernel on this card against the definition, on random steps: what must hold before a server uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qwen_nvfp4_serve.kernels import gdn_decode
from qwen_nvfp4_serve.kernels.gdn_decode import HEAD, WIDTH, Step, reference

CHECKED_STEPS = 2
CHECKED_INDICES = (2, 0, 3)  # two requests, and a token of none between them


@dataclass(frozen=True, slots=True)
class Form:
    """What decides which code runs: heads, types and whether the convolution has a bias."""

    key_heads: int
    group: int  # value heads to a key head
    state_dtype: torch.dtype = torch.float32
    a_log_dtype: torch.dtype = torch.float32
    dt_bias_dtype: torch.dtype = torch.float32
    bias: bool = False


def form_of(step: Step) -> Form:
    """The form of a step that the kernel takes."""
    group = step.value_heads // step.key_heads
    dtypes = (step.state.dtype, step.a_log.dtype, step.dt_bias.dtype)
    return Form(step.key_heads, group, *dtypes, step.bias is not None)


def random_step(form: Form, indices: tuple[int, ...], *, slots: int = 4, seed: int = 0) -> Step:
    """A step of len(indices) tokens on the CPU; what lies beside the states is NaN, and so are the outputs.

    Rows and slots are further apart than they are long, as in vLLM's pages.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, tokens = form.key_heads * form.group, len(indices)
    channels = (2 * form.key_heads + heads) * HEAD

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pages = torch.full((slots, heads * HEAD * HEAD + 64), float("nan")).to(form.state_dtype)
    state = pages[:, : heads * HEAD * HEAD].unflatten(1, (heads, HEAD, HEAD))
    state.copy_(random(*state.shape) * 0.2)
    return Step(
        x=random(tokens, channels + 64).bfloat16()[:, :channels],
        weight=random(channels, WIDTH).bfloat16() * 0.5,
        bias=random(channels).bfloat16() if form.bias else None,
        a=random(tokens, heads).bfloat16() * 3,
        b=random(tokens, heads).bfloat16(),
        a_log=random(heads).to(form.a_log_dtype),
        dt_bias=random(heads).to(form.dt_bias_dtype),
        indices=torch.tensor(indices, dtype=torch.int32),
        conv_state=random(slots, WIDTH * channels).bfloat16().unflatten(1, (WIDTH, channels)),
        state=state,
        out=torch.full((tokens, heads, HEAD), float("nan"), dtype=torch.bfloat16),
    )


def moved(step: Step, device: torch.device | str) -> Step:
    """A copy of the step on a device, with all that lies beside its operands."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        everything = whole(tensor).to(device, copy=True).view(tensor.dtype)
        return everything.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    fields = {name: getattr(step, name) for name in Step.__dataclass_fields__}
    return replace(step, **{name: there(t) for name, t in fields.items() if isinstance(t, torch.Tensor)})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of what `tensor` is a view of."""
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return everything.set_(tensor.untyped_storage())


def wrong(form: Form, device: torch.device | str) -> str | None:
    """None if the kernel computes `form` as the definition says on this card, else what is wrong. Synchronizes."""
    step = moved(random_step(form, CHECKED_INDICES), device)
    counts = gdn_decode.counters(device, len(CHECKED_INDICES), form.key_heads)
    for turn in range(CHECKED_STEPS):
        again = moved(step, device)
        # In float64 on the CPU: beside a loaded model a card has no room for it.
        expected = reference.expected(moved(step, "cpu"))
        for run, early in ((step, False), (again, True)):
            torch.cuda.synchronize(device)  # what the early one reads is there
            gdn_decode.decode(run, counts, early=early)
        torch.cuda.synchronize(device)
        if counts.any():
            return f"step {turn} left counters behind"
        if not expected.holds(moved(step, "cpu")):
            return f"step {turn} is outside its bound"
        if any(not torch.equal(whole(x), whole(y)) for x, y in zip(_written(step), _written(again), strict=True)):
            return f"step {turn} differs when it is repeated"
    return None


def _written(step: Step) -> tuple[torch.Tensor, ...]:
    return step.out, step.state, step.conv_state
