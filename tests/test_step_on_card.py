"""The graph of a decode step that `tests.step_on_card` times: its layers and their order, on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests import step_on_card
from tests.step_on_card import BF16, SIZES, Dims, Layer

from qwen_nvfp4_serve.kernels.nvfp4_linear.shapes import SHAPES
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec
from qwen_nvfp4_serve.synthetic.config import model_config

SMALL = Dims(
    kinds=("linear_attention", "full_attention"),
    hidden=64,
    attention=48,
    value_heads=2,
    key_heads=1,
    nvfp4={"attn_qkv": (2 * 48 + 32, 64), "attn_o": (64, 48), "gate_up": (160, 64), "down": (64, 80)},
    bf16={"gdn_qkvz": (6 * 128, 64), "gdn_ba": (4, 64), "gdn_out": (64, 256)},
)


def dims_of(size: str, tokens: int = 1) -> Dims:
    spec = CheckpointSpec(architecture=ARCHITECTURES[SIZES[size]], style="ct-w4a4")
    return step_on_card.dims_of(model_config(spec)["text_config"], tokens)


@pytest.mark.parametrize("size", SIZES)
def test_layers_are_those_that_the_kernels_are_measured_for(size: str) -> None:
    dims = dims_of(size)
    for shape in SHAPES:
        model, role = shape.name.split("/")
        if model == size and role not in {"lm_head", "shared_gate_up", "shared_down"}:
            assert {**dims.nvfp4, **dims.bf16}[role] == (shape.n, shape.k)
    assert dims.kinds.count("linear_attention") == 3 * dims.kinds.count("full_attention")


def test_experts_are_as_many_as_tokens_elect_at_random() -> None:
    assert dims_of("35b", 1).nvfp4["down"] == (2048, 9 * 512)
    assert dims_of("35b", 8).nvfp4["down"] == (2048, (57 + 1) * 512)
    assert dims_of("27b", 8).nvfp4["down"] == (5120, 17408)


class Plain:
    """torch's products and norms; notes which layers are asked for."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.roles: list[str] = []
        self.deltas: list[torch.Tensor | None] = []

    def linear(self, layer: Layer, role: str, x: torch.Tensor) -> torch.Tensor:
        self.roles.append(role)
        return torch.nn.functional.linear(x, layer.weights[role])

    def delta_net(self, layer: Layer, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        step = step_on_card.delta_net_step(self.dims, layer, qkvz, ba)
        assert step.a.shape == step.b.shape == (qkvz.shape[0], self.dims.value_heads)
        return step.x[:, -self.dims.value_heads * 128 :]

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
    dense = replace(SMALL, nvfp4={}, bf16={**SMALL.nvfp4, **SMALL.bf16})
    layers = [step_on_card.random_layer(dense, kind, 3, "cpu") for kind in SMALL.kinds]
    kernels, first = Plain(SMALL), torch.randn(3, SMALL.hidden).to(BF16)
    h = torch.full_like(first, float("nan"))
    step_on_card.decode_step(SMALL, layers, kernels, first, h)
    recurrent, attention = ["gdn_qkvz", "gdn_ba", "gdn_out"], ["attn_qkv", "attn_o"]
    assert kernels.roles == [*recurrent, "gate_up", "down", *attention, "gate_up", "down"]
    assert kernels.deltas[0] is None
    total = first.clone()
    for delta in kernels.deltas[1:]:
        assert delta is not None
        total += delta
    assert torch.equal(h, total)
    assert not torch.equal(h, first)


def test_nvfp4_weights_are_as_the_kernels_take_them() -> None:
    dims = replace(SMALL, nvfp4={**SMALL.nvfp4, "gate_up": (256, 128)})
    weight = step_on_card.random_weight(dims, "gate_up", "cpu")
    assert weight.packed.shape == (256, 64)
    assert weight.row_scale.shape == (256,)
