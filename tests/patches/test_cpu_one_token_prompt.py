"""The convolution of one token, against the same token as the first of two."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches.cpu_one_token_prompt import restriding  # noqa: E402

CHANNELS, WIDTH = 64, 4


@pytest.fixture
def convolution(cpu_vllm: None) -> Any:
    """vLLM's own, unpatched."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return torch.ops._C.causal_conv1d_fwd_cpu


def run(convolution: Any, tokens: int, *, patched: bool) -> tuple[Any, Any]:
    """The result [CHANNELS, tokens] and the window kept [CHANNELS, WIDTH - 1], from the same random values."""
    torch.manual_seed(0)
    weight = torch.ops._C.causal_conv1d_weight_pack(torch.randn(CHANNELS, WIDTH).bfloat16())
    x = torch.randn(4, CHANNELS + 8).bfloat16()[:tokens, :CHANNELS].contiguous()  # as vLLM cuts it from a wider tensor
    states = torch.zeros(3, WIDTH - 1, CHANNELS).bfloat16().transpose(1, 2)

    def plain(x: Any, *, states: Any) -> Any:
        begin, slot = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        return convolution(x, weight, None, states, begin, slot, torch.tensor([False]), True, -1, True)

    call = restriding(plain) if patched else plain
    return call(x.transpose(0, 1), states=states), states[2]


def test_vllm_refuses_one_token_so_the_patch_is_needed(convolution: Any) -> None:
    with pytest.raises(RuntimeError, match="expect x to be transposed"):
        run(convolution, 1, patched=False)


def test_one_token_equals_the_first_of_two_and_leaves_its_window(convolution: Any) -> None:
    one, window_of_one = run(convolution, 1, patched=True)
    two, window_of_two = run(convolution, 2, patched=False)
    assert one.shape == (CHANNELS, 1)
    assert torch.equal(one[:, 0], two[:, 0])
    assert torch.equal(window_of_one[:, -1], window_of_two[:, -2])
    assert not window_of_one[:, :-1].any()


def test_more_tokens_pass_unchanged(convolution: Any) -> None:
    for before, after in zip(run(convolution, 3, patched=False), run(convolution, 3, patched=True), strict=True):
        assert torch.equal(before, after)
