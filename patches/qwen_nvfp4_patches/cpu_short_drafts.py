"""Gated delta net layers on CPU when a request has fewer draft tokens than the others, as a grammar leaves it.

The convolution's buffer holds the inputs before the step's, then the step's. vLLM's CPU code takes it that the step
fills it: with fewer drafts it leaves an older input in between, or ends the engine with a size that does not match.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch, Platform

if TYPE_CHECKING:
    import torch

PARAMETERS = (
    "layer", "attn_metadata_i", "mixed_qkv_spec", "b_spec", "a_spec", "conv_buf", "ssm_state", "width", "state_len",
)  # fmt: skip


def convolve(
    inputs: torch.Tensor, buffer: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, accepted: int
) -> torch.Tensor:
    """The causal convolution of one request's step, [T, D] like `inputs`, and `buffer` made ready for the next step.

    buffer: [D, S], changed in place. With W taps, columns `accepted - 1` to `accepted + W - 3` hold the inputs before
    the step; afterwards column `n - 1` begins those that come before a next step if n of the T tokens are accepted.
    weight: [D, W].
    """
    import torch
    from torch.nn import functional

    taps = weight.size(-1)
    before = buffer[:, accepted - 1 : accepted + taps - 2]
    joined = torch.cat([before, inputs.transpose(0, 1).to(buffer.dtype)], dim=-1)
    convolved = functional.conv1d(joined.unsqueeze(0), weight.unsqueeze(1), bias, groups=weight.size(0))[0]
    buffer[:, : joined.size(-1) - 1] = joined[:, 1:]
    return convolved.transpose(0, 1).to(inputs.dtype)


def spec_forward(original: Any) -> Any:
    """_spec_forward that takes a short step of a request as it is."""

    def _spec_forward(layer: Any, attn_metadata_i: Any, *tensors_and_sizes: Any) -> Any:
        mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, width, state_len = tensors_and_sizes
        count = attn_metadata_i.num_spec_decodes
        starts = attn_metadata_i.spec_query_start_loc[: count + 1]
        steps = list(itertools.pairwise(starts.tolist()))
        if all(end - start == state_len - width + 2 for start, end in steps):
            return original(layer, attn_metadata_i, *tensors_and_sizes)
        from torch.nn import functional
        from vllm import _custom_ops
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        slots = attn_metadata_i.spec_state_indices_tensor[:count]
        accepted = attn_metadata_i.num_accepted_tokens[:count]
        weight = gdn_attention._unpacked_conv_weight(layer)
        convolved = mixed_qkv_spec.clone()
        for slot, kept, (start, end) in zip(slots[:, 0].tolist(), accepted.tolist(), steps, strict=True):
            if end > start:
                step = mixed_qkv_spec[start:end]
                convolved[start:end] = convolve(step, conv_buf[slot], weight, layer.conv1d.bias, kept)
        if layer.activation == "silu":
            convolved = functional.silu(convolved)
        query, key, value = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(convolved))
        return _custom_ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            q=query,
            k=key,
            v=value,
            a=a_spec,
            b=b_spec,
            initial_state_source=ssm_state,
            spec_state_indices=slots.int().contiguous(),
            num_accepted_tokens=accepted.int().contiguous(),
            cu_seqlens=starts.int().contiguous(),
            use_qk_l2norm_in_kernel=True,
        )

    return _spec_forward


def _needed() -> Need:
    import inspect

    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    if "state_len - q_i" not in inspect.getsource(seams.stock_of(gdn_attention._spec_forward)):
        return Need(False, "vLLM's CPU code no longer takes it that every step fills the buffer")
    return Need(True, "a structured output with MTP ends the engine, where a grammar refuses some of the drafts")


def _apply() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    seams.replace_function(gdn_attention, "_spec_forward", spec_forward, PARAMETERS)


PATCH = Patch(
    name="cpu-short-drafts",
    platform=Platform.CPU,
    changes="_spec_forward of the CPU gated delta net takes requests with fewer drafts than the others",
    why="a structured output with SPECULATIVE_TOKENS ends the engine on CPU, where a grammar refuses some drafts",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py",
    remove_when="tests/e2e/test_structured_drafts.py passes with this patch taken out",
    needed=_needed,
    apply=_apply,
)
