"""Random weights that behave: vLLM's own dummies elect the same experts for every token, in every layer alike.

vLLM 0.33 fills every parameter from one seed with numbers of at most 1e-3, so that routers hardly tell tokens apart.
Here each parameter has a seed of its own and the size that trained ones have, so that activations stay of their usual
size through all layers and each token elects experts of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

LOADER = "vllm.model_executor.model_loader.dummy_loader"
FILL = "initialize_single_dummy_weight"
STD = 0.02  # of weights as models of this family are initialized (initializer_range in their config.json)
BLOCK_SCALES = (0.5, 2.0)
# E2M1 codes of random bits have a root mean square of 2.9, block scales as above one of 1.3: over this they are STD.
DIVISOR = 190.0
HALF = 0.5


class _Filler:
    """Fills what it is given, each parameter from the next seed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, param: Any, *_: Any, name: str = "", **__: Any) -> None:
        self.count += 1
        fill(param, name, self.count)


_FILLER = _Filler()


def install() -> bool:
    """Makes vLLM's dummy loader fill parameters so; False where this vLLM has no place for it."""
    try:
        loader = import_module(LOADER)
    except ImportError:
        return False
    if not hasattr(loader, FILL):
        return False
    setattr(loader, FILL, _FILLER)
    return True


def filled() -> int:
    """How many parameters vLLM's loader has given us in this process; 0 where it took its own dummies."""
    return _FILLER.count


def fill(param: Any, name: str, seed: int) -> None:
    """Fills one parameter in place. name: within its layer, as checkpoints name it; decides about global scales."""
    torch = import_module("torch")
    if param.device.type == "meta":
        return
    generator = torch.Generator(device=param.device).manual_seed(seed)
    with torch.no_grad():
        if param.dtype is torch.uint8:
            param.random_(0, 256, generator=generator)
        elif param.dtype is torch.float8_e4m3fn:
            # A tenth at a time: the float32 copy of a whole model's experts would not fit beside them.
            for part in param.view(torch.uint8).view(-1).chunk(10):
                scales = torch.empty(part.shape, dtype=torch.float32, device=param.device)
                part.copy_(scales.uniform_(*BLOCK_SCALES, generator=generator).to(param.dtype).view(torch.uint8))
        elif not param.dtype.is_floating_point:
            return
        elif "global_scale" in name:
            param.fill_(DIVISOR)
        elif name.endswith(("scale_2", "input_scale")):
            param.fill_(1 / DIVISOR)
        elif param.dim() < 2:  # norms, some of which add one to this
            param.fill_(HALF)
        else:
            param.normal_(0.0, STD, generator=generator)
