"""NVFP4 linear layers on a card from one copy of the weights, by the kernels that admission chose for each M.

Only under NVFP4_BACKEND=hybrid. A layer that no admitted kernel serves goes to the kernel that vLLM would have taken.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.backend import nvfp4_backend
from qwen_nvfp4_patches.fused_scales import LINEAR_SCALES
from qwen_nvfp4_patches.patch import Need, Patch, Platform
from qwen_nvfp4_serve.errors import UnsupportedHostError, UsageError

if TYPE_CHECKING:
    import torch

    from qwen_nvfp4_serve.host import Gpu
    from qwen_nvfp4_serve.kernels.admission import Table
    from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight

KERNEL = "QwenNvFp4LinearKernel"
CACHE_PREFIX = "qwen-nvfp4-"


@functools.cache
def kernel_class() -> Any:
    """`QwenNvFp4LinearKernel`, a vLLM NvFp4LinearKernel."""
    import torch
    from vllm.model_executor.kernels.linear import NvFp4LinearKernel

    class QwenNvFp4LinearKernel(NvFp4LinearKernel):  # type: ignore[misc]
        """Reads the checkpoint's packed weight in place; only its block scales are reordered."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            admitted_table()  # the model is being built: no weight is loaded yet

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:  # noqa: ARG003
            reason = unsupported()
            return reason is None, reason

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:  # noqa: ARG003
            # The model's dtype: layers are built under it.
            bf16 = torch.get_default_dtype() is torch.bfloat16
            return (True, None) if bf16 else (False, "serves BF16 activations")

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            try:
                adopt(layer)
                layer.nvfp4_stock_kernel = None
            except UsageError as error:
                _logger().warning_once("%s: left to vLLM's own kernel", str(error))
                weight_only = getattr(layer, "input_global_scale_inv", None) is None
                layer.nvfp4_stock_kernel = stock_kernel(use_a16=weight_only)
                layer.nvfp4_stock_kernel.process_weights_after_loading(layer)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if layer.nvfp4_stock_kernel is not None:
                return layer.nvfp4_stock_kernel.apply_weights(layer=layer, x=x, bias=bias)
            return torch.ops.qwen_nvfp4.admitted_linear(
                x,
                layer.weight,
                layer.weight_scale,
                layer.nvfp4_row_scale,
                layer.nvfp4_shards,
                layer.nvfp4_plan,
                layer.nvfp4_input_scales,
                bias,
            )

    return QwenNvFp4LinearKernel


def unsupported() -> str | None:
    """Why our kernels cannot run in this process, None if they can."""
    from vllm.platforms import current_platform

    from qwen_nvfp4_serve.kernels import build
    from qwen_nvfp4_serve.kernels.nvfp4_linear import CAPABILITIES

    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if found is None or (found.major, found.minor) not in CAPABILITIES:
        seen = f"{found.major}.{found.minor}" if found else "no CUDA card"
        return f"compute capability {seen} is not among those compiled"
    return (
        None
        if build.find(build.NVFP4_LINEAR)
        else "kernel library nvfp4_linear is not built: run scripts/build-kernels"
    )


def shards_of(layer: torch.nn.Module) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Rows and global multiplier of each shard of a fused layer on this card, neighbours of one scale together.

    Reads `nvfp4_shard_scales`, put aside before vLLM collapsed them, or vLLM's own scalar where a layer has but one.
    """
    kept = getattr(layer, LINEAR_SCALES, None)
    scales = (layer.weight_global_scale if kept is None else kept).detach().float().flatten().tolist()
    widths = [int(width) for width in getattr(layer, "logical_widths", None) or (layer.weight.shape[0],)]
    if len(scales) == 1:
        scales = scales * len(widths)
    if len(scales) != len(widths):
        raise UsageError("global scales of an NVFP4 layer", seen=f"{len(scales)} for {len(widths)} shards")
    merged: list[tuple[int, float]] = []
    for width, scale in zip(widths, scales, strict=True):
        before = merged.pop()[0] if merged and merged[-1][1] == scale else 0
        merged.append((before + width, scale))
    return tuple(width for width, _ in merged), tuple(scale for _, scale in merged)


def adopt(layer: torch.nn.Module) -> None:
    """Puts on the layer what the op takes. Raises UsageError, its weights untouched, if no admitted kernel serves."""
    import torch
    from vllm.model_executor.utils import replace_parameter

    from qwen_nvfp4_serve.kernels.admission import CANDIDATES, EXACT, Shape, dispatch, serving
    from qwen_nvfp4_serve.kernels.nvfp4_linear import prepare_weight

    rows, scales = shards_of(layer)
    shape = Shape(layer.weight.shape[0], layer.weight.shape[1] * 2)
    divisor, alpha = getattr(layer, "input_global_scale_inv", None), getattr(layer, "alpha", None)
    w4a4 = divisor is not None and alpha is not None
    spans = serving(admitted_table(), shape, CANDIDATES if w4a4 and len(scales) == 1 else EXACT)
    if not spans:
        raise UsageError(f"an NVFP4 layer of {shape}", seen="no admitted kernels for every number of tokens")
    weight: LinearWeight = prepare_weight(layer.weight.data, layer.weight_scale.data, rows, scales)
    layer.nvfp4_shards, layer.nvfp4_plan = dispatch.shard_tensor(weight), dispatch.plan_tensor(spans)
    # Nothing may fail from here on: the other kernel would swizzle what is swizzled.
    replace_parameter(layer, "weight_scale", weight.scales)
    layer.register_buffer("nvfp4_row_scale", weight.row_scale, persistent=False)
    layer.nvfp4_input_scales = None
    if divisor is not None and alpha is not None:
        layer.nvfp4_input_scales = torch.stack([divisor.data.reshape(()), alpha.data.reshape(())]).float()
    if layer.weight.is_cuda:
        torch.cuda.current_stream().synchronize()  # the kernel may read weights before the work ahead of it ends
        dispatch.warm_up(spans, weight)


def stock_kernel(*, use_a16: bool) -> Any:
    """The kernel that vLLM takes without us."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    possible = linear._POSSIBLE_NVFP4_KERNELS
    ours_first = possible[PlatformEnum.CUDA]
    choose = linear.init_nvfp4_linear_kernel
    try:
        possible[PlatformEnum.CUDA] = [kernel for kernel in ours_first if kernel.__name__ != KERNEL]
        return seams.stock_of(choose)(use_a16=use_a16)
    finally:
        possible[PlatformEnum.CUDA] = ours_first


