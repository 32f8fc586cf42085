"""The whole Qwen mixture-of-experts block at decode in our kernels: router, election, experts, shared expert, sum.

Only under NVFP4_BACKEND=hybrid. The block calls one opaque op instead of vLLM's; that looks at the number of tokens and
at the block's layers when it runs, and does what vLLM would have done unless everything is as our kernels need it. So
one compiled graph holds for every outcome, and what decides about the graph is the configuration alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import gpu_nvfp4_moe, seams
from qwen_nvfp4_patches.fused_scales import LINEAR_SCALES
from qwen_nvfp4_patches.patch import Patch, Platform
from qwen_nvfp4_serve.errors import UsageError

if TYPE_CHECKING:
    import torch

    from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight
    from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights

ELIGIBLE = "qwen_nvfp4_eligible"
SERVED = "qwen_nvfp4_block"
OP = "qwen_nvfp4_moe_block"
ROUTERS = ("FusedTopKRouter",)  # elect by softmax alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What our op takes of one layer. most: tokens. shared: None where vLLM computes the shared expert.

    router: bf16 [E, H]. shared_gate: bf16 [1, H].
    """

    most: int
    router: torch.Tensor
    experts: ExpertWeights
    top_k: int
    renormalize: bool
    shared: ExpertWeights | None
    shared_gate: torch.Tensor | None


def obstacle(block: Any) -> str | None:
    """Why a vLLM Qwen3NextSparseMoeBlock must run as it is, by its configuration alone; None if it need not."""
    runner = block.experts
    config, method = runner.moe_config, runner.routed_experts.quant_method
    parallel = config.moe_parallel_config
    found = {
        "experts are not NVFP4": not hasattr(method, "nvfp4_backend"),
        "expert, data or sequence parallelism": parallel.use_ep
        or parallel.dp_size > 1
        or parallel.pcp_size > 1
        or parallel.is_sequence_parallel
        or block.is_sequence_parallel,
        "expert load balancing": parallel.enable_eplb,
        "LoRA": config.is_lora_enabled,
        "no shared expert beside the routed ones": runner.shared_experts is None,
        "another router": type(runner.router).__name__ not in ROUTERS,
        "a transformed input or output": runner.routed_input_transform is not None
        or runner.routed_output_transform is not None
        or runner.routed_scaling_factor != 1.0,
        "padded activations": config.hidden_dim_unpadded not in (None, config.hidden_dim),
    }
    return next((words for words, holds in found.items() if holds), None)


def block_of(runner: Any) -> Block | None:
    """The layers of a vLLM MoERunner as our op takes them, None if it cannot; found once, when first asked."""
    if not hasattr(runner, SERVED):
        try:
            found: Block | None = _collect(runner)
        except UsageError as error:
            _logger().warning_once("The mixture of experts block is left to vLLM: %s", error)
            found = None
        # Not a module's attribute: it holds no parameters of its own.
        object.__setattr__(runner, SERVED, found)
    kept: Block | None = getattr(runner, SERVED)
    return kept


