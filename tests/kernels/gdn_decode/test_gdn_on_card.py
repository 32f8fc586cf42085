"""The kernel on this machine's card: against its definition, in graphs, and beside vLLM's two kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import stock_gdn

from qwen_nvfp4_serve.kernels import gdn_decode
from qwen_nvfp4_serve.kernels.gdn_decode import Step, check, reference
from qwen_nvfp4_serve.kernels.gdn_decode.check import Form, moved, random_step, whole

pytestmark = pytest.mark.gpu
FORMS = (Form(16, 2, dt_bias_dtype=torch.bfloat16), Form(16, 3, dt_bias_dtype=torch.bfloat16))  # the 35B's, the 27B's
# vLLM rounds each product of the convolution to BF16: 2^-9 of each of four terms, twice that after the norms.
VLLM_RMS = 2.0**-6


def steps_of(form: Form, tokens: int, layers: int = 1) -> list[Step]:
    indices = tuple(range(tokens, 0, -1))
    return [moved(random_step(form, indices, slots=tokens + 1, seed=i), "cuda") for i in range(layers)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [*FORMS, Form(4, 1), Form(4, 4, bias=True)], ids=str)
def test_check_before_serving_finds_nothing_wrong(form: Form, dtype: torch.dtype) -> None:
    gate_types = (form.a_log_dtype, form.dt_bias_dtype)
    assert check.wrong(Form(form.key_heads, form.group, dtype, *gate_types, form.bias), "cuda") is None


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 2, 8, 33])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_slice_and_batch_is_within_the_bound(form: Form, tokens: int, rows: int) -> None:
    (step,) = steps_of(form, tokens)
    expected = reference.expected(step)
    counts = gdn_decode.counters("cuda", tokens, form.key_heads)
    gdn_decode.decode(step, counts, rows=rows)
    assert expected.holds(step)
    assert not counts.any()


@pytest.mark.parametrize("tokens", [1, 5])
def test_replayed_graph_of_early_launches_gives_the_bits_of_ordinary_ones(tokens: int) -> None:
    layers, turns = 8, 50
    assert check.wrong(FORMS[1], "cuda") is None  # loads the kernel: not while a graph is captured
    chained, plain = steps_of(FORMS[1], tokens, layers), steps_of(FORMS[1], tokens, layers)
    counts = [gdn_decode.counters("cuda", tokens, FORMS[1].key_heads) for _ in chained]
    first = torch.zeros(1, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        first.add_(1)  # as in a server, an ordinary launch is a step's first
        for step, count in zip(chained, counts, strict=True):
            gdn_decode.decode(step, count, early=True)
    for _ in range(turns):
        graph.replay()
        for step, count in zip(plain, counts, strict=True):
            gdn_decode.decode(step, count, dependent=False)
    torch.cuda.synchronize()
    for step, other in zip(chained, plain, strict=True):
        for name in ("out", "state", "conv_state"):
            assert torch.equal(whole(getattr(step, name)), whole(getattr(other, name)))


@pytest.mark.parametrize("tokens", [1, 2, 8, 32])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_vllms_two_kernels_give_nearly_the_same(form: Form, tokens: int) -> None:
    pytest.importorskip("vllm")
    (ours,), (theirs,) = steps_of(form, tokens), steps_of(form, tokens)
    gdn_decode.decode(ours, gdn_decode.counters("cuda", tokens, form.key_heads))
    stock_gdn.decode(theirs)
    assert torch.equal(ours.conv_state, theirs.conv_state)
    assert relative_rms(ours.out, theirs.out) < VLLM_RMS
    assert relative_rms(ours.state, theirs.state) < VLLM_RMS


def relative_rms(x: Any, y: Any) -> float:
    return float((x.double() - y.double()).square().mean().sqrt() / y.double().square().mean().sqrt())
