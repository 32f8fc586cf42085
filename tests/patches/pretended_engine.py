"""Runs as a script: vLLM's CPU engine on a checkpoint with our card patches in place, kernels stood in for by their
definition, and prints one JSON line of what it answered and of what ran.

python tests/patches/pretended_engine.py FOLDER QUESTIONS.json      (a list of message lists; compiled, not eager)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from qwen_nvfp4_patches import (
    fused_scales,
    gpu_bf16_linear,
    gpu_gdn_projections,
    gpu_nvfp4_linear,
    gpu_nvfp4_moe,
    gpu_nvfp4_moe_block,
    register,
    seams,
)
from qwen_nvfp4_serve.kernels import admission, nvfp4_moe
from qwen_nvfp4_serve.kernels.admission import Finding, Shape, Span, Table, Verdict, bf16, dispatch, experts
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, WITHOUT_LIMIT
from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4, unswizzle_scales

MARK = "PRETENDED "
FEW = 4  # tokens that the whole block takes
ANY_LINEAR = Table(facts={}, findings=(), took_s=0.0)
ran = {"block": 0, "experts": 0, "linear": 0, "projected": 0}


class LinearStandIn:
    """The definition, in float32."""

    name = admission.CANDIDATES[0]

    def run(self, x: Any, weight: Any, y: Any, **_: Any) -> None:
        ran["linear"] += 1
        n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
        block = unswizzle_scales(weight.scales, n, k // 16)
        y[:] = (x.float() @ dequantize_nvfp4(weight.packed, block, weight.row_scale).T).bfloat16()


class ExpertsStandIn:
    """The definition, in float32."""

    def run(self, call: experts.ExpertsCall) -> None:
        ran["experts"] += 1
        call.y[:] = nvfp4_moe.moe_experts(call.x, call.weights, call.ids, call.shares)


def table(shape: Shape, _names: tuple[str, ...]) -> Table:
    """The small kernel for FEW tokens, the grouped one for any."""
    small, grouped, _ = admission.EXPERTS
    rows = {small: [m for m in TIMED_TOKENS if m <= FEW], grouped: list(TIMED_TOKENS)}
    findings = tuple(
        Finding(
            candidate=name,
            shape=shape,
            verdict=Verdict.ADMITTED,
            times_us=tuple((m, 1.0 + (name == grouped)) for m in row),
        )
        for name, row in rows.items()
    )
    return Table(facts={}, findings=findings, took_s=0.0)


def pretend() -> None:
    """Our plugin for this CPU, and on top of it the patches for a card."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearLayerConfig
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    register()
    gpu_nvfp4_linear.unsupported = lambda: None
    gpu_nvfp4_moe.unsupported = lambda: None
    gpu_nvfp4_moe.admitted_experts = table
    gpu_nvfp4_moe_block.ROUTERS = ("CPURouter",)
    gpu_nvfp4_linear.admitted_table = lambda: ANY_LINEAR
    serving = admission.serving

    def serves(found: Table, shape: Shape, allowed: Any = None) -> tuple[Span, ...]:
        first = (Span(WITHOUT_LIMIT, admission.CANDIDATES[0]),)
        return first if found is ANY_LINEAR else serving(found, shape, allowed)

    admission.serving = serves
    dispatch.servers = lambda: (LinearStandIn(),)
    experts.servers = lambda: dict.fromkeys(admission.EXPERTS, ExpertsStandIn())
    kernel = gpu_nvfp4_linear.kernel_class()

    def ours_for_all(use_a16: bool = False) -> Any:
        return kernel(NvFp4LinearLayerConfig())

    for module in (linear, modelopt, compressed_tensors_w4a4_nvfp4):
        module.init_nvfp4_linear_kernel = ours_for_all
    # Where a CPU has AMX it would repack the routers' weights and take them away.
    original = dispatch_cpu_unquantized_gemm

    def keep(layer: Any, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = keep
    for module in list(sys.modules.values()):
        if getattr(module, "dispatch_cpu_unquantized_gemm", None) is original:
            module.dispatch_cpu_unquantized_gemm = keep
    for apply in (fused_scales._apply, gpu_nvfp4_moe._apply, gpu_nvfp4_moe_block._apply):
        apply()
    project_once()
    ours = gpu_nvfp4_moe_block._ours

    def counted(block: Any, x: torch.Tensor, moe_block: Any) -> torch.Tensor:
        ran["block"] += 1
        return ours(block, x, moe_block)

    gpu_nvfp4_moe_block._ours = counted


def project_once() -> None:
    """The delta net's projections as one product, in a CPU's forward, which has the lines of a card's."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    gpu_bf16_linear.is_ours = lambda _: True
    gpu_gdn_projections._apply()
    seams.replace_function(
        QwenGatedDeltaNetAttention, "forward_cpu", gpu_gdn_projections.projected_once, ("self", "hidden_states")
    )
    joined = bf16.joined

    def counted(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
        found = joined(first, second)
        ran["projected"] += found is not None
        return found

    bf16.joined = counted


def main() -> None:
    pretend()
    from vllm import LLM, SamplingParams

    folder, questions = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    engine = LLM(
        model=folder,
        language_model_only=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        generation_config="vllm",
        distributed_executor_backend="uni",
        seed=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=64)
    answers = []
    for messages in questions:
        output = engine.chat(messages, sampling, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
        answers.append(output[0].outputs[0].text)
    print(MARK + json.dumps({"answers": answers, "ran": ran}), flush=True)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