def _collect(runner: Any) -> Block:
    """Raises UsageError, with the reason, where something is not as our kernels need it."""
    import torch

    from qwen_nvfp4_serve.kernels import nvfp4_moe
    from qwen_nvfp4_serve.kernels.admission import EXPERTS
    from qwen_nvfp4_serve.kernels.admission.experts import tokens_of

    experts: Any = getattr(runner.routed_experts.quant_method.moe_kernel, "fused_experts", None)
    if type(experts).__name__ != gpu_nvfp4_moe.EXPERTS:
        raise UsageError("its experts", seen=type(experts).__name__, expected=gpu_nvfp4_moe.EXPERTS)
    if runner.router.scoring_func != "softmax" or runner.routed_experts.apply_router_weight_on_input:
        raise UsageError("its router", seen="another scoring", expected="softmax, weights on the output")
    gate, mlp = runner.gate, runner.shared_experts._layer
    router = _plain_weight(gate, "router")
    shared_gate = None if mlp.expert_gate is None else _plain_weight(mlp.expert_gate, "shared expert's gate")
    shared = _shared_expert(mlp)
    most = min(tokens_of(experts.spans, EXPERTS[0]), nvfp4_moe.KERNEL_TOKENS)
    weights = experts.weights
    dims = nvfp4_moe.MoeDims(
        hidden=weights.hidden,
        intermediate=weights.intermediate,
        experts=weights.experts,
        top_k=runner.router.top_k,
        shared_intermediate=None if shared is None else shared.intermediate,
    )
    capability = torch.cuda.get_device_capability(router.device) if router.is_cuda else nvfp4_moe.CAPABILITIES[0]
    reason = nvfp4_moe.supports(capability, dims) if most else f"{EXPERTS[0]} does not serve one token"
    if reason:
        raise UsageError("its dimensions or kernels", seen=reason)
    return Block(
        most=most,
        router=router,
        experts=weights,
        top_k=runner.router.top_k,
        renormalize=runner.router.renormalize,
        shared=shared,
        shared_gate=shared_gate if shared is not None else None,
    )


def _plain_weight(layer: Any, what: str) -> torch.Tensor:
    """A BF16 weight without a bias. Raises UsageError for another."""
    import torch

    weight: torch.Tensor = layer.weight.data
    if weight.dtype is not torch.bfloat16 or getattr(layer, "bias", None) is not None or not weight.is_contiguous():
        raise UsageError(f"its {what}", seen=str(weight.dtype), expected="a BF16 weight without a bias")
    return weight


def _shared_expert(mlp: Any) -> ExpertWeights | None:
    """The two layers of a Qwen2MoeMLP as one expert; None where they are not in our linear kernels' form."""
    from qwen_nvfp4_serve.kernels.nvfp4_moe import shared_from_linears

    gate_up, down = _linear(mlp.gate_up_proj, 2), _linear(mlp.down_proj, 1)
    if gate_up is None or down is None:
        _logger().info_once("The shared expert is left to vLLM: it is not in our linear kernels' form")
        return None
    return shared_from_linears(gate_up, down)


