"""The delta net's decode step in one launch instead of two, from the projections to its output.

Only under NVFP4_BACKEND=hybrid. The kernel is compared with its definition when a model first decodes, on the card that
serves it; whatever it does not take, and a card on which it is wrong, are left to vLLM's own kernels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.backend import nvfp4_backend
from qwen_nvfp4_patches.patch import Need, Patch, Platform
from qwen_nvfp4_serve.errors import QwenNvfp4Error

if TYPE_CHECKING:
    import torch

    from qwen_nvfp4_serve.kernels.gdn_decode import Step
    from qwen_nvfp4_serve.kernels.gdn_decode.check import Form

MOST_TOKENS = 8  # on an H200 as fast as vLLM's two launches here, faster below, a quarter slower at 32
DECIDED = "qwen_nvfp4_gdn_decode"


def step_of(
    layer: Any, metadata: Any, *, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
) -> Step | str:
    """vLLM's operands as ours, or why they are not what our kernel is made for."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    from qwen_nvfp4_serve.kernels.gdn_decode import Step

    if is_conv_state_dim_first():
        return "the convolution's states lie channel by channel"
    if layer.activation not in ("silu", "swish"):
        return f"activation {layer.activation}"
    if metadata.non_spec_state_indices_tensor is None:
        return "no state indices"
    tokens, weight = metadata.num_actual_tokens, layer.conv1d.weight
    return Step(
        x=mixed_qkv[:tokens],
        weight=weight.view(weight.size(0), weight.size(2)),
        bias=layer.conv1d.bias,
        a=a[:tokens],
        b=b[:tokens],
        a_log=layer.A_log,
        dt_bias=layer.dt_bias,
        indices=metadata.non_spec_state_indices_tensor[:tokens],
        conv_state=layer.kv_cache[0],
        state=layer.kv_cache[1],
        out=out[:tokens],
        scale=layer.head_k_dim**-0.5,
    )


@functools.cache
def admitted(form: Form, device: torch.device) -> bool:
    """True if the kernel is built and right on this card; logged once."""
    from qwen_nvfp4_serve.kernels import build
    from qwen_nvfp4_serve.kernels.gdn_decode import check

    reason: str | None = "it is not built: run scripts/build-kernels"
    if build.find(build.GDN_DECODE):
        try:
            reason = check.wrong(form, device)
        except (QwenNvfp4Error, OSError) as error:  # a library for other cards, or one that does not load
            reason = str(error)
    if reason:
        _logger().warning("Delta net steps are left to vLLM's kernels, ours is not used: %s", reason)
        return False
    heads = form.key_heads * form.group
    _logger().info("Delta net steps of %d heads, states in %s: one kernel of ours", heads, form.state_dtype)
    return True


def counts_for(layer: Any, step: Step) -> torch.Tensor | str:
    """The layer's counters, or why our kernel does not serve this step. A layer is decided at its first, uncaptured."""
    import torch

    from qwen_nvfp4_serve.kernels import cards
    from qwen_nvfp4_serve.kernels.gdn_decode import check, counters, supports

    reason = supports(cards.capability(step.x.device), step)
    if reason:
        return reason
    decided: torch.Tensor | str | None = getattr(layer, DECIDED, None)
    if decided is None:
        if torch.cuda.is_current_stream_capturing():
            return "captured in a graph before it was tried"
        right = admitted(check.form_of(step), step.x.device)
        decided = counters(step.x.device, MOST_TOKENS, step.key_heads) if right else "ours was not admitted"
        setattr(layer, DECIDED, decided)
    return decided


def in_one_launch(stock: Any) -> Any:
    """vLLM's method by our kernel; `stock` for what that does not take."""
    from vllm import envs

    from qwen_nvfp4_serve.kernels.gdn_decode import decode

    def _forward_core_decode_non_spec(  # noqa: PLR0917 - vLLM's signature
        self: Any,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        attn_metadata: Any,
    ) -> None:
        if attn_metadata.num_actual_tokens > MOST_TOKENS or envs.VLLM_BATCH_INVARIANT:
            stock(self, mixed_qkv, b, a, core_attn_out, attn_metadata)
            return
        step = step_of(self, attn_metadata, mixed_qkv=mixed_qkv, b=b, a=a, out=core_attn_out)
        counts = step if isinstance(step, str) else counts_for(self, step)
        if isinstance(step, str) or isinstance(counts, str):
            _logger().warning_once("A delta net step is left to vLLM's kernels: %s", counts)
            stock(self, mixed_qkv, b, a, core_attn_out, attn_metadata)
            return
        # What wrote states and indices ended before the kernel ahead began: the projections lie between, and every
        # kernel of a step waits for all before it, compiled ones by gpu-dependent-launch.
        decode(step, counts, early=True)

    return _forward_core_decode_non_spec


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.qwen_nvfp4_patches")


def _needed() -> Need:
    if nvfp4_backend() != "hybrid":
        return Need(False, f"NVFP4_BACKEND is {nvfp4_backend()}, which leaves the choice to vLLM")
    return Need(True, "NVFP4_BACKEND is hybrid")


def _apply() -> None:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    seams.replace_function(
        QwenGatedDeltaNetAttention,
        "_forward_core_decode_non_spec",
        in_one_launch,
        parameters=("self", "mixed_qkv", "b", "a", "core_attn_out", "attn_metadata"),
    )


PATCH = Patch(
    name="gpu-gdn-decode",
    platform=Platform.GPU,
    changes="a delta net layer's decode step without speculation runs as one kernel, from convolution to output, where "
    "that is right on the card; only under NVFP4_BACKEND=hybrid",
    why="two launches for each delta net layer, one after the other, of which the first has hardly any work",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",
    remove_when="vLLM decodes a delta net layer's token without speculation in one launch on these cards",
    needed=_needed,
    apply=_apply,
)
