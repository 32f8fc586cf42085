"""What a plan is asked for, in plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qwen_nvfp4_serve.dims import Dims, StateDtype
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import GpuRow
from qwen_nvfp4_serve.models import ModelRow, Recommendation
from qwen_nvfp4_serve.planner.weights import WeightBytes, weight_bytes

KvDtype = Literal["fp8", "bfloat16"]
GdnPrefill = Literal["triton", "flashinfer"]
Attention = Literal["flashinfer", "flash-attn", "triton", "cpu"]

KV_DTYPES: tuple[KvDtype, ...] = ("fp8", "bfloat16")
GDN_PREFILLS: tuple[GdnPrefill, ...] = ("triton", "flashinfer")
STATE_DTYPES: tuple[StateDtype, ...] = ("float32", "bfloat16")
# A multi-token prediction layer is applied again for each draft token; beyond this nobody has measured a gain.
MAX_SPECULATIVE_TOKENS = 16
_MAX_COUNT = 2**31 - 1  # vLLM holds these counts in 32-bit integers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """The checkpoint as the planner sees it. `weights` is per module class, before tensor parallelism.

    has_mtp: whether tensors of the drafter are there; None while nobody has looked. recommended: settings by card.
    weights_read: False for weights estimated because the checkpoint's shards could not be read.
    """

    name: str
    dims: Dims
    weights: WeightBytes
    has_mtp: bool | None = None
    recommended: tuple[Recommendation, ...] = ()
    weights_read: bool = True

    @classmethod
    def from_row(cls, row: ModelRow, dims: Dims) -> PlanModel:
        """The catalogue's entry, its weights computed from `dims` and the precision it is stored in."""
        return cls(
            name=row.name,
            dims=dims,
            weights=weight_bytes(dims, row.precision),
            has_mtp=row.has_mtp,
            recommended=row.recommended,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked; None means "decide for me".

    context, seqs, batched_tokens: counts. kv_pool_bytes: per card. free_bytes, total_bytes: measured on the host per
    card, None for an idle card of the table. extra_bytes: what an earlier start needed beyond its plan.
    workspace_bytes: memory of our own kernels. utilization: fraction of the card's total that may be used.
    """

    model: PlanModel
    gpu: GpuRow | None = None
    context: int | None = None
    seqs: int | None = None
    batched_tokens: int | None = None
    kv_pool_bytes: int | None = None
    kv_dtype: KvDtype = "fp8"
    prefix_caching: bool = True
    speculative_tokens: int = 0
    tensor_parallel: int = 1
    gdn_prefill: GdnPrefill | None = None
    state_dtype: StateDtype | None = None
    attention: Attention | None = None
    vision: bool = False
    eager: bool = False
    utilization: float | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    extra_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def state(self) -> StateDtype:
        """Precision of the recurrent state: asked for, else the checkpoint's."""
        return self.state_dtype or self.model.dims.state_dtype

    @property
    def prefill(self) -> GdnPrefill:
        """GDN prefill backend: asked for where the card has it, else what vLLM picks there, else Triton."""
        default = default_gdn_prefill(self.gpu, self.model.dims)
        # vLLM falls back to Triton without an error on a card that has no FlashInfer prefill.
        return default if self.gdn_prefill == "flashinfer" and self.gpu is not None else self.gdn_prefill or default

    @property
    def attention_backend(self) -> Attention:
        """Attention backend: asked for, else what vLLM picks on the card, else FlashInfer."""
        return self.attention or default_attention(self.gpu, self.kv_dtype)


def default_gdn_prefill(gpu: GpuRow | None, dims: Dims) -> GdnPrefill:
    """The backend that vLLM 0.33 resolves `auto` to (model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py).

    FlashInfer on compute capability 9.0, and on 10.x and 12.x for key heads of 128; Triton elsewhere.
    """
    if gpu is None:
        return "triton"
    if gpu.capability == (9, 0) or (gpu.capability[0] in (10, 12) and dims.gdn_key_dim == 128):
        return "flashinfer"
    return "triton"


def default_attention(gpu: GpuRow | None, kv_dtype: KvDtype) -> Attention:
    """The backend that vLLM 0.33 picks (platforms/cuda.py): FA3 reads an FP8 cache on SM90 only, Ampere and Ada's FA2
    does not; SM100 prefers FlashInfer; elsewhere a BF16 cache goes to FlashAttention and an FP8 one to FlashInfer.
    """
    if gpu is None:
        return "flashinfer"
    if gpu.capability[0] == 10:
        return "flashinfer"
    return "flash-attn" if kv_dtype == "bfloat16" or gpu.capability[0] == 9 else "flashinfer"


def check_request(request: PlanRequest) -> None:
    """Raises UsageError naming the first value that no engine could be started with."""
    dims = request.model.dims
    _check_range("--context", request.context, 1, dims.max_context)
    _check_range("--seqs", request.seqs, 1, _MAX_COUNT)
    _check_range("--max-num-batched-tokens", request.batched_tokens, 1, _MAX_COUNT)
    _check_range("--speculative-tokens", request.speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
    _check_range("--kv-pool-gib", request.kv_pool_bytes, 1, 2**50)
    _check_tensor_parallel(dims, request.tensor_parallel)
    if request.utilization is not None and not 0 < request.utilization < 1:
        raise UsageError("--gpu-memory-utilization", seen=str(request.utilization), expected="between 0 and 1")
    if request.speculative_tokens and (request.model.has_mtp is False or not dims.mtp_layers):
        raise UsageError(
            "--speculative-tokens",
            seen=f"{request.speculative_tokens} with {request.model.name}, which has no MTP layer (no mtp.* tensors)",
            expected="0 for this checkpoint",
            do="Set speculative tokens to 0, or choose a checkpoint that ships its mtp.* tensors.",
        )


def _check_range(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise UsageError(name, seen=f"{value:,}", expected=f"from {least:,} to {most:,}")


def _check_tensor_parallel(dims: Dims, cards: int) -> None:
    widths = {
        "attention heads": dims.q_heads,
        "GDN key heads": dims.gdn_key_heads,
        "GDN value heads": dims.gdn_value_heads,
        "the MLP width": dims.intermediate,
        "the expert width": dims.expert_intermediate,
        "the shared expert's width": dims.shared_intermediate,
    }
    if not 1 <= cards <= 64:
        raise UsageError("--tensor-parallel", seen=str(cards), expected="from 1 to 64")
    for what, width in widths.items():
        if width % cards:
            seen = f"{cards}, which does not divide {what} ({width:,})"
            raise UsageError("--tensor-parallel", seen=seen, expected="a divisor, such as 1, 2 or 4")
    if max(cards, dims.kv_heads) % min(cards, dims.kv_heads):
        raise UsageError("--tensor-parallel", seen=f"{cards} with {dims.kv_heads} KV heads", expected="1, 2 or 4")
