# ruff: noqa: ARG002, ARG005
"""vLLM's own mixture-of-experts block, loaded and run through our patches, with a card that is only pretended.

What runs here is the choice, the loading, the scales, the plan and the block's op, all in vLLM's real modules; the
kernels are stood in for by their definition and have tests of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches import (  # noqa: E402
    backend,
    fused_scales,
    gpu_nvfp4_linear,
    gpu_nvfp4_moe,
    gpu_nvfp4_moe_block,
    seams,
)
from qwen_nvfp4_serve.errors import UnsupportedHostError  # noqa: E402
from qwen_nvfp4_serve.kernels import admission, nvfp4_moe  # noqa: E402
from qwen_nvfp4_serve.kernels.admission import Shape, Span, dispatch, experts  # noqa: E402
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, WITHOUT_LIMIT  # noqa: E402
from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4, unswizzle_scales  # noqa: E402
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, reference  # noqa: E402
from qwen_nvfp4_serve.synthetic import CheckpointSpec  # noqa: E402
from qwen_nvfp4_serve.synthetic.config import model_config  # noqa: E402

SMALL, GROUPED, LIBRARY = admission.EXPERTS
MOST = 4
PREFIX = "language_model.model.layers.0.mlp"
STYLES = ("ct-w4a4", "ct-w4a16", "modelopt-nvfp4", "modelopt-mixed")
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


@pytest.fixture(scope="module")
def vllm_parallel(cpu_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    meeting = tmp_path_factory.mktemp("parallel") / "meeting"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


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
    import importlib

    module, _, name = where.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@pytest.fixture
def patched(vllm_parallel: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ExpertsStandIn]]:
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


def vllm_config(style: str, *, ignore: str | None = None) -> Any:
    """A vLLM configuration for the embedded model in a style of checkpoint."""
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = model_config(CheckpointSpec(style=style))
    quantization = config["quantization_config"]
    if ignore:
        quantization["ignore"] = [*quantization["ignore"], ignore]
    if quantization["quant_method"] == "compressed-tensors":
        quant: Any = CompressedTensorsConfig.from_config(quantization)
    elif quantization["quant_algo"] == "MIXED_PRECISION":
        quant = modelopt.ModelOptMixedPrecisionConfig.from_config(quantization)
    else:
        quant = modelopt.ModelOptNvFp4Config.from_config(quantization)
    quant.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    found = VllmConfig()
    found.quant_config = quant
    found.model_config = SimpleNamespace(  # type: ignore[assignment]
        hf_text_config=SimpleNamespace(**config["text_config"]), dtype=torch.bfloat16, quantization=None
    )
    return found


class Loaded:
    """A block of vLLM's with random NVFP4 weights of unequal scales, and what it should compute."""

    def __init__(self, style: str, *, ignore: str | None = None) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock

        self.config = vllm_config(style, ignore=ignore)
        with set_current_vllm_config(self.config):
            self.block = Qwen3NextSparseMoeBlock(self.config, prefix=PREFIX)
            fill(self.block)
            self.weights, self.shared = self.experts(), self.shared_expert()
            self.input_scales = None if "a16" in style or "mixed" in style else self.declared_input_scales()
            for _, module in list(self.block.named_modules()):
                method = getattr(module, "quant_method", None)
                if "Unquantized" in type(method).__name__:
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
                elif method is not None:
                    method.process_weights_after_loading(module)
        self.top_k = self.block.experts.router.top_k

    def experts(self) -> ExpertWeights:
        """The routed experts as the checkpoint has them."""
        layer = self.block.experts.routed_experts
        gate, up = multipliers(layer, "w13").unbind(1)
        return nvfp4_moe.prepare_experts(
            w13=packed(layer, "w13").clone(),
            w13_block_scale=layer.w13_weight_scale.data.clone(),
            w2=packed(layer, "w2").clone(),
            w2_block_scale=layer.w2_weight_scale.data.clone(),
            gate_scale=gate,
            up_scale=up,
            down_scale=multipliers(layer, "w2"),
        )

    def declared_input_scales(self) -> Any:
        """Multipliers of the activations, as the checkpoint has them: of gate and up the larger one."""
        layer = self.block.experts.routed_experts
        divisors = named(layer, "w13_input_global_scale")
        if divisors is not None:
            first, second = 1 / divisors.data, 1 / layer.w2_input_global_scale.data
        else:
            first, second = layer.w13_input_scale.data.clone(), layer.w2_input_scale.data.clone()
        return torch.stack([first.amax(1), second]).float()

    def shared_expert(self) -> ExpertWeights | None:
        """The shared expert as the checkpoint has it, None where it is not NVFP4."""
        mlp = self.block.shared_expert
        if not hasattr(mlp.down_proj, "weight_scale"):
            return None
        first, second = mlp.gate_up_proj, mlp.down_proj
        gate, up = multipliers(first, "").flatten()
        return nvfp4_moe.prepare_experts(
            w13=packed(first, "").clone().unsqueeze(0),
            w13_block_scale=first.weight_scale.data.clone().unsqueeze(0),
            w2=packed(second, "").clone().unsqueeze(0),
            w2_block_scale=second.weight_scale.data.clone().unsqueeze(0),
            gate_scale=gate.reshape(1),
            up_scale=up.reshape(1),
            down_scale=multipliers(second, "").reshape(1),
        )

    def run(self, x: Any) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        with set_current_vllm_config(self.config), set_forward_context(None, self.config):
            return self.block(x)

    def expected(self, x: Any) -> Any:
        """The whole block by its definition: values and what a result may be off."""
        return reference.moe_block(
            x,
            self.block.gate.weight.data,
            self.weights,
            top_k=self.top_k,
            shared=self.shared,
            shared_gate=self.block.shared_expert_gate.weight.data,
        )


