"""Whether CPU runs quantize activations as the checkpoint declares, and the rounding that does it."""

from __future__ import annotations

import enum
import functools
import os
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_serve.errors import UsageError

if TYPE_CHECKING:
    import torch

VARIABLE = "QWEN_NVFP4_CPU_ACTIVATIONS"


class CpuActivations(enum.Enum):
    """WEIGHTS_ONLY keeps activations in BF16. W4A4 rounds them to NVFP4 or FP8 where the checkpoint says so."""

    WEIGHTS_ONLY = "weights-only"
    W4A4 = "w4a4"


def cpu_activations() -> CpuActivations:
    """The setting of this process, weights-only when unset. Raises UsageError for an unknown value."""
    text = os.environ.get(VARIABLE) or CpuActivations.WEIGHTS_ONLY.value
    try:
        return CpuActivations(text)
    except ValueError:
        known = " or ".join(value.value for value in CpuActivations)
        raise UsageError(VARIABLE, seen=text, expected=known) from None


@functools.cache
def rounding_op() -> Any:
    """The operator `qwen_nvfp4::round_to_nvfp4(x, global_scale) -> x'`, opaque to torch.compile.

    x: floating [..., K], K a multiple of 16. global_scale: float32 multiplier, shape (). x' has x's shape and dtype and
    only values that NVFP4 with that scale can hold: what a W4A4 kernel would compute with.
    """
    import torch

    from qwen_nvfp4_serve.kernels import ops
    from qwen_nvfp4_serve.kernels.nvfp4 import quantize_nvfp4

    def round_to_nvfp4(x: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return quantize_nvfp4(rows, global_scale.reshape(())).dequantize(x.dtype).reshape(x.shape)

    def like_x(x: torch.Tensor, _global_scale: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    # The annotations are strings here, so the schema is given in words.
    schema = "(Tensor x, Tensor global_scale) -> Tensor"
    return ops.register("round_to_nvfp4", schema, round_to_nvfp4, like_x)
