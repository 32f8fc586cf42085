"""The largest inputs of the quantized products, for the input scales that a W4A4 checkpoint carries."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from training.export import is_quantized, published_name
from training.model import Experts, ReferenceModel, Rows

# Inputs above what was measured keep their value up to this factor; block scales have range to spare.
HEADROOM = 2.0


@torch.no_grad()
def input_amax(model: ReferenceModel, rows: Rows) -> dict[str, float]:
    """Largest input magnitude times `HEADROOM` of every quantized module, by published name; experts one by one.

    Runs the trunk and one draft step on `rows` without rounding.
    """
    largest: dict[str, float] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_quantized(f"{name}.weight"):
            hooks.append(module.register_forward_pre_hook(_linear_hook(largest, published_name(name))))
        elif isinstance(module, Experts):
            hooks.append(module.register_forward_pre_hook(_experts_hook(largest, published_name(name))))
    try:
        hidden, _ = model.trunk(rows)
        model.draft(hidden, rows, 1)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: value * HEADROOM for name, value in largest.items()}


def _linear_hook(largest: dict[str, float], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().max()))

    return record


def _experts_hook(largest: dict[str, float], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        narrow, weight = inputs
        outer = float(narrow.abs().max())
        gate, up = module.activations(narrow)  # type: ignore[operator]
        inner = (nn.functional.silu(gate) * up).abs().amax(-1).masked_fill(weight == 0, 0.0).max()
        for index in range(weight.shape[-1]):
            for leaf in ("gate_proj", "up_proj"):
                largest[f"{name}.{index}.{leaf}"] = max(largest.get(f"{name}.{index}.{leaf}", 0.0), outer)
            down = f"{name}.{index}.down_proj"
            largest[down] = max(largest.get(down, 0.0), float(inner))

    return record
