"""Master weights, their BF16 or NVFP4-rounded copies in the model, and the optimizer over the masters."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from training.export import _fused_group, is_quantized
from training.quant import BLOCK, E2M1_MAX, E4M3_MAX, fake_quantize

MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.98)
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.02
# Coefficients of the quintic iteration that takes singular values near 1 (Muon, Jordan et al. 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ADAM_LEAVES = ("embed_tokens", "lm_head", "conv1d", "gate", "shared_expert_gate", "in_proj_a", "in_proj_b")


def uses_muon(name: str, parameter: Tensor) -> bool:
    """True for the matrices inside the network; embeddings, gates and vectors take Adam."""
    return parameter.ndim >= 2 and name.removesuffix(".weight").rsplit(".", 1)[-1] not in _ADAM_LEAVES


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly; [n, rows, columns] in BF16 products."""
    work = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    tall = work.shape[-2] > work.shape[-1]
    work = work.transpose(-1, -2) if tall else work
    work = work / (work.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = work @ work.transpose(-1, -2)
        work = a * work + (b * gram + c * gram @ gram) @ work
    return work.transpose(-1, -2) if tall else work


def _quantization_groups(name: str, shape: torch.Size) -> list[str]:
    """The global-scale group of each leading matrix of a parameter."""
    if len(shape) == 2:
        return [_fused_group(name)]
    return [f"{name}.{index}" for index in range(shape[0])]


class MasterWeights:
    """Float32 masters of all parameters; `refresh` writes what the forward pass shall see into the model."""

    def __init__(self, model: nn.Module, device: torch.device, work: torch.dtype) -> None:
        self.model = model.to(device)
        named = dict(model.named_parameters())
        four_bit = {name: parameter for name, parameter in named.items() if is_quantized(name)}
        self._flat = torch.cat([parameter.detach().float().flatten() for parameter in four_bit.values()])
        self._seen = self._flat.to(work, copy=True)
        self.masters: dict[str, Tensor] = {}
        groups: dict[str, int] = {}
        ids: list[Tensor] = []
        start = 0
        for name, parameter in four_bit.items():
            end = start + parameter.numel()
            self.masters[name] = self._flat[start:end].view(parameter.shape)
            parameter.data = self._seen[start:end].view(parameter.shape)
            keys = _quantization_groups(name, parameter.shape)
            each = parameter.numel() // len(keys) // BLOCK
            ids += [torch.full((each,), groups.setdefault(key, len(groups)), device=device) for key in keys]
            start = end
        self._group = torch.cat(ids)
        self._group_count = len(groups)
        self._others: list[tuple[nn.Parameter, Tensor]] = []
        for name, parameter in named.items():
            if name in four_bit:
                continue
            self.masters[name] = parameter.detach().float().clone()
            wide = parameter.ndim < 2 or "conv1d" in name
            parameter.data = parameter.detach().to(torch.float32 if wide else work)
            self._others.append((parameter, self.masters[name]))
        self.parameters = named

    @torch.no_grad()
    def refresh(self, *, quantized: bool) -> None:
        """Copy the masters into the model, the four-bit ones rounded to NVFP4 when `quantized`."""
        for parameter, master in self._others:
            parameter.copy_(master)
        if not quantized:
            self._seen.copy_(self._flat)
            return
        amax = self._flat.view(-1, BLOCK).abs().amax(-1)
        largest = torch.zeros(self._group_count, device=amax.device).scatter_reduce_(0, self._group, amax, "amax")
        scale = (largest / (E2M1_MAX * E4M3_MAX)).clamp(min=1e-12)[self._group]
        self._seen.copy_(fake_quantize(self._flat, scale.unsqueeze(-1)))

    def state(self) -> dict[str, Tensor]:
        """The masters in BF16 on the CPU, for saving."""
        return {name: master.to(torch.bfloat16).cpu().clone() for name, master in self.masters.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take masters from a saved state."""
        for name, master in self.masters.items():
            master.copy_(state[name])


class Optimizer:
    """Muon for the matrices, by groups of one shape; Adam for the rest. Learning rates are tensors on the device."""

    def __init__(self, weights: MasterWeights, device: torch.device) -> None:
        self.muon_rate = torch.zeros((), device=device)
        self.adam_rate = torch.zeros((), device=device)
        self._step = torch.zeros((), device=device)
        self._weights = weights
        self._muon: list[tuple[list[str], Tensor]] = []
        shapes: dict[tuple[int, int], list[str]] = {}
        self._adam: dict[str, tuple[Tensor, Tensor]] = {}
        for name, master in weights.masters.items():
            if uses_muon(name, master):
                shapes.setdefault((master.shape[-2], master.shape[-1]), []).append(name)
            else:
                self._adam[name] = (torch.zeros_like(master), torch.zeros_like(master))
        for (rows, columns), names in shapes.items():
            count = sum(weights.masters[name].numel() // (rows * columns) for name in names)
            self._muon.append((names, torch.zeros(count, rows, columns, device=device)))

    @torch.no_grad()
    def step(self) -> None:
        """One update of the masters from the gradients in the model, clipped to norm 1 for Adam's part."""
        for names, momentum in self._muon:
            self._muon_step(names, momentum)
        names = list(self._adam)
        gradients = [_gradient(self._weights.parameters[name]) for name in names]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        self._step += 1
        first = [self._adam[name][0] for name in names]
        second = [self._adam[name][1] for name in names]
        torch._foreach_lerp_(first, gradients, 1 - ADAM_BETAS[0])
        torch._foreach_mul_(second, ADAM_BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - ADAM_BETAS[1])
        correction = (1 - ADAM_BETAS[1] ** self._step).sqrt() / (1 - ADAM_BETAS[0] ** self._step)
        divisor = torch._foreach_sqrt(second)
        torch._foreach_add_(divisor, ADAM_EPS)
        updates = torch._foreach_div(first, divisor)
        torch._foreach_mul_(updates, -self.adam_rate * correction)
        torch._foreach_add_([self._weights.masters[name] for name in names], updates)

    def _muon_step(self, names: list[str], momentum: Tensor) -> None:
        rows, columns = momentum.shape[-2:]
        gradient = torch.cat([_gradient(self._weights.parameters[name]).view(-1, rows, columns) for name in names])
        momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
        update = orthogonalize(gradient.lerp(momentum, MUON_MOMENTUM)).float()
        update *= -self.muon_rate * max(1.0, rows / columns) ** 0.5
        masters = [self._weights.masters[name] for name in names]
        torch._foreach_mul_(masters, 1 - self.muon_rate * WEIGHT_DECAY)
        parts = update.split([master.numel() // (rows * columns) for master in masters])
        torch._foreach_add_(masters, [part.view(master.shape) for part, master in zip(parts, masters, strict=True)])


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter took no part in the loss")
    return parameter.grad.float()


def group_names(weights: MasterWeights) -> Iterator[str]:
    """Names of all master weights."""
    yield from weights.masters
