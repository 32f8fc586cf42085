"""Our kernel class inside vLLM's selection and loading, with a card that is only pretended.

What runs here is the choice, the scales, the op and its plan; the CUDA kernels have tests of their own, on a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches import backend, fused_scales, gpu_nvfp4_linear, seams  # noqa: E402
from qwen_nvfp4_serve.errors import UnsupportedHostError, UsageError  # noqa: E402
from qwen_nvfp4_serve.kernels import admission  # noqa: E402
from qwen_nvfp4_serve.kernels.admission import CANDIDATES, EXACT, Finding, Shape, Table, Verdict, dispatch  # noqa: E402
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS  # noqa: E402
from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4, quantize_nvfp4, unswizzle_scales  # noqa: E402

pytestmark = pytest.mark.usefixtures("any_cpu_vllm")
ROWS, COLUMNS = 96, 128
SHAPE = Shape(ROWS, COLUMNS)
STOCK = "EmulationNvFp4LinearKernel"


@pytest.fixture(scope="module")
def any_cpu_vllm(cpu_vllm: None) -> None:
    """As in the other patch tests."""


class StandIn:
    """A candidate that remembers its calls and computes the definition."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, []

    def run(self, x: Any, weight: Any, y: Any, *, bias: Any = None, scales: Any = None) -> None:
        n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
        self.calls.append((x.shape[0], weight.shard_rows, weight.shard_scales, scales))
        dense = dequantize_nvfp4(weight.packed, unswizzle_scales(weight.scales, n, k // 16), weight.row_scale)
        y[:] = (x.float() @ dense.T + (0 if bias is None else bias.float())).bfloat16()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> tuple[StandIn, ...]:
    found = tuple(StandIn(name) for name in CANDIDATES)
    monkeypatch.setattr(dispatch, "servers", lambda: found)
    return found


def table(*names: str, most: int = 4096, shape: Shape = SHAPE) -> Table:
    """Each of `names` admitted, the first the fastest up to `most` tokens and not able beyond."""
    findings = []
    for index, name in enumerate(names):
        times = tuple((m, 1.0 + index) for m in TIMED_TOKENS if index or m <= most)
        findings.append(Finding(candidate=name, shape=shape, verdict=Verdict.ADMITTED, times_us=times))
    return Table(facts={}, findings=tuple(findings), took_s=0.0)


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> Table:
    found = table("qwen-small-m", "qwen-dequantized", most=64)
    monkeypatch.setattr(gpu_nvfp4_linear, "admitted_table", lambda: found)
    return found


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, admitted: Table) -> Iterator[Any]:
    """vLLM's selection as on a card of compute capability 12.0 with our library built, restored afterwards."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum, current_platform

    monkeypatch.setattr(gpu_nvfp4_linear, "unsupported", lambda: None)
    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/var/cache/vllm")
    monkeypatch.setenv(backend.VARIABLE, "hybrid")
    before = linear.init_nvfp4_linear_kernel
    original = seams.stock_of(before)
    monkeypatch.setattr(linear, "init_nvfp4_linear_kernel", original)
    stock = next(kernel for kernel in linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA] if kernel.__name__ == STOCK)
    monkeypatch.setitem(linear._POSSIBLE_NVFP4_KERNELS, PlatformEnum.CUDA, [stock])
    modules = importing_modules(original)
    torch.set_default_dtype(torch.bfloat16)
    yield linear
    torch.set_default_dtype(torch.float32)
    for module in modules:
        module.init_nvfp4_linear_kernel = before


def importing_modules(original: Any) -> list[Any]:
    """The modules of vLLM that took the function by its name."""
    import sys

    from vllm.model_executor.layers.quantization import modelopt  # noqa: F401
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (  # noqa: F401
        compressed_tensors_w4a4_nvfp4,
    )

    found = [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]
    taken = [module for module in found if hasattr(module, "init_nvfp4_linear_kernel")]
    for module in taken:
        module.init_nvfp4_linear_kernel = original  # type: ignore[attr-defined]
    return taken


@pytest.mark.parametrize("use_a16", [False, True], ids=["w4a4", "w4a16"])
def test_selection_takes_our_kernel_for_both_kinds(card: Any, use_a16: bool) -> None:
    gpu_nvfp4_linear._apply()
    gpu_nvfp4_linear._apply()
    assert type(card.init_nvfp4_linear_kernel(use_a16=use_a16)).__name__ == gpu_nvfp4_linear.KERNEL
    from vllm.model_executor.layers.quantization import modelopt

    assert modelopt.init_nvfp4_linear_kernel is card.init_nvfp4_linear_kernel
    from vllm.platforms import PlatformEnum

    names = [kernel.__name__ for kernel in card._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]]
    assert names == [gpu_nvfp4_linear.KERNEL, STOCK]


@pytest.mark.parametrize(
    "variable", [("VLLM_BATCH_INVARIANT", "1"), ("VLLM_DISABLED_KERNELS", gpu_nvfp4_linear.KERNEL)]
)
def test_selection_that_vllm_was_told_is_left_alone(
    card: Any, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    gpu_nvfp4_linear._apply()
    monkeypatch.setenv(*variable)
    assert not gpu_nvfp4_linear._free_to_choose()


def test_selection_with_our_kernel_disabled_is_vllms(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_nvfp4_linear._apply()
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", gpu_nvfp4_linear.KERNEL)
    assert type(card.init_nvfp4_linear_kernel()).__name__ == STOCK


def test_selection_for_a_model_in_float16_is_left_to_vllm(card: Any) -> None:
    gpu_nvfp4_linear._apply()
    torch.set_default_dtype(torch.float16)
    assert type(card.init_nvfp4_linear_kernel()).__name__ == STOCK


def test_stock_kernel_is_vllms_choice_without_ours(card: Any) -> None:
    from vllm.platforms import PlatformEnum

    gpu_nvfp4_linear._apply()
    assert type(gpu_nvfp4_linear.stock_kernel(use_a16=False)).__name__ == STOCK
    assert card._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA][0].__name__ == gpu_nvfp4_linear.KERNEL


def test_apply_moves_vllms_compiled_graphs_to_a_folder_of_our_own_once(card: Any) -> None:
    import os

    gpu_nvfp4_linear._apply()
    first = os.environ["VLLM_CACHE_ROOT"]
    gpu_nvfp4_linear._apply()
    assert os.environ["VLLM_CACHE_ROOT"] == first
    assert Path(first).parent == Path("/var/cache/vllm")


def layer_of(*sizes: float, w4a4: bool = True) -> tuple[Any, Any]:
    """A fused layer of equal shards as a kernel gets it, and its BF16 weight. Shard i was quantized for `sizes[i]`."""
    torch.manual_seed(0)
    widths = [ROWS // len(sizes)] * len(sizes)
    shards = [
        quantize_nvfp4(torch.randn(width, COLUMNS).float(), size / 2688)
        for width, size in zip(widths, sizes, strict=True)
    ]
    layer = torch.nn.Module()
    tensors = {
        "weight": torch.cat([shard.packed for shard in shards]),
        "weight_scale": torch.cat([shard.block_scale for shard in shards]),
        "weight_global_scale": torch.stack([shard.global_scale for shard in shards]).max(),
    }
    if w4a4:
        tensors |= {
            "input_global_scale": torch.tensor(0.25, dtype=torch.float32),
            "input_global_scale_inv": torch.tensor(4.0, dtype=torch.float32),
            "alpha": tensors["weight_global_scale"] / 4,
        }
    for name, tensor in tensors.items():
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    layer.logical_widths = widths
    layer.input_size_per_partition, layer.output_size_per_partition = COLUMNS, ROWS
    layer.nvfp4_shard_scales = torch.stack([shard.global_scale for shard in shards])
    return layer, torch.cat([shard.dequantize(torch.float32) for shard in shards])


def kernel() -> Any:
    from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearLayerConfig

    return gpu_nvfp4_linear.kernel_class()(NvFp4LinearLayerConfig())


@pytest.mark.parametrize("tokens", [1, 64, 65])
@pytest.mark.parametrize("sizes", [(4.0,), (4.0, 30.0, 9.0)], ids=["one scale", "unequal scales"])
def test_layer_computes_its_own_shards_scales_with_the_server_of_m(
    card: Any, servers: tuple[StandIn, ...], sizes: tuple[float, ...], tokens: int
) -> None:
    layer, dense = layer_of(*sizes)
    ours, x, bias = kernel(), torch.randn(2, tokens, COLUMNS)[:1], torch.randn(ROWS)
    ours.process_weights_after_loading(layer)
    y = ours.apply_weights(layer, x, bias)
    assert y.shape == (1, tokens, ROWS)
    assert torch.equal(y[0], (x[0].float() @ dense.T + bias.float()).bfloat16())
    small, large = len(servers[0].calls), len(servers[1].calls)
    assert (small, large) == ((1, 0) if tokens <= 64 else (0, 1))


def test_layer_no_tokens_gives_an_empty_result(card: Any, servers: tuple[StandIn, ...]) -> None:
    layer, _ = layer_of(4.0)
    ours = kernel()
    ours.process_weights_after_loading(layer)
    assert ours.apply_weights(layer, torch.empty(0, COLUMNS)).shape == (0, ROWS)
    assert not servers[0].calls


def test_layer_of_equal_scales_is_one_shard_and_keeps_its_weight_in_place(
    card: Any, servers: tuple[StandIn, ...]
) -> None:
    layer, _ = layer_of(4.0, 4.0)
    packed = layer.weight.data_ptr()
    kernel().process_weights_after_loading(layer)
    assert layer.weight.data_ptr() == packed
    assert layer.nvfp4_shards.tolist() == [[96.0, pytest.approx(4 / 2688)]]
    assert layer.weight_scale.shape == (128, 8)


@pytest.mark.parametrize(
    "kind",
    [((4.0,), True, "flashinfer-cutlass"), ((4.0, 9.0), True, "qwen-dequantized"), ((4.0,), False, "qwen-dequantized")],
    ids=["w4a4", "unequal scales", "w4a16"],
)
def test_library_gemm_serves_w4a4_layers_of_one_scale_only(
    card: Any,
    servers: tuple[StandIn, ...],
    monkeypatch: pytest.MonkeyPatch,
    kind: tuple[tuple[float, ...], bool, str],
) -> None:
    sizes, w4a4, name = kind
    found = table("flashinfer-cutlass", "qwen-dequantized")
    monkeypatch.setattr(gpu_nvfp4_linear, "admitted_table", lambda: found)
    layer, _ = layer_of(*sizes, w4a4=w4a4)
    ours = kernel()
    ours.process_weights_after_loading(layer)
    ours.apply_weights(layer, torch.randn(3, COLUMNS))
    called = [server.name for server in servers if server.calls]
    assert called == [name]
    if name not in EXACT:
        (served,) = [server for server in servers if server.calls]
        scales = served.calls[0][3]
        assert scales.tolist() == [4.0, pytest.approx(float(layer.alpha))]


def test_layer_without_admitted_kernels_goes_to_vllms_own(
    card: Any, servers: tuple[StandIn, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_nvfp4_linear, "admitted_table", lambda: table("qwen-dequantized", shape=Shape(1, 1)))
    gpu_nvfp4_linear._apply()
    layer, _ = layer_of(4.0)
    ours = kernel()
    before = layer.weight_scale.data.clone()
    with pytest.raises(UsageError, match=r"no admitted kernels"):
        gpu_nvfp4_linear.adopt(layer)
    assert torch.equal(layer.weight_scale.view(torch.uint8), before.view(torch.uint8))
    ours.process_weights_after_loading(layer)
    assert type(layer.nvfp4_stock_kernel).__name__ == STOCK
    handed: list[Any] = []
    layer.nvfp4_stock_kernel.apply_weights = lambda **given: handed.append(given)
    ours.apply_weights(layer, torch.randn(3, COLUMNS), None)
    assert set(handed[0]) == {"layer", "x", "bias"}
    assert not any(server.calls for server in servers)


def test_layer_whose_shards_begin_off_a_multiple_of_8_goes_to_vllms_own(card: Any) -> None:
    gpu_nvfp4_linear._apply()
    layer, _ = layer_of(4.0, 9.0)
    layer.logical_widths = [20, 76]
    kernel().process_weights_after_loading(layer)
    assert type(layer.nvfp4_stock_kernel).__name__ == STOCK


def test_shards_of_a_layer_that_vllm_quantized_itself_have_its_scalar() -> None:
    layer, _ = layer_of(4.0)
    del layer.nvfp4_shard_scales, layer.logical_widths
    rows, scales = gpu_nvfp4_linear.shards_of(layer)
    assert (rows, scales) == ((96,), (pytest.approx(4 / 2688),))


def test_shards_with_another_number_of_scales_are_refused() -> None:
    layer, _ = layer_of(4.0, 9.0)
    layer.logical_widths = [32, 32, 32]
    with pytest.raises(UsageError, match="2 for 3 shards"):
        gpu_nvfp4_linear.shards_of(layer)


def test_op_traced_has_no_number_of_tokens_plan_or_scale_in_its_graph(card: Any, servers: tuple[StandIn, ...]) -> None:
    layer, _ = layer_of(4.0, 9.0)
    ours = kernel()
    ours.process_weights_after_loading(layer)
    graphs: list[Any] = []

    def keep(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: ours.apply_weights(layer, x), backend=keep, fullgraph=True, dynamic=True)
    for tokens in (3, 70, 200):
        assert compiled(torch.randn(tokens, COLUMNS)).shape == (tokens, ROWS)
    assert len(graphs) == 1
    (call,) = [node for node in graphs[0].graph.nodes if "admitted_linear" in str(node.target)]
    assert all(argument is None or isinstance(argument, torch.fx.Node) for argument in call.args)
    assert (len(servers[0].calls), len(servers[1].calls)) == (1, 2)


@pytest.mark.parametrize("value", ["auto", "stock", "marlin"])
def test_patches_are_not_needed_on_a_card_unless_hybrid_is_asked(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setenv(backend.VARIABLE, value)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert not gpu_nvfp4_linear._needed().needed
    assert not fused_scales._needed().needed
    monkeypatch.setenv(backend.VARIABLE, "hybrid")
    assert gpu_nvfp4_linear._needed().needed
    assert fused_scales._needed().needed


def test_hybrid_without_a_card_or_a_library_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_nvfp4_linear, "unsupported", lambda: "kernel library nvfp4_linear is not built")
    with pytest.raises(UnsupportedHostError, match=r"not built.*NVFP4_BACKEND=auto"):
        gpu_nvfp4_linear._apply()


def test_unsupported_on_a_cpu_says_there_is_no_card() -> None:
    assert "no CUDA card" in (gpu_nvfp4_linear.unsupported() or "")


def test_backend_with_an_unknown_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "fastest")
    with pytest.raises(UsageError, match="auto, hybrid"):
        backend.nvfp4_backend()


def test_backend_knows_what_the_knob_knows() -> None:
    from typing import get_args

    from qwen_nvfp4_serve.settings import Settings

    assert get_args(Settings.model_fields["nvfp4_backend"].annotation) == backend.KNOWN


def test_admitted_table_asks_for_the_shapes_of_the_model_being_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import vllm.config

    from qwen_nvfp4_serve import host
    from qwen_nvfp4_serve.dims import dims_from_config
    from qwen_nvfp4_serve.synthetic import CheckpointSpec
    from qwen_nvfp4_serve.synthetic.config import model_config

    asked: dict[str, Any] = {}

    def admit(shapes: Any, **more: Any) -> Table:
        asked.update(more, shapes=shapes)
        return table("qwen-dequantized")

    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: model_config(CheckpointSpec()))),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    cards = [host.Gpu(name=n, capability=(9, 0), memory_bytes=1, free_bytes=1, driver="9") for n in ("Other", "H200")]
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(admission, "admit", admit)
    monkeypatch.setattr(host, "detect_gpus", lambda _: tuple(cards))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpu_nvfp4_linear.admitted_table.__wrapped__()
    assert asked["device"] == "cuda:1"
    assert asked["card"].name == "H200"
    dims = dims_from_config(model_config(CheckpointSpec()))
    assert Shape(dims.hidden, dims.q_heads * dims.head_dim) in asked["shapes"]


def loaded_layer(kind: str, use_a16: bool) -> tuple[Any, Any, Any]:
    """A fused layer of three shards through vLLM's own scheme: the layer, who computes it, its weight as float32."""
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4

    torch.manual_seed(1)
    shards = [quantize_nvfp4(torch.randn(rows, COLUMNS).float() * size) for rows, size in ((64, 1), (16, 8), (16, 3))]
    widths, scales = [shard.packed.shape[0] for shard in shards], torch.stack([shard.global_scale for shard in shards])
    layer, ignored = torch.nn.Module(), {"weight_loader": lambda *_, **__: None}
    if kind == "compressed-tensors":
        scheme = CompressedTensorsW4A4Fp4(use_a16=use_a16)
        scheme.create_weights(layer, widths, COLUMNS, torch.bfloat16, **ignored)
        packed, layer.weight_global_scale.data[:] = layer.weight_packed, 1 / scales
        inputs = None if use_a16 else layer.input_global_scale
    else:
        activation = None if use_a16 else modelopt.kNvfp4Dynamic
        scheme = modelopt.ModelOptLinearMethod(
            modelopt.QuantSpec(weight=modelopt.kNvfp4Static, activation=activation), modelopt.CkptCtx(group_size=16)
        )
        scheme.create_weights(layer, COLUMNS, widths, COLUMNS, ROWS, torch.bfloat16, **ignored)
        packed, layer.weight_scale_2.data[:] = layer.weight, scales
        inputs = None if use_a16 else layer.input_scale
    packed.data[:] = torch.cat([shard.packed for shard in shards])
    layer.weight_scale.data[:] = torch.cat([shard.block_scale for shard in shards])
    if inputs is not None:
        inputs.data.fill_(4.0 if kind == "compressed-tensors" else 0.25)
    scheme.process_weights_after_loading(layer)
    return layer, scheme.kernel, torch.cat([shard.dequantize() for shard in shards])


@pytest.mark.parametrize("use_a16", [False, True], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("kind", ["compressed-tensors", "modelopt"])
def test_unequal_shards_through_vllms_own_loading_equal_their_dequantization(
    card: Any, servers: tuple[StandIn, ...], monkeypatch: pytest.MonkeyPatch, kind: str, use_a16: bool
) -> None:
    from vllm.model_executor import parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    gpu_nvfp4_linear._apply()
    fused_scales._apply()
    layer, ours, dense = loaded_layer(kind, use_a16)
    x = torch.randn(5, COLUMNS)
    assert torch.equal(ours.apply_weights(layer, x), (x.float() @ dense.T).bfloat16())
    assert len(layer.nvfp4_shards) == 3
    assert (layer.nvfp4_input_scales is None) is use_a16
    if not use_a16:
        assert float(layer.nvfp4_input_scales[0]) == 4.0