@functools.cache
def admitted_table() -> Table:
    """Who serves what on this worker's card, for the model that vLLM is building; logged once."""
    from vllm.config import get_current_vllm_config

    from qwen_nvfp4_serve.dims import dims_from_config
    from qwen_nvfp4_serve.kernels.admission import admit
    from qwen_nvfp4_serve.kernels.admission.shapes import linear_shapes

    config = get_current_vllm_config()
    dims = dims_from_config(config.model_config.hf_config.to_dict())
    shapes = linear_shapes(dims, config.parallel_config.tensor_parallel_size)
    card, device = this_card()
    table = admit(shapes, card=card, device=device)
    log_table("linear", card.name, table)
    return table


def this_card() -> tuple[Gpu, str]:
    """The card of this process, and its name in torch."""
    import torch

    from qwen_nvfp4_serve.host import Gpu, detect_gpus

    index = torch.cuda.current_device()
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    unknown = Gpu(name=name, capability=capability, memory_bytes=None, free_bytes=None, driver=None)
    seen = detect_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return next((gpu for gpu in seen if gpu.name == name), unknown), f"cuda:{index}"


def log_table(kind: str, card: str, table: Table) -> None:
    """A line for each shape of a table, once an admission."""
    from qwen_nvfp4_serve.kernels.admission import summary

    _logger().info("NVFP4 %s kernels on %s, found in %.1f s:", kind, card, table.took_s)
    for line in summary(table):
        _logger().info("  %s", line)


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.qwen_nvfp4_patches")


def own_cache_root(root: str) -> str:
    """A folder of our own inside vLLM's cache root, named by our sources.

    vLLM's compiled graphs are found by its configuration, which does not tell its kernels from ours: a graph compiled
    for the one would be loaded for the other.
    """
    from qwen_nvfp4_serve.kernels.admission import store

    name = f"{CACHE_PREFIX}{store.source_digest(*sorted(Path(__file__).parent.glob('gpu_*.py')))}"
    return root if Path(root).name == name else str(Path(root) / name)


def _needed() -> Need:
    if nvfp4_backend() != "hybrid":
        return Need(False, f"NVFP4_BACKEND is {nvfp4_backend()}, which leaves the choice to vLLM")
    return Need(True, "NVFP4_BACKEND is hybrid")


def _apply() -> None:
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearLayerConfig
    from vllm.platforms import PlatformEnum

    reason = unsupported()
    if reason:
        raise UnsupportedHostError("NVFP4_BACKEND=hybrid", seen=reason, do="Set NVFP4_BACKEND=auto to let vLLM choose.")
    os.environ["VLLM_CACHE_ROOT"] = own_cache_root(envs.VLLM_CACHE_ROOT)
    kernel = kernel_class()
    seams.add_once(linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA], kernel, first=True)

    def with_weight_only(original: Any) -> Any:
        # Weight-only layers never reach the registry: their candidates are written into this function.
        def init_nvfp4_linear_kernel(use_a16: bool = False) -> Any:
            config = NvFp4LinearLayerConfig()
            ours = use_a16 and _free_to_choose() and kernel.can_implement(config)[0]
            if not ours:
                return original(use_a16=use_a16)
            _logger().info_once("Using %s for NVFP4 GEMM", KERNEL)
            return kernel(config)

        return init_nvfp4_linear_kernel

    seams.replace_function(linear, "init_nvfp4_linear_kernel", with_weight_only, parameters=("use_a16",))


def _free_to_choose() -> bool:
    """False where vLLM was told which kernel to take for weight-only layers, as its own selection would see it."""
    from vllm import envs
    from vllm.model_executor.kernels import linear

    told = linear._get_linear_backend(quantization="nvfp4_w4a16") != "auto"
    return not (envs.VLLM_BATCH_INVARIANT or told or KERNEL in envs.VLLM_DISABLED_KERNELS)


PATCH = Patch(
    name="gpu-nvfp4-linear",
    platform=Platform.GPU,
    changes="puts QwenNvFp4LinearKernel first among the NVFP4 linear kernels for CUDA, and answers "
    "init_nvfp4_linear_kernel(use_a16=True); only under NVFP4_BACKEND=hybrid",
    why="each of vLLM's kernels keeps its own copy of the weights and is good at few tokens or at many, not both",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/kernels/linear/__init__.py",
    remove_when="vLLM chooses between kernels of one weight layout by the number of tokens",
    needed=_needed,
    apply=_apply,
)
