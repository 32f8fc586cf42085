# ruff: noqa: ARG002, ARG005
"""Our patches for experts in vLLM's real modules, with a card that is only pretended.

The kernels are stood in for by their definition and have tests of their own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qwen_nvfp4_patches import backend, fused_scales, gpu_nvfp4_linear, gpu_nvfp4_moe, gpu_nvfp4_moe_block
from qwen_nvfp4_serve.kernels import admission
from qwen_nvfp4_serve.kernels.admission import Shape, Span, dispatch, experts
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, WITHOUT_LIMIT
from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4, unswizzle_scales
from qwen_nvfp4_serve.kernels.nvfp4_moe import reference

SMALL, GROUPED, LIBRARY = admission.EXPERTS
MOST = 4
MOE = "vllm.model_executor.layers.fused_moe"
QUANTIZATION = "vllm.model_executor.layers.quantization"


class ExpertsStandIn:
    """An experts candidate that remembers its calls and computes the definition."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, []

    def run(self, call: experts.ExpertsCall) -> None:
        self.calls.append((call.x.shape[0], call.input_scales))
        call.y[:] = reference.moe_experts(call.x, call.weights, call.ids, call.shares).value.bfloat16()


class LinearStandIn:
    """The same for linear layers, under every name that a plan may hold."""

    def run(self, x: Any, weight: Any, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
        block = unswizzle_scales(weight.scales, n, k // 16)
        dense = dequantize_nvfp4(weight.packed, block, weight.row_scale, dtype=torch.float64)
        y[:] = (x.double() @ dense.T).bfloat16()


ANY_LINEAR = admission.Table(facts={}, findings=(), took_s=0.0)


def table(shape: Shape, *names: str, most: int = 4096) -> admission.Table:
    """SMALL up to `most` tokens, and the others at every number: GROUPED unless told otherwise."""
    findings = []
    for index, name in enumerate((SMALL, *(names or (GROUPED,)))):
        times = tuple((m, 1.0 + index) for m in TIMED_TOKENS if (index and not names) or m <= most)
        findings.append(
            admission.Finding(candidate=name, shape=shape, verdict=admission.Verdict.ADMITTED, times_us=times)
        )
    return admission.Table(facts={}, findings=tuple(findings), took_s=0.0)


REPLACED = (
    (f"{MOE}.oracle.nvfp4", "select_nvfp4_moe_backend"),
    (f"{MOE}.oracle.nvfp4", "convert_to_nvfp4_moe_kernel_format"),
    ("vllm.model_executor.models.qwen3_next:Qwen3NextSparseMoeBlock", "__init__"),
    ("vllm.model_executor.models.qwen3_next:Qwen3NextSparseMoeBlock", "forward"),
    (f"{QUANTIZATION}.compressed_tensors.schemes:CompressedTensorsW4A4Fp4", "process_weights_after_loading"),
    (
        f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4"
        ":CompressedTensorsW4A4Nvfp4MoEMethod",
        "process_weights_after_loading",
    ),
    (f"{QUANTIZATION}.modelopt:KNvfp4Static", "process"),
    (f"{QUANTIZATION}.modelopt:ModelOptNvFp4FusedMoE", "process_weights_after_loading"),
)


def owner_of(where: str) -> Any:
    module, _, name = where.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def patched_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ExpertsStandIn]]:
    """Our patches in place, with stand-ins for the kernels; vLLM is as before afterwards."""
    from vllm.model_executor.kernels import linear

    before = [(owner_of(where), name, owner_of(where).__dict__[name]) for where, name in REPLACED]
    monkeypatch.setenv(backend.VARIABLE, "hybrid")
    monkeypatch.setattr(gpu_nvfp4_linear, "unsupported", lambda: None)
    monkeypatch.setattr(gpu_nvfp4_moe, "unsupported", lambda: None)
    monkeypatch.setattr(gpu_nvfp4_moe_block, "ROUTERS", ("CPURouter",))
    monkeypatch.setattr(gpu_nvfp4_moe, "admitted_experts", lambda shape, _names: table(shape, most=MOST))
    standing = {name: ExpertsStandIn(name) for name in admission.EXPERTS}
    monkeypatch.setattr(experts, "servers", lambda: standing)
    monkeypatch.setattr(gpu_nvfp4_linear, "admitted_table", lambda: ANY_LINEAR)
    serving = admission.serving

    def anything_for_linear(found: Any, shape: Shape, allowed: Any = None) -> tuple[Span, ...]:
        if found is ANY_LINEAR:
            return (Span(WITHOUT_LIMIT, admission.CANDIDATES[0]),)
        return serving(found, shape, allowed)

    monkeypatch.setattr(admission, "serving", anything_for_linear)
    monkeypatch.setattr(dispatch, "servers", lambda: tuple(LinearStandIn() for _ in admission.CANDIDATES))
    monkeypatch.setattr(dispatch, "plan_tensor", lambda _spans: torch.tensor([[WITHOUT_LIMIT, 0]]))
    for module in modules_with("init_nvfp4_linear_kernel"):
        monkeypatch.setattr(module, "init_nvfp4_linear_kernel", lambda use_a16=False: linear_kernel())
    torch.set_default_dtype(torch.bfloat16)
    for apply in (fused_scales._apply, gpu_nvfp4_moe._apply, gpu_nvfp4_moe_block._apply):
        apply()
    assert linear
    yield standing
    torch.set_default_dtype(torch.float32)
    for owner, name, original in before:
        replaced = owner.__dict__[name]
        setattr(owner, name, original)
        for module in modules_with(name):
            if getattr(module, name) is replaced:
                setattr(module, name, original)


def modules_with(name: str) -> list[Any]:
    """vLLM's modules that have taken this name."""
    for where, _ in REPLACED:
        owner_of(where)
    found = [module for key, module in list(sys.modules.items()) if key.startswith("vllm.")]
    return [module for module in found if name in getattr(module, "__dict__", {})]


def linear_kernel() -> Any:
    from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearLayerConfig

    return gpu_nvfp4_linear.kernel_class()(NvFp4LinearLayerConfig())
