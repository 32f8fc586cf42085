"""vLLM's own way through the block, to be measured against: its top-k, its Marlin kernels. Never used to serve.

Imported only where vLLM 0.33 and a card are.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from qwen_nvfp4_serve.kernels.nvfp4 import unswizzle_scales
from qwen_nvfp4_serve.kernels.nvfp4_linear.marlin import E2M1_TYPE_ID, MarlinWeight
from qwen_nvfp4_serve.kernels.nvfp4_moe.check import Block
from qwen_nvfp4_serve.kernels.nvfp4_moe.weights import ExpertWeights

BLOCKS_PER_PROCESSOR = 4  # vLLM 0.33 marlin_utils.MARLIN_MAX_BLOCKS_PER_SM


def load_ops() -> None:
    """Registers `torch.ops._C` and `torch.ops._moe_C`. Raises ImportError without vLLM."""
    import vllm._custom_ops  # noqa: F401


def version() -> str:
    """vLLM's."""
    import vllm

    return str(vllm.__version__)


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids that vLLM elects. logits: bf16 [M, E]."""
    shape = (logits.shape[0], k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids, places = (torch.empty(shape, dtype=torch.int32, device=logits.device) for _ in range(2))
    torch.ops._moe_C.topk_softmax(weights, ids, places, logits, True, None, None)
    return weights, ids


@dataclass(frozen=True, slots=True, kw_only=True)
class StockExperts:
    """Routed experts in Marlin's layout, as vLLM's converter makes it. Gate's global scale stands for up's too."""

    tensors: tuple[torch.Tensor, ...]
    workspace: torch.Tensor

    @classmethod
    def of(cls, weights: ExpertWeights) -> StockExperts:
        """A repacked copy of our weights."""
        from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

        hidden, size = weights.hidden, weights.intermediate
        layer: Any = SimpleNamespace(
            num_experts=weights.experts,
            hidden_size=hidden,
            intermediate_size_per_partition=size,
            params_dtype=torch.bfloat16,
        )
        tensors = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(
            layer,
            weights.w13,
            unswizzle_scales(weights.w13_scales, 2 * size, hidden // 16),
            weights.gate_scale,
            weights.w2,
            unswizzle_scales(weights.w2_scales, hidden, size // 16),
            weights.down_scale,
            True,
        )
        return cls(
            tensors=tensors, workspace=marlin_utils.marlin_make_workspace_new(weights.w13.device, BLOCKS_PER_PROCESSOR)
        )

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """What vLLM's MarlinExperts compute."""
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe

        w13, w13_scale, w13_global, w2, w2_scale, w2_global = self.tensors

        def add_up(pairs: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
            torch.ops._moe_C.moe_sum(pairs, y, None, None)
            return y

        result: torch.Tensor = fused_marlin_moe(
            x,
            w13,
            w2,
            None,
            None,
            w13_scale,
            w2_scale,
            share,
            ids,
            quant_type_id=E2M1_TYPE_ID,
            global_scale1=w13_global,
            global_scale2=w2_global,
            workspace=self.workspace,
            moe_sum=add_up,
        )
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class StockBlock:
    """The block as vLLM's Qwen3NextSparseMoeBlock runs it, kernel by kernel, on one stream."""

    experts: StockExperts
    router: torch.Tensor
    gate_up: MarlinWeight
    down: MarlinWeight
    shared_gate: torch.Tensor
    k: int

    @classmethod
    def of(cls, block: Block, experts: StockExperts) -> StockBlock:
        """experts: made of this block's or of one like it. Raises ValueError for a block without a shared expert."""
        if block.shared is None or block.shared_gate is None:
            raise ValueError("a block without a shared expert")
        shared = block.shared
        return cls(
            experts=experts,
            router=block.router,
            gate_up=MarlinWeight.pack(shared.w13[0], shared.w13_scales[0], float(shared.gate_scale[0])),
            down=MarlinWeight.pack(shared.w2[0], shared.w2_scales[0], float(shared.down_scale[0])),
            shared_gate=block.shared_gate.unsqueeze(0),
            k=block.dims.top_k,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """y, bf16 [M, H]."""
        share, ids = top_k(torch.nn.functional.linear(x, self.router), self.k)
        routed = self.experts(x, ids, share)
        both = self.gate_up(x)
        middle = torch.empty(x.shape[0], both.shape[1] // 2, dtype=x.dtype, device=x.device)
        torch.ops._C.silu_and_mul(middle, both)
        gate = torch.sigmoid(torch.nn.functional.linear(x, self.shared_gate))
        return routed + gate * self.down(middle)
