"""What the kernel says it takes, and what it says of the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen_nvfp4_serve.kernels.gdn_decode import Step, supports
from qwen_nvfp4_serve.kernels.gdn_decode.check import Form, form_of, random_step

CARD = (9, 0)
FORM = Form(key_heads=2, group=3)


def changed(**fields: Any) -> Step:
    return replace(random_step(FORM, (1, 2)), **fields)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_step_as_vllm_has_it_is_taken(group: int) -> None:
    form = Form(2, group, torch.bfloat16, torch.float32, torch.bfloat16, bias=True)
    step = random_step(form, (1,))
    assert supports(CARD, step) is None
    assert form_of(step) == form


def test_another_card_is_named() -> None:
    assert "7.5" in str(supports((7, 5), random_step(FORM, (1,))))


BASE = random_step(FORM, (1, 2))
OTHERS = {
    "five values a key": random_step(Form(1, 5), (1,)),
    "heads of 64": changed(state=BASE.state[..., :64]),
    "v and k of the state exchanged": changed(state=BASE.state.transpose(-1, -2)),
    "a convolution over 3": changed(weight=BASE.weight[:, :3]),
    "odd channels": changed(weight=BASE.weight[:-1]),
    "values that keys do not divide": changed(state=BASE.state[:, :4]),
    "fewer gates": changed(a=BASE.a[:, :5]),
    "fewer indices": changed(indices=BASE.indices[:1]),
    "indices in 64 bits": changed(indices=BASE.indices.long()),
    "activations in float32": changed(x=BASE.x.float()),
    "states in float16": changed(state=BASE.state.half()),
    "conv states in float32": changed(conv_state=BASE.conv_state.float()),
    "conv states channel by channel": changed(conv_state=BASE.conv_state.transpose(1, 2).contiguous().transpose(1, 2)),
    "two kept tokens": changed(conv_state=BASE.conv_state[:, :2]),
    "gates with gaps": changed(a=torch.cat((BASE.a, BASE.a), 1)[:, ::2]),
    "rows at odd places": changed(x=torch.zeros(2, BASE.x.shape[1] + 1).bfloat16()[:, 1:]),
    "outputs with gaps": changed(out=torch.cat((BASE.out, BASE.out), 2)[..., :128]),
    "no token": changed(x=BASE.x[:0], a=BASE.a[:0], b=BASE.b[:0], indices=BASE.indices[:0], out=BASE.out[:0]),
}


@pytest.mark.parametrize("what", OTHERS)
def test_step_that_is_not_ours_is_refused_with_a_reason(what: str) -> None:
    assert supports(CARD, OTHERS[what])
