"""Our CPU kernel classes inside vLLM: bit for bit the BF16 layer, and rounded activations when asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches import activations, cpu_fp8_linear, cpu_nvfp4_linear, cpu_nvfp4_moe  # noqa: E402
from qwen_nvfp4_serve.errors import UsageError  # noqa: E402
from qwen_nvfp4_serve.kernels.nvfp4 import quantize_nvfp4  # noqa: E402

pytestmark = pytest.mark.usefixtures("cpu_vllm")
ROWS, COLUMNS = 96, 64


@pytest.fixture(autouse=True)
def bf16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are built under the model's dtype; the experts' list is read anew for each setting."""
    monkeypatch.delenv(activations.VARIABLE, raising=False)
    cpu_nvfp4_moe.experts_classes.cache_clear()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)
    cpu_nvfp4_moe.experts_classes.cache_clear()


def layer_of(**tensors: Any) -> Any:
    layer = torch.nn.Module()
    for name, tensor in tensors.items():
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    return layer


def bf16_output(weight: Any, x: Any) -> Any:
    """What vLLM's unquantized layer computes on this machine."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = layer_of(weight=weight)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer.cpu_linear(x, layer.weight, None)


def nvfp4_layer(**more: Any) -> tuple[Any, Any]:
    """A layer as vLLM hands it to a kernel, and its BF16 dequantization."""
    tensor = quantize_nvfp4(torch.randn(ROWS, COLUMNS))
    layer = layer_of(
        weight=tensor.packed, weight_scale=tensor.block_scale, weight_global_scale=tensor.global_scale, **more
    )
    return layer, tensor.dequantize(torch.bfloat16)


def nvfp4_kernel() -> Any:
    from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearLayerConfig

    return cpu_nvfp4_linear.kernel_class()(NvFp4LinearLayerConfig())


@pytest.mark.parametrize("tokens", [1, 7])
def test_nvfp4_linear_equals_its_bf16_dequantization(tokens: int) -> None:
    layer, dense = nvfp4_layer(input_global_scale=torch.tensor(0.01, dtype=torch.float32))
    kernel, x = nvfp4_kernel(), torch.randn(tokens, COLUMNS)
    kernel.process_weights_after_loading(layer)
    assert torch.equal(kernel.apply_weights(layer, x), bf16_output(dense, x))


def test_nvfp4_linear_rounds_activations_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(activations.VARIABLE, "w4a4")
    scale = torch.tensor(16 / 2688, dtype=torch.float32)
    layer, dense = nvfp4_layer(input_global_scale=scale)
    kernel, x = nvfp4_kernel(), torch.randn(3, COLUMNS)
    kernel.process_weights_after_loading(layer)
    rounded = quantize_nvfp4(x, scale).dequantize(torch.bfloat16)
    assert torch.equal(kernel.apply_weights(layer, x), bf16_output(dense, rounded))
    assert not torch.equal(rounded, x)


def test_nvfp4_linear_of_a_weight_only_checkpoint_never_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(activations.VARIABLE, "w4a4")
    layer, dense = nvfp4_layer()
    kernel, x = nvfp4_kernel(), torch.randn(3, COLUMNS)
    kernel.process_weights_after_loading(layer)
    assert torch.equal(kernel.apply_weights(layer, x), bf16_output(dense, x))


@pytest.mark.parametrize("amax", [0.5, 3.0, 40.0])
def test_rounding_equals_vllms_reference(amax: float) -> None:
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant

    x = torch.randn(33, COLUMNS) * amax
    x[0] = 0.0
    divisor = torch.tensor(2688 / 16, dtype=torch.float32)
    activations.rounding_op()
    ours = torch.ops.qwen_nvfp4.round_to_nvfp4(x, divisor.reciprocal())
    reference = ref_nvfp4_quant_dequant(x, divisor, 16)
    # The two divide in another order, which moves a value that lies on the border between two codes.
    apart = (ours != reference).float().mean().item()
    assert apart < 0.005
    assert torch.allclose(ours.float(), reference.float(), rtol=0.4, atol=1e-3)


def test_nvfp4_linear_keeps_each_shards_global_scale() -> None:
    weights, widths = [torch.randn(rows, COLUMNS) * size for rows, size in ((32, 1), (16, 8), (48, 3))], [32, 16, 48]
    shards = [quantize_nvfp4(weight) for weight in weights]
    layer = layer_of(
        weight=torch.cat([shard.packed for shard in shards]),
        weight_scale=torch.cat([shard.block_scale for shard in shards]),
        weight_global_scale=torch.tensor(0.1, dtype=torch.float32),  # what vLLM made of the three
    )
    layer.nvfp4_shard_scales = torch.stack([shard.global_scale for shard in shards])
    layer.logical_widths = widths
    kernel, x = nvfp4_kernel(), torch.randn(2, COLUMNS)
    kernel.process_weights_after_loading(layer)
    dense = torch.cat([shard.dequantize(torch.bfloat16) for shard in shards])
    assert torch.equal(kernel.apply_weights(layer, x), bf16_output(dense, x))


def test_unknown_activation_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(activations.VARIABLE, "w4a8")
    with pytest.raises(UsageError, match="expected weights-only or w4a4"):
        activations.cpu_activations()


@pytest.mark.parametrize("per_channel", [False, True])
def test_fp8_linear_equals_its_bf16_dequantization(per_channel: bool) -> None:
    weight, x = torch.randn(ROWS, COLUMNS).float(), torch.randn(5, COLUMNS)
    scale = weight.abs().amax(1, keepdim=True) / 448 if per_channel else weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    layer = layer_of(weight=codes.t(), weight_scale=scale)
    kernel = cpu_fp8_linear.kernel_class().__new__(cpu_fp8_linear.kernel_class())
    kernel.config = type("Config", (), {"out_dtype": torch.bfloat16})
    kernel.process_weights_after_loading(layer)
    dense = (codes.float() * scale).bfloat16()
    assert torch.equal(kernel.apply_weights(layer, x), bf16_output(dense, x))


def experts_layer(experts: int = 3, hidden: int = 32, width: int = 48) -> tuple[Any, Any, Any]:
    first = quantize_nvfp4(torch.randn(experts, 2 * width, hidden), torch.rand(experts).float() * 0.01 + 0.001)
    second = quantize_nvfp4(torch.randn(experts, hidden, width), torch.rand(experts).float() * 0.01 + 0.001)
    layer = layer_of(
        w13_weight=first.packed,
        w13_weight_scale=first.block_scale,
        w13_weight_scale_2=first.global_scale,
        w2_weight=second.packed,
        w2_weight_scale=second.block_scale,
        w2_weight_scale_2=second.global_scale,
    )
    return layer, first.dequantize(torch.bfloat16), second.dequantize(torch.bfloat16)


def test_experts_are_dequantized_each_with_its_own_scale() -> None:
    layer, first, second = experts_layer()
    cpu_nvfp4_moe.dequantize_experts(layer, torch.bfloat16)
    assert torch.equal(layer.w13_weight.data, first)
    assert torch.equal(layer.w2_weight.data, second)


def test_experts_keep_the_scales_of_gate_and_up() -> None:
    layer, first, _ = experts_layer()
    halves = torch.stack([layer.w13_weight_scale_2.data, layer.w13_weight_scale_2.data * 2], dim=1)
    layer.nvfp4_w13_scales = halves
    cpu_nvfp4_moe.dequantize_experts(layer, torch.bfloat16)
    gate, up = layer.w13_weight.data.chunk(2, dim=1)
    assert torch.equal(gate, first.chunk(2, dim=1)[0])
    assert torch.equal(up, first.chunk(2, dim=1)[1] * 2)


@pytest.mark.parametrize(
    ("scales", "want"),
    [
        ([0.5, 0.25], [0.5, 0.5, 0.25]),
        ([0.5, 0.5], 0.5),
        ([0.5, float(torch.finfo(torch.float8_e4m3fn).min)], 0.5),
    ],
)
def test_fp8_scales_by_row(scales: list[float], want: Any) -> None:
    assert cpu_fp8_linear.scales_by_row(torch.tensor(scales, dtype=torch.float32), [2, 1]).tolist() == want


def test_rounding_experts_compute_the_routed_sum() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    layer, first, second = experts_layer()
    cls = cpu_nvfp4_moe._rounding(cpu_moe.CPUUnquantizedExperts)
    experts = cls.__new__(cls)
    experts.moe_config = type("Config", (), {"in_dtype": torch.bfloat16})
    scale = torch.tensor(2688 / 16, dtype=torch.float32)
    desc = type("Scales", (), {"a1_gscale": scale, "a2_gscale": scale})
    experts.quant_config = desc
    experts.process_weights_after_loading(layer)
    x = torch.randn(4, 32)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0]])
    weights = torch.rand(4, 2).float()
    output = torch.full_like(x, float("nan"))
    experts.apply(output, x, layer.w13_weight, layer.w2_weight, weights, ids)

    def rounded(values: Any) -> Any:
        return quantize_nvfp4(values, scale.reciprocal()).dequantize(torch.bfloat16)

    for token in range(4):
        want = torch.zeros(32, dtype=torch.float32)
        for place in range(2):
            expert = int(ids[token, place])
            gate, up = (rounded(x[token : token + 1]) @ first[expert].T).chunk(2, -1)
            middle = rounded(torch.nn.functional.silu(gate) * up)
            want += weights[token, place] * (middle @ second[expert].T).float()[0]
        assert torch.allclose(output[token].float(), want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("setting", "first"), [("weights-only", "CpuNvFp4Experts"), ("w4a4", "CpuNvFp4W4A4Experts")])
def test_experts_classes_follow_the_setting(monkeypatch: pytest.MonkeyPatch, setting: str, first: str) -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static

    monkeypatch.setenv(activations.VARIABLE, setting)
    classes = cpu_nvfp4_moe.experts_classes()
    w4a4 = next(cls for cls in classes if cls._supports_quant_scheme(kNvfp4Static, kNvfp4Dynamic))
    weight_only = next(cls for cls in classes if cls._supports_quant_scheme(kNvfp4Static, None))
    assert w4a4.__name__ == first
    assert weight_only.__name__ == "CpuNvFp4Experts"
