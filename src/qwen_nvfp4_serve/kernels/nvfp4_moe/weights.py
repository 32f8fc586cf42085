"""The experts of a mixture-of-experts block as the kernels read them, and how checkpoint tensors become that."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels.nvfp4 import swizzle_scales, swizzled_scale_shape
from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeDims:
    """Dimensions of a block as one card holds it (a tensor parallel shard has its own share of both intermediates).

    hidden: H. intermediate: I of a routed expert. experts: E. top_k: experts a token is sent to.
    shared_intermediate: that of the shared expert, None where there is none.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared_intermediate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """E experts of hidden size H and intermediate size I. The shared expert is E = 1. All on one device, contiguous.

    w13: uint8 [E, 2I, H/2], gate rows before up rows, codes packed as in `kernels.nvfp4`.
    w13_scales: float8_e4m3fn [E, 2I', H/16'] in 128x4 order, expert by expert (' = padded to multiples of 128 and 4).
    w2: uint8 [E, H, I/2]. w2_scales: float8_e4m3fn [E, H', I/16'] in 128x4 order, expert by expert.
    gate_scale, up_scale, down_scale: float32 [E], the global multipliers.
    """

    w13: torch.Tensor
    w13_scales: torch.Tensor
    w2: torch.Tensor
    w2_scales: torch.Tensor
    gate_scale: torch.Tensor
    up_scale: torch.Tensor
    down_scale: torch.Tensor

    @property
    def experts(self) -> int:
        """E."""
        return int(self.w13.shape[0])

    @property
    def hidden(self) -> int:
        """H."""
        return int(self.w2.shape[1])

    @property
    def intermediate(self) -> int:
        """I."""
        return int(self.w13.shape[1]) // 2

    def tensors(self) -> list[torch.Tensor]:
        """The seven tensors in the order of the fields, as the ops take them."""
        return [
            self.w13,
            self.w13_scales,
            self.w2,
            self.w2_scales,
            self.gate_scale,
            self.up_scale,
            self.down_scale,
        ]

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> ExpertWeights:
        """The inverse of `tensors`."""
        w13, w13_scales, w2, w2_scales, gate, up, down = tensors
        return cls(
            w13=w13,
            w13_scales=w13_scales,
            w2=w2,
            w2_scales=w2_scales,
            gate_scale=gate,
            up_scale=up,
            down_scale=down,
        )

    def problem(self) -> str | None:
        """Why these tensors are not what the fields say, or None."""
        experts, rows, half_hidden = self.w13.shape
        hidden, intermediate = half_hidden * 2, rows // 2
        scales, of_experts = torch.float8_e4m3fn, (experts,)
        wanted = (
            ("w13", self.w13, torch.uint8, (experts, 2 * intermediate, half_hidden)),
            ("w2", self.w2, torch.uint8, (experts, hidden, intermediate // 2)),
            ("w13_scales", self.w13_scales, scales, (experts, *swizzled_scale_shape(rows, hidden // 16))),
            ("w2_scales", self.w2_scales, scales, (experts, *swizzled_scale_shape(hidden, intermediate // 16))),
            ("gate_scale", self.gate_scale, torch.float32, of_experts),
            ("up_scale", self.up_scale, torch.float32, of_experts),
            ("down_scale", self.down_scale, torch.float32, of_experts),
        )
        for name, tensor, dtype, shape in wanted:
            if tensor.dtype is not dtype or tensor.shape != shape:
                return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
            if not tensor.is_contiguous():
                return f"{name} is not contiguous"
        return None


def prepare_experts(
    *,
    w13: torch.Tensor,
    w13_block_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_block_scale: torch.Tensor,
    gate_scale: torch.Tensor,
    up_scale: torch.Tensor,
    down_scale: torch.Tensor,
) -> ExpertWeights:
    """Checkpoint tensors as the kernels take them; nothing is copied but the scales, which are brought to 128x4 order.

    w13: uint8 [E, 2I, H/2], gate rows first. w13_block_scale: float8_e4m3fn [E, 2I, H/16], not swizzled.
    w2: uint8 [E, H, I/2]. w2_block_scale: float8_e4m3fn [E, H, I/16], not swizzled.
    gate_scale, up_scale, down_scale: [E] multipliers (`global_scale_from_divisor` for compressed-tensors,
    `global_scale_from_modelopt` for ModelOpt); gate and up may differ. Raises UsageError where these do not fit.
    """
    weights = ExpertWeights(
        w13=w13,
        w13_scales=swizzle_scales(w13_block_scale),
        w2=w2,
        w2_scales=swizzle_scales(w2_block_scale),
        gate_scale=gate_scale.float().contiguous(),
        up_scale=up_scale.float().contiguous(),
        down_scale=down_scale.float().contiguous(),
    )
    return _checked(weights)


def shared_from_linears(gate_up: LinearWeight, down: LinearWeight) -> ExpertWeights:
    """A shared expert out of the two linear layers that hold it, as views: E = 1.

    gate_up: [2I, H] with two shards of I rows. down: [H, I] with one shard. Raises UsageError where these do not fit.
    """
    if len(gate_up.shard_scales) != 2 or len(set(gate_up.shard_rows)) != 1 or len(down.shard_scales) != 1:
        raise UsageError(
            "the shared expert's layers",
            seen=f"shards {gate_up.shard_rows} and {down.shard_rows}",
            expected="two equal ones and one",
        )
    device = gate_up.packed.device
    gate, up, down_scale = (
        torch.tensor([scale], dtype=torch.float32, device=device)
        for scale in (*gate_up.shard_scales, *down.shard_scales)
    )
    weights = ExpertWeights(
        w13=gate_up.packed.unsqueeze(0),
        w13_scales=gate_up.scales.unsqueeze(0),
        w2=down.packed.unsqueeze(0),
        w2_scales=down.scales.unsqueeze(0),
        gate_scale=gate,
        up_scale=up,
        down_scale=down_scale,
    )
    return _checked(weights)


def _checked(weights: ExpertWeights) -> ExpertWeights:
    problem = weights.problem()
    if problem is not None:
        raise UsageError("expert weights", seen=problem)
    return weights
