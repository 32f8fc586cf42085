"""NVFP4 experts on a card from one copy of the weights, by the kernels that admission chose for each M.

Only under NVFP4_BACKEND=hybrid. vLLM's choice of a backend walks a list in which W4A4 checkpoints never reach one that
leaves activations alone, so the choice itself is replaced: where ours can serve, it answers MARLIN, the one backend
whose configuration quantizes no activations, with our class; else it answers what it would have. MARLIN's conversion
would repack the weights, so the conversion of our layers is ours: the packed weights stay, the scales are reordered.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import gpu_nvfp4_linear, seams
from qwen_nvfp4_patches.backend import nvfp4_backend
from qwen_nvfp4_patches.fused_scales import EXPERT_SCALES
from qwen_nvfp4_patches.patch import Need, Patch, Platform
from qwen_nvfp4_serve.errors import UnsupportedHostError

if TYPE_CHECKING:
    import torch

    from qwen_nvfp4_serve.kernels.admission import Shape, Span, Table
    from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights

EXPERTS = "QwenNvFp4Experts"
# Whose loading ends with the step in which our class takes the weights (not quark's), by the names of their configs.
FORMATS = ("compressed-tensors", "modelopt")
SELECT = ("config", "weight_key", "activation_key")
CONVERT = (
    "nvfp4_backend", "layer", "w13", "w13_scale", "w13_scale_2", "a13_scale", "w2", "w2_scale", "w2_scale_2",
    "a2_scale", "is_act_and_mul", "use_a16", "trtllm_hidden_alignment",
)  # fmt: skip


@functools.cache
def experts_class() -> Any:
    """`QwenNvFp4Experts`, a vLLM FusedMoEExpertsModular."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static

    class QwenNvFp4Experts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
        """Reads the checkpoint's packed weights in place, whatever the number of tokens."""

        weights: ExpertWeights
        spans: tuple[Span, ...]
        input_scales: torch.Tensor | None

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device() -> bool:
            return unsupported() is None

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return False

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return bool(weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic))

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return bool(activation == MoEActivation.SILU)

        @staticmethod
        def _supports_parallel_config(moe_parallel_config: Any) -> bool:
            # What is left is tensor parallelism, whose cards each hold a part of every expert.
            several = moe_parallel_config.dp_size > 1 or moe_parallel_config.pcp_size > 1
            parts = moe_parallel_config.use_ep or moe_parallel_config.enable_eplb
            return not (several or parts or moe_parallel_config.is_sequence_parallel)

        def supports_expert_map(self) -> bool:
            return False

        @property
        def expects_unquantized_inputs(self) -> bool:
            return True

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def workspace_shapes(
            self,
            M: int,
            N: int,  # noqa: ARG002
            K: int,
            *_: Any,
            **__: Any,
        ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
            return (1,), (0,), (M, K)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            self.weights, self.input_scales = adopt(layer), layer.nvfp4_input_scales
            self.spans = spans_for(self.moe_config, rounds=self.input_scales is not None)
            if layer.w13_weight.is_cuda:
                make_ready(self.spans, self.weights, self.moe_config.experts_per_token, self.input_scales)

        def apply(  # noqa: PLR0917 - vLLM's signature
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,  # noqa: ARG002
            w2: torch.Tensor,  # noqa: ARG002
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            *_: Any,
            apply_router_weight_on_input: bool = False,
            **__: Any,
        ) -> None:
            from qwen_nvfp4_serve.kernels.admission import experts

            call = experts.ExpertsCall(
                x=hidden_states,
                weights=self.weights,
                ids=topk_ids,
                # The router's weights are on the input already where vLLM says so.
                shares=topk_weights.new_ones(topk_weights.shape) if apply_router_weight_on_input else topk_weights,
                y=output,
                input_scales=self.input_scales,
            )
            experts.run(self.spans, call)

    return QwenNvFp4Experts


def unsupported() -> str | None:
    """Why our kernels cannot run in this process, None if they can."""
    from qwen_nvfp4_serve.kernels import build

    reason = gpu_nvfp4_linear.unsupported()
    missing = build.find(build.NVFP4_MOE) is None
    return reason or ("kernel library nvfp4_moe is not built: run scripts/build-kernels" if missing else None)


def refusal(config: Any, weight_key: Any, activation_key: Any) -> str | None:
    """Why experts of this vLLM FusedMoEConfig and scheme are left to vLLM, None where ours take them."""
    import torch
    from vllm import envs
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat

    ours = experts_class()
    able, reason = ours.is_supported_config(ours, config, weight_key, activation_key, FusedMoEActivationFormat.Standard)
    form = get_current_vllm_config().quant_config.get_name()
    told = {
        f"the checkpoint's format is {form}": not form.startswith(FORMATS),
        f"moe_backend is {config.moe_backend}": config.moe_backend != "auto",
        "VLLM_DISABLED_KERNELS names it": EXPERTS in envs.VLLM_DISABLED_KERNELS,
        reason or "": not able,
        f"activations are {config.in_dtype}": config.in_dtype is not torch.bfloat16,
        "SwiGLU has parameters": any(
            getattr(config, name) is not None for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
        ),
        "experts have a bias": config.has_bias,
        "not every expert is on this card": config.num_local_experts != config.num_experts,
    }
    found = next((words for words, holds in told.items() if holds), None)
    if found:
        return found
    able = spans_for(config, rounds=activation_key is not None)
    return None if able else f"no admitted kernels for {shape_of(config)} at every M"


def shape_of(config: Any) -> Shape:
    """The experts of a vLLM FusedMoEConfig as this card holds them."""
    from qwen_nvfp4_serve.kernels.admission import Shape

    rows = 2 * config.intermediate_size_per_partition
    return Shape(rows, config.hidden_dim, config.num_local_experts, config.experts_per_token)


def spans_for(config: Any, *, rounds: bool) -> tuple[Span, ...]:
    """Who serves how many tokens of these experts; empty where that is vLLM.

    rounds: the checkpoint quantizes activations, so that kernels which do it too may serve.
    """
    from qwen_nvfp4_serve.kernels import admission

    # A library that may compile for minutes is not asked where it could not serve.
    shape, names = shape_of(config), admission.EXPERTS if rounds else admission.EXACT_EXPERTS
    return admission.serving(admitted_experts(shape, names), shape)


@functools.cache
def admitted_experts(shape: Shape, names: tuple[str, ...]) -> Table:
    """What admission found of the candidates `names` on this worker's card, logged once."""
    from qwen_nvfp4_serve.kernels.admission import EXPERTS_LIMITS, EXPERTS_SPEC, admit

    card, device = gpu_nvfp4_linear.this_card()
    table = admit((shape,), card=card, device=device, names=names, spec=EXPERTS_SPEC, limits=EXPERTS_LIMITS)
    gpu_nvfp4_linear.log_table("expert", card.name, table)
    return table


def input_scales(*, a13_scale: Any, a2_scale: Any, use_a16: bool = False, **_: Any) -> torch.Tensor | None:
    """Global multipliers of the activations before both products, float32 [2, E]; None for a weight-only checkpoint.

    a13_scale: [E] or, for gate and up, which see the same activations, [E, 2]. a2_scale: [E]. vLLM passes memory that
    no checkpoint has filled where it is weight-only.
    """
    import torch

    if use_a16 or a13_scale is None or a2_scale is None:
        return None
    first = a13_scale.data.float()
    return torch.stack([first if first.ndim == 1 else first.amax(1), a2_scale.data.float()]).contiguous()


def adopt(layer: torch.nn.Module) -> ExpertWeights:
    """The layer's parameters as our kernels take them, its block scales in 128x4 order already; kept on it too.

    Gate and up keep their own global scales, put aside before vLLM dropped the up rows' (`fused_scales`).
    """
    from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights

    kept = getattr(layer, EXPERT_SCALES, None)
    one = layer.w13_weight_scale_2.data.float()
    gate, up = (one, one) if kept is None else (kept[:, 0], kept[:, -1])
    weights = ExpertWeights(
        w13=layer.w13_weight.data,
        w13_scales=layer.w13_weight_scale.data,
        w2=layer.w2_weight.data,
        w2_scales=layer.w2_weight_scale.data,
        gate_scale=gate.contiguous(),
        up_scale=up.contiguous(),
        down_scale=layer.w2_weight_scale_2.data.float().contiguous(),
    )
    problem = weights.problem()
    assert problem is None, problem
    layer.nvfp4_experts = weights
    return weights


def make_ready(spans: Any, weights: ExpertWeights, top_k: int, input_scales: torch.Tensor | None) -> None:
    """On a card, before anything is captured: see `experts.warm_up`."""
    import torch

    from qwen_nvfp4_serve.kernels.admission import experts

    torch.cuda.current_stream().synchronize()  # kernels may read weights before the work ahead of them ends
    experts.warm_up(spans, weights, top_k, input_scales)


def _is_ours(layer: torch.nn.Module) -> bool:
    chosen = getattr(getattr(layer, "quant_method", None), "experts_cls", None)
    return getattr(chosen, "__name__", "") == EXPERTS


def _needed() -> Need:
    if nvfp4_backend() != "hybrid":
        return Need(False, f"NVFP4_BACKEND is {nvfp4_backend()}, which leaves the choice to vLLM")
    return Need(True, "NVFP4_BACKEND is hybrid")


def _apply() -> None:
    from vllm.logger import init_logger
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    from qwen_nvfp4_serve.kernels.nvfp4 import swizzle_scales

    reason = unsupported()
    if reason:
        raise UnsupportedHostError("NVFP4_BACKEND=hybrid", seen=reason, do="Set NVFP4_BACKEND=auto to let vLLM choose.")
    logger = init_logger("vllm.qwen_nvfp4_patches")

    def with_ours(original: Any) -> Any:
        def select_nvfp4_moe_backend(config: Any, weight_key: Any, activation_key: Any) -> tuple[Any, Any]:
            why = refusal(config, weight_key, activation_key)
            if why is not None:
                logger.info_once("NVFP4 MoE is left to vLLM: %s", why)
                chosen: tuple[Any, Any] = original(config, weight_key, activation_key)
                return chosen
            logger.info_once("Using %s for NVFP4 MoE", EXPERTS)
            return nvfp4.NvFp4MoeBackend.MARLIN, experts_class()

        return select_nvfp4_moe_backend

    def without_repacking(original: Any) -> Any:
        def convert_to_nvfp4_moe_kernel_format(nvfp4_backend: Any, layer: Any, **tensors: Any) -> Any:
            if not _is_ours(layer):
                return original(nvfp4_backend=nvfp4_backend, layer=layer, **tensors)
            layer.nvfp4_input_scales = input_scales(**tensors)
            w13_scale, w2_scale = (swizzle_scales(tensors[name].data) for name in ("w13_scale", "w2_scale"))
            first = (tensors["w13"], w13_scale, tensors["w13_scale_2"], None)
            return *first, tensors["w2"], w2_scale, tensors["w2_scale_2"], None

        return convert_to_nvfp4_moe_kernel_format

    seams.replace_function(nvfp4, "select_nvfp4_moe_backend", with_ours, SELECT)
    seams.replace_function(nvfp4, "convert_to_nvfp4_moe_kernel_format", without_repacking, CONVERT)


PATCH = Patch(
    name="gpu-nvfp4-moe",
    platform=Platform.GPU,
    changes="select_nvfp4_moe_backend answers QwenNvFp4Experts where admission lets it serve, and "
    "convert_to_nvfp4_moe_kernel_format leaves its weights packed; only under NVFP4_BACKEND=hybrid",
    why="vLLM's MoE backends repack the experts for themselves, have one scale for gate and up, and take dozens of "
    "launches for a few tokens",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/fused_moe/oracle/nvfp4.py",
    remove_when="vLLM has NVFP4 experts for few tokens and many on one weight layout, with a scale for gate and for up",
    needed=_needed,
    apply=_apply,
)
