"""A delta net's decode step by vLLM's two kernels, as its layer runs them. Needs vLLM's CUDA build."""

from __future__ import annotations

from importlib import import_module

from qwen_nvfp4_serve.kernels.gdn_decode import Step

CONVOLUTION = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
RECURRENCE = "vllm.third_party.flash_linear_attention.ops"


def decode(step: Step) -> None:
    """Runs the step; what was x is overwritten."""
    convolved = import_module(CONVOLUTION).causal_conv1d_update(
        step.x,
        step.conv_state.transpose(-1, -2),
        step.weight,
        step.bias,
        "silu",
        conv_state_indices=step.indices,
        validate_data=False,
    )
    import_module(RECURRENCE).fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=convolved,
        a=step.a.contiguous(),
        b=step.b.contiguous(),
        A_log=step.a_log,
        dt_bias=step.dt_bias,
        scale=step.scale,
        initial_state=step.state,
        out=step.out.unsqueeze(1),
        ssm_state_indices=step.indices,
        use_qk_l2norm_in_kernel=True,
    )
