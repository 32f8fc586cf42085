"""The convolution of speculative steps of any length: against one convolution of what was accepted in the end."""

from __future__ import annotations

import inspect
from random import Random

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches import cpu_short_drafts as short  # noqa: E402
from qwen_nvfp4_patches.seams import stock_of  # noqa: E402
from qwen_nvfp4_serve import shims  # noqa: E402

TAPS, DIM = 4, 6


@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_steps_of_any_length_convolve_as_one_sequence(drafts: int, seed: int) -> None:
    torch.manual_seed(seed)
    rng = Random(seed)
    weight, bias = torch.randn(DIM, TAPS), torch.randn(DIM)
    buffer = torch.full((DIM, TAPS - 1 + drafts), float("nan"))
    history = torch.randn(TAPS - 1, DIM)
    buffer[:, : TAPS - 1] = history.T
    outputs, accepted = [], 1
    for _ in range(12):
        step = torch.randn(rng.randrange(1, drafts + 2), DIM)
        convolved = short.convolve(step, buffer, weight, bias, accepted)
        accepted = rng.randrange(1, len(step) + 1)
        history = torch.cat([history, step[:accepted]])
        outputs.append(convolved[:accepted])
    whole = torch.nn.functional.conv1d(history.T.unsqueeze(0), weight.unsqueeze(1), bias, groups=DIM)[0].T
    torch.testing.assert_close(torch.cat(outputs), whole)


def test_what_the_patch_takes_for_granted_is_there() -> None:
    shims.install()
    gdn = pytest.importorskip("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    stock = stock_of(gdn._spec_forward)
    assert tuple(inspect.signature(stock).parameters) == short.PARAMETERS
    assert short._needed().needed
