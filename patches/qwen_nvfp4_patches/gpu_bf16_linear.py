"""Linear layers that a checkpoint leaves in BF16, by the kernel that admission chose for each M.

Only under NVFP4_BACKEND=hybrid. vLLM asks one function what multiplies such layers, the head's too; it answers with an
op that looks at the number of tokens when it runs and is vLLM's own product wherever ours was not found faster.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import gpu_nvfp4_linear, seams
from qwen_nvfp4_patches.backend import nvfp4_backend
from qwen_nvfp4_patches.patch import Need, Patch, Platform
from qwen_nvfp4_serve.errors import UsageError

if TYPE_CHECKING:
    import torch

OURS = "qwen_nvfp4_admitted"


@functools.cache
def follow_admission() -> None:
    """Finds who serves the layers of the model that vLLM is building, and has the op follow it; logged once.

    A model of another family or dtype has no plan: its layers stay with vLLM's product, as do all if vLLM was told one.
    """
    import torch
    from vllm.config import get_current_vllm_config

    from qwen_nvfp4_serve.dims import dims_from_config
    from qwen_nvfp4_serve.kernels.admission import BF16, BF16_SPEC, admit, bf16
    from qwen_nvfp4_serve.kernels.admission.shapes import bf16_shapes

    config = get_current_vllm_config()
    if config.model_config.dtype is not torch.bfloat16 or config.kernel_config.linear_backend != "auto":
        return
    try:
        dims = dims_from_config(config.model_config.hf_config.to_dict())
    except UsageError as error:
        gpu_nvfp4_linear._logger().info("BF16 layers are left to vLLM: %s", error)
        return
    shapes = bf16_shapes(dims, config.parallel_config.tensor_parallel_size)
    card, device = gpu_nvfp4_linear.this_card()
    table = admit(shapes, card=card, device=device, names=BF16, spec=BF16_SPEC)
    gpu_nvfp4_linear.log_table("BF16 linear", card.name, table)
    bf16.follow(table, shapes)


def admitted_gemm(stock: Any) -> Any:
    """What vLLM calls for x W^T + bias: `stock` for what is not a matrix in BF16; the rest is decided when it runs."""
    import torch

    def gemm(
        layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight.dtype is not torch.bfloat16 or x.dtype is not torch.bfloat16 or weight.dim() != 2:
            return stock(layer, x, weight, bias)
        result: torch.Tensor = torch.ops.qwen_nvfp4.bf16_linear(x, weight, bias)
        return result

    setattr(gemm, OURS, True)
    return gemm


def is_ours(gemm: Any) -> bool:
    """True for what `admitted_gemm` made."""
    return getattr(gemm, OURS, False) is True


def _building() -> bool:
    """True while vLLM builds a model: this function is asked in other places too."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.model_config is not None


def _needed() -> Need:
    if nvfp4_backend() != "hybrid":
        return Need(False, f"NVFP4_BACKEND is {nvfp4_backend()}, which leaves the choice to vLLM")
    return Need(True, "NVFP4_BACKEND is hybrid")


def _apply() -> None:
    from vllm.model_executor.layers import utils

    from qwen_nvfp4_serve.kernels.admission import bf16

    assert bf16.op is not None  # its import is what registers the op

    gemm, free = admitted_gemm(utils.default_unquantized_gemm), gpu_nvfp4_linear.unsupported() is None

    def with_ours(original: Any) -> Any:
        def dispatch_unquantized_gemm(linear_backend: str = "auto") -> Any:
            found = original(linear_backend)
            # Asked again in every step, for the head: nothing slow belongs here.
            if found is not utils.default_unquantized_gemm or not free or linear_backend != "auto":
                return found  # another platform's, or what vLLM was told to take
            if _building():
                follow_admission()
            return gemm

        return dispatch_unquantized_gemm

    seams.require_parameters(utils.default_unquantized_gemm, "layer", "x", "weight", "bias")
    seams.replace_function(utils, "dispatch_unquantized_gemm", with_ours, parameters=("linear_backend",))


PATCH = Patch(
    name="gpu-bf16-linear",
    platform=Platform.GPU,
    changes="dispatch_unquantized_gemm answers with an op that serves BF16 layers by the kernel admitted for the "
    "number of tokens; only under NVFP4_BACKEND=hybrid",
    why="projections that a checkpoint leaves in BF16 are most of a decode step's bytes, and the vendor's GEMM reads "
    "the smaller ones far below the card's bandwidth",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/utils.py",
    remove_when="vLLM's BF16 GEMMs of few tokens read weights as fast as the card can",
    needed=_needed,
    apply=_apply,
)
