"""A prompt of one token is served on CPU instead of ending the engine.

The convolution before a GDN layer wants [channels, tokens] with strides (1, channels). Its input is cut from a wider
tensor and made contiguous, which copies nothing when there is one token, since the stride of a dimension of one counts
for nothing; so the wider tensor's stride stays, and the kernel refuses it.
"""

from __future__ import annotations

from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch, Platform

PARAMETERS = (
    "x", "weight", "bias", "conv_states", "query_start_loc", "cache_indices", "has_initial_state", "silu_activation",
    "is_weight_packed",
)  # fmt: skip


def restriding(original: Any) -> Any:
    """`causal_conv1d_fwd_cpu` that also takes one token, whatever the stride between tokens. x: [channels, tokens]."""

    def causal_conv1d_fwd_cpu(x: Any, *values: Any, **named: Any) -> Any:
        channels, tokens = x.shape
        return original(x.as_strided(x.shape, (1, channels)) if tokens == 1 else x, *values, **named)

    return causal_conv1d_fwd_cpu


def _needed() -> Need:
    return Need(True, "the CPU convolution refuses a single token with another stride")


def _apply() -> None:
    from vllm import _custom_ops

    seams.replace_function(_custom_ops, "causal_conv1d_fwd_cpu", restriding, PARAMETERS)


PATCH = Patch(
    name="cpu-one-token-prompt",
    platform=Platform.CPU,
    changes="the CPU convolution of GDN layers takes a single token with any stride",
    why="one request whose prompt is one token ends the engine: expect x to be transposed",
    upstream=None,
    remove_when="torch.ops._C.causal_conv1d_fwd_cpu ignores the stride between tokens when there is one",
    needed=_needed,
    apply=_apply,
)