def _linear(layer: Any, shards: int) -> LinearWeight | None:
    """The weight of a linear layer that `gpu_nvfp4_linear` adopted, in `shards` equal parts; None for another layer."""
    from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight

    if getattr(layer, "nvfp4_stock_kernel", layer) is not None:
        return None
    rows = layer.weight.shape[0]
    kept = getattr(layer, LINEAR_SCALES, None)
    scales = (layer.weight_global_scale if kept is None else kept).detach().float().flatten().tolist()
    scales = scales * shards if len(scales) == 1 else scales
    if len(scales) != shards:
        return None
    parts = (rows // shards,) * shards
    return LinearWeight(layer.weight.data, layer.weight_scale.data, layer.nvfp4_row_scale, parts, tuple(scales))


def run(runner: Any, x: torch.Tensor) -> torch.Tensor:
    """The block's output for x, bf16 [M, H], before what the cards of a tensor parallel group add up."""
    block = block_of(runner)
    if block is None or not 0 < x.shape[0] <= block.most or runner.router.capture_fn is not None:
        shared, routed = runner._forward_impl(x, x, x, None)
        total: torch.Tensor = shared + routed
        return total
    from qwen_nvfp4_serve.kernels.nvfp4_moe import moe_block

    if block.shared is not None:
        return _ours(block, x, moe_block)
    return _beside_vllms(runner.shared_experts, block, x, moe_block)


def _ours(block: Block, x: torch.Tensor, moe_block: Any) -> torch.Tensor:
    y: torch.Tensor = moe_block(
        x,
        block.router,
        block.experts,
        top_k=block.top_k,
        renormalize=block.renormalize,
        shared=block.shared,
        shared_gate=block.shared_gate,
    )
    return y


def _beside_vllms(shared: Any, block: Block, x: torch.Tensor, moe_block: Any) -> torch.Tensor:
    """Routed experts by us, the shared one by vLLM and where vLLM runs it: on its second stream if it would."""
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

    overlapped = shared.maybe_forward_async(x)
    if not overlapped:
        shared(x, SharedExpertsOrder.NO_OVERLAP)
    routed = _ours(block, x, moe_block)
    if overlapped:
        shared.wait()
    total: torch.Tensor = shared.output + routed
    return total


@functools.cache
def block_op() -> Any:
    """`torch.ops.vllm.qwen_nvfp4_moe_block(hidden_states, layer_name)`, opaque to torch.compile.

    hidden_states: bf16 [M, H]. layer_name: as vLLM's own op for this layer takes it. Returns [M, H].
    """
    import torch
    from vllm.model_executor.layers.fused_moe.runner import moe_runner
    from vllm.utils.torch_utils import direct_register_custom_op

    def qwen_nvfp4_moe_block(hidden_states: torch.Tensor, layer_name: Any) -> torch.Tensor:
        runner = moe_runner.get_layer_from_name(moe_runner._resolve_layer_name(layer_name))
        return run(runner, hidden_states)

    def like_x(hidden_states: torch.Tensor, layer_name: Any) -> torch.Tensor:  # noqa: ARG001
        return torch.empty_like(hidden_states)

    # The schema is read off the annotations, which are strings here.
    types = {"hidden_states": torch.Tensor, "layer_name": moe_runner._layer_name_type, "return": torch.Tensor}
    qwen_nvfp4_moe_block.__annotations__ = types
    if not hasattr(torch.ops.vllm, OP):
        tags = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),)
        direct_register_custom_op(op_name=OP, op_func=qwen_nvfp4_moe_block, fake_impl=like_x, tags=tags)
    return getattr(torch.ops.vllm, OP)


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.qwen_nvfp4_patches")


def _apply() -> None:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock

    op = block_op()
    seams.require_parameters(
        MoERunner._forward_impl, "self", "hidden_states", "router_logits", "shared_experts_input", "input_ids"
    )
    seams.require_parameters(MoERunner._maybe_reduce_final_output, "self", "states", "trunc_size", "output_is_reduced")

    def with_verdict(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *arguments: Any, **named: Any) -> None:
            original(self, *arguments, **named)
            reason = obstacle(self)
            setattr(self, ELIGIBLE, reason is None)
            if reason:
                _logger().info_once("Mixture of experts blocks are left to vLLM: %s", reason)

        return __init__

    def with_our_op(original: Any) -> Any:
        def forward(self: Any, hidden_states: torch.Tensor, already_sequence_parallel: bool = False) -> torch.Tensor:
            if not getattr(self, ELIGIBLE, False):
                result: torch.Tensor = original(self, hidden_states, already_sequence_parallel)
                return result
            runner = self.experts
            tokens = hidden_states.view(-1, hidden_states.shape[-1])
            y = runner._maybe_reduce_final_output(op(tokens, runner._encode_layer_name()), None, False)
            summed: torch.Tensor = y.view(hidden_states.shape)
            return summed

        return forward

    block = Qwen3NextSparseMoeBlock
    seams.replace_function(block, "__init__", with_verdict, ("self", "vllm_config", "prefix", "reduce_results"))
    seams.replace_function(block, "forward", with_our_op, ("self", "hidden_states", "already_sequence_parallel"))


PATCH = Patch(
    name="gpu-nvfp4-moe-block",
    platform=Platform.GPU,
    changes="Qwen3NextSparseMoeBlock.forward calls one op, which runs the whole block in our kernels at few tokens and "
    "vLLM's own code otherwise; only under NVFP4_BACKEND=hybrid",
    why="at decode the block is dozens of launches for weights that the card reads in a few microseconds",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/models/qwen3_next.py",
    remove_when="vLLM runs router, experts and shared expert of a few tokens in a handful of launches",
    needed=gpu_nvfp4_moe._needed,
    apply=_apply,
)
