"""The graph of a decode step that `tests.step_on_card` times: its layers and their order, on a CPU."""

from __future__ import annotations

import pytest
import torch
from tests import step_on_card
from tests.step_on_card import ATTENTION, BF16, BOTH, DELTA_NET, SIZES, Layer, Model

from qwen_nvfp4_serve.kernels.gdn_decode import Step
from qwen_nvfp4_serve.kernels.gdn_decode.check import Form, random_step
from qwen_nvfp4_serve.kernels.nvfp4_linear.shapes import SHAPES

SMALL = Model(
    kinds=("linear_attention", "full_attention"),
    sizes={
        "gdn_qkvz": (6 * 128, 64),
        "gdn_ba": (4, 64),
        "gdn_out": (64, 256),
        "attn_qkv": (2 * 48 + 32, 64),
        "attn_o": (64, 48),
        "gate_up": (160, 64),
        "down": (64, 80),
    },
    attention=48,
    form=Form(key_heads=1, group=2),
)


@pytest.mark.parametrize("size", SIZES)
def test_layers_are_those_that_the_kernels_are_measured_for(size: str) -> None:
    model = step_on_card.model_of(size, 1)
    seen = [shape for shape in SHAPES if shape.model == size and shape.layer in model.sizes]
    assert len(seen) >= 4
    for shape in seen:
        if size == "27b" or shape.layer not in BOTH:
            assert model.sizes[shape.layer] == (shape.n, shape.k)
    assert model.kinds.count("linear_attention") == 3 * model.kinds.count("full_attention")


def test_experts_are_as_many_as_tokens_elect_at_random() -> None:
    assert step_on_card.model_of("35b", 1).sizes["down"] == (2048, 9 * 512)
    assert step_on_card.model_of("35b", 8).sizes["down"] == (2048, (57 + 1) * 512)
    assert step_on_card.model_of("27b", 8).sizes["down"] == (5120, 17408)


class Plain:
    """torch's products and norms; notes which layers are asked for."""

    def __init__(self) -> None:
        self.roles: list[str] = []
        self.deltas: list[torch.Tensor | None] = []

    def linear(self, layer: Layer, role: str, x: torch.Tensor) -> torch.Tensor:
        self.roles.append(role)
        return torch.nn.functional.linear(x, layer.weights[role])

    def projections(self, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(layer, "gdn_qkvz", x), self.linear(layer, "gdn_ba", x)

    def delta_net(self, step: Step) -> None:
        assert step.a.shape == step.b.shape == step.out.shape[:2]
        assert step.a.data_ptr() > step.b.data_ptr(), "b comes first in vLLM's projection"
        step.out.copy_(step.x[:, -256:].unflatten(1, (2, 128)))

    def norm(self, h: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        self.deltas.append(delta)
        if delta is not None:
            h += delta
        return torch.nn.functional.rms_norm(h, h.shape[1:])

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    def gated_norm(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(o, o.shape[1:]) * torch.nn.functional.silu(z)


def test_step_asks_for_every_layer_in_its_order() -> None:
    layers = [
        Layer(kind, {role: torch.randn(SMALL.sizes[role]).to(BF16) for role in roles}, step)
        for kind, roles, step in (
            ("linear_attention", (*DELTA_NET, *BOTH), random_step(SMALL.form, (1, 2, 3))),
            ("full_attention", (*ATTENTION, *BOTH), None),
        )
    ]
    kernels, first = Plain(), torch.randn(3, 64).to(BF16)
    h = torch.full_like(first, float("nan"))
    step_on_card.decode_step(SMALL, layers, kernels, first, h)
    assert kernels.roles == [*DELTA_NET, *BOTH, *ATTENTION, *BOTH]
    assert kernels.deltas[0] is None
    total = first.clone()
    for delta in kernels.deltas[1:]:
        assert delta is not None
        total += delta
    assert torch.equal(h, total)
    assert not torch.equal(h, first)
