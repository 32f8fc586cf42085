"""The tensors' values: drawn from the seed by name, then stored as the style's tool would store them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qwen_nvfp4_serve.synthetic.layout import Init, Role, Weight, weights_of
from qwen_nvfp4_serve.synthetic.spec import CheckpointSpec, Precision, Writer
from qwen_nvfp4_serve.synthetic.tokenizer import silent_ids

if TYPE_CHECKING:
    import torch

E4M3_MAX = 448.0
NVFP4_MAX = 6.0 * E4M3_MAX
# The largest activation magnitude that the stored input scales allow for; a normed activation stays well below.
ACTIVATION_AMAX = 16.0


class Stored(NamedTuple):
    """One tensor of the file."""

    name: str
    tensor: torch.Tensor


def tensors_of(spec: CheckpointSpec) -> Iterator[Stored]:
    """Every tensor of `spec`'s checkpoint in file order, made one fused group at a time. CPU, contiguous."""
    style = spec.rules()
    stacks: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for _, members in itertools.groupby(weights_of(spec), key=lambda weight: weight.group):
        group = list(members)
        precision = group[0].precision(style)
        values = [draw(weight, spec.seed) for weight in group]
        if precision is Precision.BF16:
            plain = zip(group, values, strict=True)
        elif spec.dequantized:
            plain = zip(group, (pair[1] for pair in _quantized(group, values, precision, spec)), strict=True)
        else:
            for stored, _ in _quantized(group, values, precision, spec):
                yield from stored
            continue
        for weight, tensor in plain:
            yield from _stacked(weight, tensor, spec, stacks) if weight.stack else (Stored(weight.name, tensor),)


def draw(weight: Weight, seed: int) -> torch.Tensor:
    """The underlying value of `weight`: bfloat16 (float32 for A_log), decided by `seed` and the name alone."""
    import torch

    digest = hashlib.sha256(f"{seed}:{weight.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if weight.init is Init.ZERO:
        return torch.zeros(weight.shape, dtype=torch.bfloat16)
    if weight.init in (Init.A_LOG, Init.DT_BIAS):
        uniform = torch.rand(weight.shape, generator=generator)
        if weight.init is Init.A_LOG:
            return (1.0 + 15.0 * uniform).log()
        step = torch.exp(uniform * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        return (step + torch.log(-torch.expm1(-step))).to(torch.bfloat16)
    noise = torch.randn(weight.shape, generator=generator)
    if weight.init is Init.GEMMA_NORM:
        noise *= 0.05
    elif weight.init is Init.NORM:
        noise = 1.0 + 0.05 * noise
    elif weight.init is Init.LINEAR:
        noise *= weight.gain / math.sqrt(math.prod(weight.shape[1:]))
    if weight.role is Role.LM_HEAD:
        noise[silent_ids(weight.shape[0])] = 0.0
    return noise.to(torch.bfloat16)


def _stacked(
    weight: Weight, tensor: torch.Tensor, spec: CheckpointSpec, stacks: dict[str, dict[tuple[int, int], torch.Tensor]]
) -> Iterator[Stored]:
    """Nothing until the last expert came, then the stack [experts, halves * rows, columns]."""
    import torch

    parts = stacks.setdefault(weight.stack, {})
    parts[weight.stack_part] = tensor
    experts = spec.architecture.experts
    halves = 2 if weight.stack.endswith("gate_up_proj") else 1
    if len(parts) == experts * halves:
        rows = [torch.cat([parts[expert, half] for half in range(halves)]) for expert in range(experts)]
        del stacks[weight.stack]
        yield Stored(weight.stack, torch.stack(rows))


def _quantized(
    group: Sequence[Weight], values: Sequence[torch.Tensor], precision: Precision, spec: CheckpointSpec
) -> Iterator[tuple[tuple[Stored, ...], torch.Tensor]]:
    """For each member: the tensors stored for it, and its meaning in bfloat16."""
    import torch

    largest = [float(value.abs().amax()) for value in values]
    if not spec.unequal_scales:
        largest = [max(largest)] * len(largest)
    writer = spec.rules().writer
    for weight, value, amax in zip(group, values, largest, strict=True):
        if precision.is_nvfp4:
            yield _nvfp4(weight, value, amax, precision, writer)
        elif precision is Precision.FP8_TENSOR:
            yield _fp8(weight, value, torch.tensor(amax / E4M3_MAX if amax else 1.0, dtype=torch.float32))
        else:
            rows = value.float().abs().amax(1, keepdim=True) / E4M3_MAX
            yield _fp8(weight, value, torch.where(rows > 0, rows, torch.ones_like(rows)).to(torch.bfloat16))


def _nvfp4(
    weight: Weight, value: torch.Tensor, amax: float, precision: Precision, writer: Writer
) -> tuple[tuple[Stored, ...], torch.Tensor]:
    import torch

    from qwen_nvfp4_serve.kernels.nvfp4 import quantize_nvfp4

    # The multiplier is the reciprocal of a float32 divisor, so both tools' conventions mean the same number.
    divisor = torch.tensor([NVFP4_MAX / amax if amax else 1.0], dtype=torch.float32)
    multiplier = divisor.reciprocal().reshape(())
    tensor = quantize_nvfp4(value, multiplier)
    module, input_divisor = weight.module, NVFP4_MAX / ACTIVATION_AMAX
    stored = [Stored(f"{module}.weight_scale", tensor.block_scale)]
    if writer is Writer.COMPRESSED_TENSORS:
        stored += [
            Stored(f"{module}.weight_packed", tensor.packed),
            Stored(f"{module}.weight_global_scale", divisor),
        ]
        if precision is Precision.NVFP4:
            stored.append(Stored(f"{module}.input_global_scale", torch.tensor([input_divisor], dtype=torch.float32)))
    else:
        # ModelOpt publishes input_scale beside weight-only layers too.
        input_scale = torch.tensor(input_divisor, dtype=torch.float32).reciprocal()
        stored += [
            Stored(f"{module}.weight", tensor.packed),
            Stored(f"{module}.weight_scale_2", multiplier.clone()),
            Stored(f"{module}.input_scale", input_scale),
        ]
    return tuple(stored), tensor.dequantize(torch.bfloat16)


def _fp8(weight: Weight, value: torch.Tensor, scale: torch.Tensor) -> tuple[tuple[Stored, ...], torch.Tensor]:
    """`scale` is () for a static per-tensor layer with its input scale, [rows, 1] for per-channel and dynamic input."""
    import torch

    codes = (value.float() / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    stored = [Stored(f"{weight.module}.weight", codes), Stored(f"{weight.module}.weight_scale", scale)]
    if scale.ndim == 0:
        input_scale = torch.tensor(ACTIVATION_AMAX / E4M3_MAX, dtype=torch.float32)
        stored.append(Stored(f"{weight.module}.input_scale", input_scale))
    return tuple(stored), (codes.float() * scale.float()).to(torch.bfloat16)
