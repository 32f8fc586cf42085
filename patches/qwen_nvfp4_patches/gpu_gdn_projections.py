"""A delta net layer's two projections of its input as one product, where a checkpoint leaves both in BF16.

Only under NVFP4_BACKEND=hybrid. Their weights lie behind each other in memory and one op reads both. vLLM's forward is
handed that product in place of the layer's input, of which it needs nothing else, and each of its two layers returns
its own columns of it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import gpu_bf16_linear, seams
from qwen_nvfp4_patches.patch import Patch, Platform

if TYPE_CHECKING:
    import torch

TOGETHER = "qwen_nvfp4_projected_together"
ALIGNED_ROWS = 8  # 16 bytes in BF16


def obstacle(layer: Any, vllm_config: Any) -> str | None:
    """Why a delta net layer's projections stay two products, or None. For a layer that was just built."""
    from vllm import envs

    both = layer.in_proj_qkvz, layer.in_proj_ba
    found = {
        "vLLM multiplies so that no token depends on the batch": envs.VLLM_BATCH_INVARIANT,
        "adapters change each of them": vllm_config.lora_config is not None,
        "weights are offloaded one by one": _offloads(vllm_config.offload_config),
        "vLLM's kernel for draft tokens takes them apart": layer.enable_fused_gdn_spec_decode,
        "not both are in BF16": not all(_in_bf16(projection) for projection in both),
    }
    return next((words for words, holds in found.items() if holds), None) or _misfit(*both)


def _offloads(config: Any) -> bool:
    """True if vLLM moves weights to the host, which would leave half of their memory on the card."""
    told = config.offload_backend != "auto"
    return bool(told or config.uva.cpu_offload_gb or config.prefetch.offload_group_size)


def _in_bf16(projection: Any) -> bool:
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    return type(projection.quant_method) is UnquantizedLinearMethod and projection.weight.dtype is torch.bfloat16


def _misfit(first: Any, second: Any) -> str | None:
    """Why two layers in BF16 cannot be one product."""
    for projection in (first, second):
        if projection.bias is not None or not gpu_bf16_linear.is_ours(projection.quant_method._gemm_impl):
            return "they have a bias, or vLLM was told what multiplies them"
    (rows, columns), (more, of_other) = first.weight.shape, second.weight.shape
    # A product as wide as the input could not be told from it, and rows that are not whole 16 bytes are slow to write.
    if columns != of_other or columns == rows + more or (rows + more) % ALIGNED_ROWS:
        return f"weights of [{rows}, {columns}] and [{more}, {of_other}]"
    return None


@functools.cache
def columns_method() -> Any:
    """vLLM's linear method for a layer whose product may have been taken already, together with another's."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class ColumnsOfProduct(UnquantizedLinearMethod):  # type: ignore[misc]
        """Of x [M, `width`] the layer's own columns, from `first`; another x is activations, multiplied as usual."""

        def __init__(self, method: Any, *, first: int, width: int) -> None:
            self._gemm_impl = method._gemm_impl
            self.first, self.width = first, width

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if x.shape[-1] == self.width:
                return x.narrow(-1, self.first, layer.weight.shape[0])
            y: torch.Tensor = super().apply(layer, x, bias)
            return y

    return ColumnsOfProduct


def put_together(layer: Any) -> None:
    """Gives both weights one memory, before they are loaded, and has both layers return columns of one product."""
    both = layer.in_proj_qkvz, layer.in_proj_ba
    rows, columns = [projection.weight.shape[0] for projection in both], both[0].weight.shape[1]
    for projection in both:
        projection.weight.data = projection.weight.data.new_empty(0)  # or the card would hold them twice for a moment
    memory = both[0].weight.data.new_empty(sum(rows), columns)
    for projection, part, first in zip(both, memory.split(rows), (0, rows[0]), strict=True):
        projection.weight.data = part
        projection.quant_method = columns_method()(projection.quant_method, first=first, width=sum(rows))


def with_one_weight(stock: Any) -> Any:
    """vLLM's constructor, and both projections put together if nothing is in the way; said once."""

    @functools.wraps(stock)
    def __init__(self: Any, config: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        stock(self, config, vllm_config, *arguments, **named)
        reason = obstacle(self, vllm_config)
        setattr(self, TOGETHER, reason is None)
        if reason is None:
            put_together(self)
        else:
            _logger().info_once("Delta net layers project their input in two products: %s", reason)

    return __init__


def projected_once(stock: Any) -> Any:
    """vLLM's forward on what one product gives for both projections."""
    import torch

    def forward_cuda(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        if getattr(self, TOGETHER, False):
            x = torch.ops.qwen_nvfp4.bf16_linear_of_two(x, self.in_proj_qkvz.weight, self.in_proj_ba.weight)
        y: torch.Tensor = stock(self, x)
        return y

    return forward_cuda


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.qwen_nvfp4_patches")


def _apply() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    from qwen_nvfp4_serve.kernels.admission import bf16

    assert bf16.op_of_two is not None  # its import is what registers the op

    seams.require_parameters(UnquantizedLinearMethod.apply, "self", "layer", "x", "bias")
    seams.replace_function(
        QwenGatedDeltaNetAttention,
        "__init__",
        with_one_weight,
        parameters=("self", "config", "vllm_config", "prefix", "gqa_interleaved_layout", "reduce_results"),
    )
    seams.replace_function(
        QwenGatedDeltaNetAttention, "forward_cuda", projected_once, parameters=("self", "hidden_states")
    )


PATCH = Patch(
    name="gpu-gdn-projections",
    platform=Platform.GPU,
    changes="in_proj_qkvz and in_proj_ba of a delta net layer lie in one memory and are one product, of which each "
    "layer returns its columns, where both are in BF16; only under NVFP4_BACKEND=hybrid",
    why="the second is a launch of 4 us in each delta net layer for a weight that the card reads in a quarter of one",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",
    remove_when="vLLM projects a delta net layer's input in one product",
    needed=gpu_bf16_linear._needed,
    apply=_apply,
)