def named(layer: Any, name: str) -> Any:
    return getattr(layer, name, None)


def packed(layer: Any, part: str) -> Any:
    prefix = f"{part}_" if part else ""
    found = named(layer, f"{prefix}weight_packed")
    return (named(layer, f"{prefix}weight") if found is None else found).data


def multipliers(layer: Any, part: str) -> Any:
    """Global scales as multipliers, whichever way round the checkpoint's format stores them."""
    prefix = f"{part}_" if part else ""
    divisors = named(layer, f"{prefix}weight_global_scale")
    if divisors is not None:
        return divisors.data.float().reciprocal()
    return named(layer, f"{prefix}weight_scale_2").data.float().clone()


def fill(block: Any) -> None:
    """Random values for every parameter, all global scales different, as a loader would have left them."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in block.named_parameters():
        data = parameter.data
        if data.dtype is torch.uint8:
            data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=generator))
        elif data.dtype is torch.float8_e4m3fn:
            bytes_ = torch.randint(40, 110, data.shape, dtype=torch.uint8, generator=generator)
            data.view(torch.uint8).copy_(bytes_)
        elif data.dtype is torch.float32:
            drawn = torch.rand(data.shape, generator=generator, dtype=torch.float32) * 3e-4 + 3e-4
            data.copy_(drawn.reciprocal() if name.endswith("_global_scale") else drawn)
        else:
            data.copy_(torch.randn(data.shape, generator=generator) * 0.1)


def tokens(count: int, seed: int = 0) -> Any:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_within(y: Any, expected: Any, *, roundings: int = 1) -> None:
    """Within the bound of one rounding at the end, or of some more in between."""
    slack = (roundings - 1) * expected.value.abs().amax(-1, keepdim=True) * 2.0**-7
    assert ((y.double() - expected.value).abs() <= expected.bound + slack).all()


@pytest.mark.parametrize("style", STYLES)
def test_block_at_few_tokens_is_our_op_on_one_copy_of_the_weights(
    patched: dict[str, ExpertsStandIn], style: str
) -> None:
    loaded = Loaded(style)
    layer = loaded.block.experts.routed_experts
    assert type(layer.quant_method.moe_kernel.fused_experts).__name__ == gpu_nvfp4_moe.EXPERTS
    assert loaded.block.qwen_nvfp4_eligible
    for count in (1, MOST):
        x = tokens(count)
        assert_within(loaded.run(x), loaded.expected(x))
    assert not any(stand_in.calls for stand_in in patched.values())  # the block's own kernels did it
    block = gpu_nvfp4_moe_block.block_of(loaded.block.experts)
    assert block is not None
    assert block.shared is not None
    for name, parameter in (("w13", layer.w13_weight), ("w2", layer.w2_weight)):
        assert getattr(block.experts, name).data_ptr() == parameter.data_ptr()
    assert block.shared.w13.data_ptr() == loaded.block.shared_expert.gate_up_proj.weight.data_ptr()


@pytest.mark.parametrize("style", STYLES)
def test_block_at_many_tokens_is_vllms_with_our_experts_and_layers(
    patched: dict[str, ExpertsStandIn], style: str
) -> None:
    loaded, x = Loaded(style), tokens(MOST + 3)
    assert_within(loaded.run(x), loaded.expected(x), roundings=4)
    ((count, scales),) = patched[GROUPED].calls
    assert count == MOST + 3
    assert patched[SMALL].calls == []
    if loaded.input_scales is None:
        assert scales is None
    else:
        torch.testing.assert_close(scales, loaded.input_scales, rtol=1e-6, atol=0)


def test_experts_keep_the_global_scales_of_gate_and_up(patched: dict[str, ExpertsStandIn]) -> None:
    loaded = Loaded("ct-w4a4")
    held = loaded.block.experts.routed_experts.nvfp4_experts
    assert not torch.equal(held.gate_scale, held.up_scale)
    for ours, wanted in zip(held.tensors(), loaded.weights.tensors(), strict=True):
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=1e-6, atol=0)


def test_shared_expert_in_bf16_is_left_to_vllm_beside_our_routed_ones(
    patched: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, x = Loaded("ct-w4a4", ignore="re:.*shared_expert.*"), tokens(2)
    assert loaded.shared is None
    monkeypatch.setattr(type(loaded.block.shared_expert), "forward", lambda _self, x: x * 2)
    routed = reference.moe_block(x, loaded.block.gate.weight.data, loaded.weights, top_k=loaded.top_k)
    expected = reference.Bounded(routed.value + 2 * x.double(), routed.bound)
    assert_within(loaded.run(x), expected, roundings=2)
    assert not any(stand_in.calls for stand_in in patched.values())


def test_block_with_its_experts_ids_captured_runs_as_vllms(patched: dict[str, ExpertsStandIn]) -> None:
    loaded, seen = Loaded("ct-w4a4"), []
    loaded.block.experts.router.set_capture_fn(seen.append)
    loaded.run(tokens(1))
    assert len(seen) == 1
    assert [count for count, _ in patched[SMALL].calls] == [1]


def test_block_is_one_op_under_torch_compile(patched: dict[str, ExpertsStandIn]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    loaded, graphs = Loaded("ct-w4a4"), []

    def keep(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(loaded.block.forward, backend=keep, fullgraph=True, dynamic=True)
    with set_current_vllm_config(loaded.config), set_forward_context(None, loaded.config):
        for count in (2, MOST + 3):
            x = tokens(count)
            assert_within(compiled(x), loaded.expected(x), roundings=4)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in called if gpu_nvfp4_moe_block.OP in name]
    assert not [name for name in called if "moe_forward" in name]


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("moe_config.is_lora_enabled", True, "LoRA"),
        ("moe_config.moe_parallel_config.use_ep", True, "parallelism"),
        ("moe_config.moe_parallel_config.dp_size", 2, "parallelism"),
        ("moe_config.moe_parallel_config.enable_eplb", True, "load balancing"),
        ("moe_config.hidden_dim_unpadded", 200, "padded"),
        ("router", SimpleNamespace(), "router"),
        ("_shared_experts", None, "shared expert"),
        ("routed_scaling_factor", 2.0, "transformed"),
        ("routed_experts.quant_method", SimpleNamespace(), "not NVFP4"),
    ],
)
def test_block_that_is_not_for_us_keeps_vllms_forward_with_the_reason(
    patched: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch, where: str, value: Any, words: str
) -> None:
    loaded = Loaded("ct-w4a4")
    assert gpu_nvfp4_moe_block.obstacle(loaded.block) is None
    *path, name = where.split(".")
    owner: Any = loaded.block.experts
    for part in path:
        owner = getattr(owner, part)
    # A module's setattr would refuse what is no module; what vLLM reads is the instance's own.
    owner.__dict__.pop(name, None)
    getattr(owner, "_modules", {}).pop(name, None)
    object.__setattr__(owner, name, value)
    assert words in (gpu_nvfp4_moe_block.obstacle(loaded.block) or "")


def test_block_without_our_verdict_runs_vllms_forward(patched: dict[str, ExpertsStandIn]) -> None:
    loaded = Loaded("ct-w4a4")
    loaded.block.qwen_nvfp4_eligible = False
    x = tokens(2)
    assert_within(loaded.run(x), loaded.expected(x), roundings=4)
    assert [count for count, _ in patched[SMALL].calls] == [2]


def test_block_whose_one_token_goes_elsewhere_is_left_to_vllm(
    patched: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_nvfp4_moe, "spans_for", lambda _config, **_: (Span(WITHOUT_LIMIT, GROUPED),))
    loaded, x = Loaded("ct-w4a4"), tokens(1)
    assert gpu_nvfp4_moe_block.block_of(loaded.block.experts) is None
    assert_within(loaded.run(x), loaded.expected(x), roundings=4)
    assert [count for count, _ in patched[GROUPED].calls] == [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_lora_enabled": True}, "LoRA"),
        ({"moe_backend": "marlin"}, "moe_backend is marlin"),
        ({"in_dtype": torch.float16}, "float16"),
        ({"swiglu_limit": 7.0}, "SwiGLU"),
        ({"has_bias": True}, "bias"),
        ({"num_local_experts": 8}, "not every expert"),
        ({"activation": "gelu"}, "activation"),
        ({"use_ep": True}, "parallel config"),
        ({"enable_eplb": True}, "parallel config"),
        ({"dp_size": 2}, "parallel config"),
        ({"sp_size": 2}, "parallel config"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_experts_that_are_not_for_us_are_left_to_vllm_with_the_reason(
    patched: dict[str, ExpertsStandIn], change: dict[str, Any], words: str
) -> None:
    import copy

    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static

    loaded = Loaded("ct-w4a4")
    config = copy.copy(loaded.block.experts.moe_config)
    config.moe_parallel_config = copy.copy(config.moe_parallel_config)
    for name, value in change.items():
        owner = config.moe_parallel_config if hasattr(config.moe_parallel_config, name) else config
        setattr(owner, name, MoEActivation.GELU if value == "gelu" else value)
    with set_current_vllm_config(loaded.config):
        reason = gpu_nvfp4_moe.refusal(config, kNvfp4Static, kNvfp4Dynamic)
    assert reason is not None
    assert words in reason


def test_experts_in_other_schemes_or_formats_are_left_to_vllm(patched: dict[str, ExpertsStandIn]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Static

    loaded = Loaded("ct-w4a4")
    config = loaded.block.experts.moe_config
    with set_current_vllm_config(loaded.config):
        assert gpu_nvfp4_moe.refusal(config, kNvfp4Static, None) is None
        assert "quantization scheme" in (gpu_nvfp4_moe.refusal(config, kFp8StaticTensorSym, None) or "")
        loaded.config.quant_config = SimpleNamespace(get_name=lambda: "quark")
        assert gpu_nvfp4_moe.refusal(config, kNvfp4Static, None) == "the checkpoint's format is quark"


def test_experts_disabled_by_name_are_left_to_vllm(
    patched: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

    loaded = Loaded("ct-w4a4")
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", gpu_nvfp4_moe.EXPERTS)
    with set_current_vllm_config(loaded.config):
        reason = gpu_nvfp4_moe.refusal(loaded.block.experts.moe_config, kNvfp4Static, None)
    assert reason == "VLLM_DISABLED_KERNELS names it"


def test_selection_without_an_admitted_kernel_is_vllms(
    patched: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static

    loaded = Loaded("ct-w4a4")
    config = loaded.block.experts.moe_config
    with set_current_vllm_config(loaded.config):
        chosen = nvfp4.select_nvfp4_moe_backend(config, kNvfp4Static, kNvfp4Dynamic)
        assert (chosen[0], chosen[1].__name__) == (nvfp4.NvFp4MoeBackend.MARLIN, gpu_nvfp4_moe.EXPERTS)
        monkeypatch.setattr(gpu_nvfp4_moe, "admitted_experts", lambda shape, _names: table(shape, GROUPED, most=MOST))
        # This CPU has no experts of vLLM's own.
        with pytest.raises(NotImplementedError, match="No NvFp4 MoE backend"):
            nvfp4.select_nvfp4_moe_backend(config, kNvfp4Static, kNvfp4Dynamic)


def test_admission_is_asked_for_the_experts_of_this_card(
    patched: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Loaded("ct-w4a4").block.experts.moe_config
    text = model_config(CheckpointSpec())["text_config"]
    wanted = Shape(2 * text["moe_intermediate_size"], 256, text["num_experts"], text["num_experts_per_tok"])
    assert gpu_nvfp4_moe.shape_of(config) == wanted


def test_kernels_that_round_activations_serve_only_checkpoints_that_do(
    patched: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Loaded("ct-w4a4").block.experts.moe_config
    times = {SMALL: {m: 1.0 for m in TIMED_TOKENS if m <= 8}, GROUPED: dict.fromkeys(TIMED_TOKENS, 5.0)}
    times[LIBRARY] = {m: 2.0 if m >= 512 else 9.0 for m in TIMED_TOKENS}

    def tried(shape: Shape, names: tuple[str, ...]) -> admission.Table:
        findings = tuple(
            admission.Finding(
                candidate=name, shape=shape, verdict=admission.Verdict.ADMITTED, times_us=tuple(row.items())
            )
            for name, row in times.items()
            if name in names
        )
        return admission.Table(facts={}, findings=findings, took_s=0.0)

    monkeypatch.setattr(gpu_nvfp4_moe, "admitted_experts", tried)
    rounding = gpu_nvfp4_moe.spans_for(config, rounds=True)
    assert rounding == (Span(8, SMALL), Span(256, GROUPED), Span(WITHOUT_LIMIT, LIBRARY))
    assert gpu_nvfp4_moe.spans_for(config, rounds=False) == (Span(8, SMALL), Span(WITHOUT_LIMIT, GROUPED))


def test_conversion_of_other_layers_is_vllms(patched: dict[str, ExpertsStandIn]) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    names = dict.fromkeys(gpu_nvfp4_moe.CONVERT[2:11])
    found = nvfp4.convert_to_nvfp4_moe_kernel_format(
        nvfp4_backend=nvfp4.NvFp4MoeBackend.FLASHINFER_MOE_EP_CUTEDSL, layer=torch.nn.Module(), **names
    )
    assert found == (None,) * 8


def test_apply_twice_replaces_once_in_every_module(patched: dict[str, ExpertsStandIn]) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4
    from vllm.model_executor.layers.quantization import modelopt

    first = nvfp4.select_nvfp4_moe_backend
    gpu_nvfp4_moe._apply()
    gpu_nvfp4_moe_block._apply()
    assert nvfp4.select_nvfp4_moe_backend is first is modelopt.select_nvfp4_moe_backend
    assert not hasattr(getattr(first, seams.MARK), seams.MARK)


def test_apply_where_our_kernels_cannot_run_stops_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, cpu_vllm: None
) -> None:
    monkeypatch.setattr(gpu_nvfp4_moe, "unsupported", lambda: "kernel library nvfp4_moe is not built")
    with pytest.raises(UnsupportedHostError, match="not built"):
        gpu_nvfp4_moe._apply()


@pytest.mark.parametrize(("setting", "needed"), [("auto", False), ("marlin", False), ("hybrid", True)])
def test_patches_are_needed_only_when_asked_for(monkeypatch: pytest.MonkeyPatch, setting: str, needed: bool) -> None:
    monkeypatch.setenv(backend.VARIABLE, setting)
    assert [p.needed().needed for p in (gpu_nvfp4_moe.PATCH, gpu_nvfp4_moe_block.PATCH)] == [needed, needed]
