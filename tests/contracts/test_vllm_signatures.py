"""What the patches take for granted in vLLM. A failure here means: read the new code, then move the window."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from qwen_nvfp4_patches import cpu_mtp_state, gpu_nvfp4_moe, registry, rendezvous_file, seams
from qwen_nvfp4_serve.versions import check_vllm

pytestmark = pytest.mark.usefixtures("any_vllm")

LINEAR = "vllm.model_executor.kernels.linear"
CHOICE = {"is_supported", "can_implement"}
MOE_ORACLE = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"


def parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(function)).parameters)


def untouched(module: str, name: str) -> Any:
    """vLLM's own function, also where a patch has replaced it in this process."""
    return seams.stock_of(getattr(importlib.import_module(module), name))


def test_installed_vllm_is_inside_its_window() -> None:
    from vllm.platforms import current_platform

    verdict = check_vllm(registry.installed_vllm(), gpu=not current_platform.is_cpu())
    assert verdict.ok, verdict.sentence


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (LINEAR, "init_nvfp4_linear_kernel", ("use_a16",)),
        (LINEAR, "_get_linear_backend", ("quantization",)),
        (LINEAR, "register_linear_kernel", ("kernel_class", "platform", "kernel_type")),
        (MOE_ORACLE, "backend_to_kernel_cls", ("backend",)),
        (MOE_ORACLE, "select_nvfp4_moe_backend", gpu_nvfp4_moe.SELECT),
        (MOE_ORACLE, "convert_to_nvfp4_moe_kernel_format", gpu_nvfp4_moe.CONVERT),
        ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "get_layer_from_name", ("layer_name",)),
        ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
        (
            "vllm.model_executor.layers.quantization.utils.w8a8_utils",
            "requantize_with_max_scale",
            ("weight", "weight_scale", "logical_widths"),
        ),
        ("vllm.utils.network_utils", rendezvous_file.NAME, rendezvous_file.PARAMETERS),
        ("vllm.triton_utils.dispatcher", "register_kernels", ("overrides",)),
    ],
)
def test_function_takes_the_parameters_that_we_know(module: str, name: str, expected: tuple[str, ...]) -> None:
    assert parameters(untouched(module, name)) == expected


@pytest.mark.parametrize("name", list(cpu_mtp_state.KERNEL_PARAMETERS))
def test_state_kernel_takes_the_parameters_that_we_know(name: str) -> None:
    from vllm.triton_utils.dispatcher import _registry

    full = f"{cpu_mtp_state.MODULE}.{name}"
    kernel = _registry[full][0] if full in _registry else untouched(cpu_mtp_state.MODULE, name)
    assert parameters(getattr(kernel, "func", kernel)) == cpu_mtp_state.KERNEL_PARAMETERS[name]


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (
            LINEAR,
            "NvFp4LinearKernel",
            {"is_supported", "can_implement", "process_weights_after_loading", "apply_weights"},
        ),
        (LINEAR, "FP8ScaledMMLinearKernel", {*CHOICE, "apply_scaled_mm"}),
        (
            "vllm.model_executor.layers.fused_moe.modular_kernel",
            "FusedMoEExpertsModular",
            {
                "_supports_activation",
                "_supports_current_device",
                "_supports_no_act_and_mul",
                "_supports_parallel_config",
                "_supports_quant_scheme",
                "activation_format",
                "apply",
                "finalize_weight_and_reduce_impl",
                "workspace_shapes",
            },
        ),
    ],
)
def test_base_class_asks_for_the_methods_that_we_write(module: str, name: str, expected: set[str]) -> None:
    assert getattr(importlib.import_module(module), name).__abstractmethods__ == expected


QUANTIZATION = "vllm.model_executor.layers.quantization"
QWEN = "vllm.model_executor.models.qwen3_next"
MOE_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
CT_EXPERTS = f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4"


@pytest.mark.parametrize(
    ("module", "name", "method", "expected"),
    [
        (
            f"{QUANTIZATION}.compressed_tensors.schemes",
            "CompressedTensorsW4A4Fp4",
            "process_weights_after_loading",
            ("self", "layer"),
        ),
        (CT_EXPERTS, "CompressedTensorsW4A4Nvfp4MoEMethod", "process_weights_after_loading", ("self", "layer")),
        (f"{QUANTIZATION}.modelopt", "KNvfp4Static", "process", ("self", "layer", "role")),
        (f"{QUANTIZATION}.modelopt", "ModelOptNvFp4FusedMoE", "process_weights_after_loading", ("self", "layer")),
        (QWEN, "Qwen3NextSparseMoeBlock", "__init__", ("self", "vllm_config", "prefix", "reduce_results")),
        (QWEN, "Qwen3NextSparseMoeBlock", "forward", ("self", "hidden_states", "already_sequence_parallel")),
        (
            MOE_RUNNER,
            "MoERunner",
            "_forward_impl",
            ("self", "hidden_states", "router_logits", "shared_experts_input", "input_ids"),
        ),
        (
            MOE_RUNNER,
            "MoERunner",
            "_maybe_reduce_final_output",
            ("self", "states", "trunc_size", "output_is_reduced"),
        ),
        ("vllm.v1.engine.async_llm", "AsyncLLM", "shutdown", ("self", "timeout")),
        ("vllm.v1.engine.output_processor", "OutputProcessor", "propagate_error", ("self", "e")),
    ],
)
def test_method_takes_the_parameters_that_we_know(
    module: str, name: str, method: str, expected: tuple[str, ...]
) -> None:
    function = getattr(getattr(importlib.import_module(module), name), method)
    assert parameters(getattr(function, "_qwen_nvfp4_original", function)) == expected


def test_cpu_experts_apply_takes_the_parameters_that_we_know() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    assert parameters(CPUUnquantizedExperts.apply)[:7] == (
        "self",
        "output",
        "hidden_states",
        "w1",
        "w2",
        "topk_weights",
        "topk_ids",
    )
    assert "apply_router_weight_on_input" in parameters(CPUUnquantizedExperts.apply)


def test_emulation_hands_the_checkpoints_tensors_through() -> None:
    torch = pytest.importorskip("torch")
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    names = ("w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2")
    tensors = {name: torch.ones(2) for name in names}
    divisor = torch.tensor([0.5, 0.5])
    result = nvfp4.convert_to_nvfp4_moe_kernel_format(
        nvfp4.NvFp4MoeBackend.EMULATION,
        layer=None,
        a13_scale=divisor,
        a2_scale=divisor,
        is_act_and_mul=True,
        **tensors,
    )
    w13, w13_scale, w13_scale_2, a13, w2, w2_scale, w2_scale_2, _ = result
    for name, tensor in zip(names, (w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2), strict=True):
        assert tensor is tensors[name], name
    assert a13.item() == 2.0  # experts see the divisor, and the rounding takes its reciprocal


def test_weight_only_layers_are_still_hard_coded() -> None:
    """When this fails, vLLM lets a registered kernel serve weight-only layers: drop the replacement of the function."""
    source = inspect.getsource(untouched(LINEAR, "init_nvfp4_linear_kernel"))
    assert "a16_kernels = (" in source


def test_no_nvfp4_kernel_serves_the_cpu_by_itself() -> None:
    """When this fails, compare vLLM's own kernel with ours and drop the patch."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    names = [kernel.__name__ for kernel in linear._POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU, [])]
    assert set(names) <= {"CpuNvFp4LinearKernel"}
