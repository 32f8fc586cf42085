"""Our kernel in the place of vLLM's decode step of a delta net layer, with a card that is only pretended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches import backend, gpu_gdn_decode, seams  # noqa: E402
from qwen_nvfp4_serve.kernels import build, gdn_decode  # noqa: E402
from qwen_nvfp4_serve.kernels.gdn_decode import Step, check, reference  # noqa: E402
from qwen_nvfp4_serve.kernels.gdn_decode.check import Form, random_step  # noqa: E402

pytestmark = pytest.mark.usefixtures("cpu_vllm")
NAME = "_forward_core_decode_non_spec"
FORM = Form(key_heads=1, group=2)


class Card:
    """vLLM's class as on a card; who was called, and what is pretended."""

    def __init__(self, layer_class: Any) -> None:
        self.layer_class = layer_class
        self.stock: list[tuple[Any, ...]] = []
        self.ours: list[Step] = []
        self.early: list[bool] = []
        self.tried: list[Form] = []
        self.fault: str | None = None
        self.capturing = False

    def step(self, step: Step, *, tokens: int | None = None, **changed: Any) -> Any:
        """Calls the class's method as vLLM does, with buffers longer than the step; returns the layer."""
        layer = changed.pop("layer", None) or layer_of(step, **changed)
        count = step.x.shape[0] if tokens is None else tokens
        metadata = SimpleNamespace(num_actual_tokens=count, non_spec_state_indices_tensor=step.indices)
        getattr(self.layer_class, NAME)(
            layer, mixed_qkv=step.x, b=step.b, a=step.a, core_attn_out=step.out, attn_metadata=metadata
        )
        return layer


def layer_of(step: Step, **changed: Any) -> Any:
    weight = torch.nn.Parameter(step.weight[:, None], requires_grad=False)
    values = {
        "activation": "silu",
        "conv1d": SimpleNamespace(weight=weight, bias=step.bias),
        "A_log": step.a_log,
        "dt_bias": step.dt_bias,
        "kv_cache": (step.conv_state, step.state),
        "head_k_dim": gdn_decode.HEAD,
    }
    return SimpleNamespace(**(values | changed))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    card = Card(QwenGatedDeltaNetAttention)
    method = seams.stock_of(getattr(QwenGatedDeltaNetAttention, NAME))

    def stock(self: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, attn_metadata: Any) -> None:  # noqa: PLR0917
        card.stock.append((self, mixed_qkv, b, a, core_attn_out, attn_metadata))

    def decode(step: Step, counts: Any, *, early: bool) -> None:
        """As the kernel would, by the definition."""
        card.early.append(early)
        assert counts.shape[0] >= step.x.shape[0]
        expected = reference.expected(step)
        card.ours.append(step)
        step.out.copy_(expected.out.value)
        step.conv_state.copy_(expected.conv_state)

    def wrong(form: Form, _: Any) -> str | None:
        card.tried.append(form)
        return card.fault

    stock.__module__, stock.__qualname__ = method.__module__, method.__qualname__
    monkeypatch.setattr(QwenGatedDeltaNetAttention, NAME, stock)
    monkeypatch.setattr(gdn_decode, "decode", decode)
    monkeypatch.setattr(check, "wrong", wrong)
    monkeypatch.setattr(build, "find", lambda _: "built")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.capturing)
    monkeypatch.setenv(backend.VARIABLE, "hybrid")
    gpu_gdn_decode.admitted.cache_clear()
    gpu_gdn_decode._apply()
    yield card
    gpu_gdn_decode.admitted.cache_clear()


def test_step_of_a_decode_batch_is_ours(card: Card) -> None:
    step = random_step(FORM, (2, 0, 1))
    expected = reference.expected(step)
    card.step(step)
    assert not card.stock
    assert expected.out.holds(step.out)
    assert torch.equal(step.conv_state, expected.conv_state)
    assert card.ours[0].state.data_ptr() == step.state.data_ptr()
    assert card.tried == [FORM]
    assert card.early == [True]  # states are asked for before the projections have ended


def test_only_the_steps_tokens_are_handed_on(card: Card) -> None:
    step = random_step(FORM, (2, 1, 3))
    card.step(step, tokens=2)
    assert card.ours[0].x.shape[0] == card.ours[0].indices.shape[0] == 2
    assert step.out[:2].isfinite().all()
    assert step.out[2].isnan().all()


def test_class_is_changed_once(card: Card) -> None:
    ours = getattr(card.layer_class, NAME)
    gpu_gdn_decode._apply()
    assert getattr(card.layer_class, NAME) is ours


def test_card_is_tried_once_for_all_layers(card: Card) -> None:
    for _ in range(3):
        card.step(random_step(FORM, (1,)))
    assert len(card.ours) == 3
    assert card.tried == [FORM]


def test_kernel_that_is_wrong_on_the_card_is_left_out(card: Card) -> None:
    card.fault = "step 0 is outside its bound"
    step = random_step(FORM, (1,))
    card.step(step)
    assert not card.ours
    assert card.stock[0][1] is step.x
    assert card.stock[0][4] is step.out


def test_kernel_that_was_not_built_is_left_out_untried(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find", lambda _: None)
    card.step(random_step(FORM, (1,)))
    assert (len(card.stock), card.ours, card.tried) == (1, [], [])


def test_layer_that_is_first_met_in_a_capture_is_left_to_vllm(card: Card) -> None:
    step = random_step(FORM, (1,))
    card.capturing = True
    layer = card.step(step)
    assert (len(card.stock), card.tried) == (1, [])
    card.capturing = False
    card.step(step, layer=layer)
    card.capturing = True
    card.step(step, layer=layer)
    assert (len(card.stock), len(card.ours), card.tried) == (1, 2, [FORM])


def test_more_tokens_than_a_layer_counts_are_left_to_vllm(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_gdn_decode, "MOST_TOKENS", 2)
    card.step(random_step(FORM, (1, 2, 3)))
    card.step(random_step(FORM, (1, 2)))
    assert (len(card.stock), len(card.ours)) == (1, 1)


def test_what_the_kernel_does_not_take_is_left_to_vllm(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    step = random_step(FORM, (1,))
    card.step(step, activation=None)
    card.step(replace(step, state=step.state.half()))
    card.step(replace(step, indices=None))  # type: ignore[arg-type]
    monkeypatch.setattr("vllm.model_executor.layers.mamba.mamba_utils.is_conv_state_dim_first", lambda: True)
    card.step(step)
    assert (len(card.stock), card.ours, card.tried) == (4, [], [])


@pytest.mark.parametrize(("chosen", "needed"), [("hybrid", True), ("auto", False)])
def test_patch_is_for_hybrid_alone(monkeypatch: pytest.MonkeyPatch, chosen: str, needed: bool) -> None:
    monkeypatch.setenv(backend.VARIABLE, chosen)
    assert gpu_gdn_decode.PATCH.needed().needed is needed
