"""A delta net layer's two projections as one product: vLLM's own layers, loader and forward, with a pretended card."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches import backend, gpu_bf16_linear, gpu_gdn_projections, seams  # noqa: E402
from qwen_nvfp4_serve.errors import UnsupportedHostError  # noqa: E402
from qwen_nvfp4_serve.kernels.admission import bf16  # noqa: E402

pytestmark = pytest.mark.usefixtures("vllm_parallel")
HIDDEN, KEYS, VALUES, HEAD = 64, 32, 64, 16
ROWS, MORE = 2 * KEYS + 2 * VALUES, 2 * VALUES // HEAD


def whole(*shape: int, seed: int = 0) -> Any:
    """Small whole numbers: every product of them is exact, whatever the order of its sum."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def config_of(*, adapters: Any = None, **offload: Any) -> Any:
    """What a layer's constructor reads of vLLM's configuration."""
    from vllm.config import OffloadConfig

    return SimpleNamespace(lora_config=adapters, offload_config=OffloadConfig(**offload))


def layer_of(dtype: Any = torch.bfloat16, *, bias: bool = False, hidden: int = HIDDEN, more: int = MORE) -> Any:
    """What vLLM's forward reads of a delta net layer, its projections by vLLM's own classes."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    def projection(*sizes: int) -> Any:
        return MergedColumnParallelLinear(hidden, list(sizes), bias=bias, params_dtype=dtype)

    layer = SimpleNamespace(
        in_proj_qkvz=projection(KEYS, KEYS, VALUES, VALUES),
        in_proj_ba=projection(more // 2, more // 2),
        key_dim=KEYS,
        value_dim=VALUES,
        head_v_dim=HEAD,
        num_v_heads=VALUES // HEAD,
        tp_size=1,
        prefix="a.layer",
        gqa_interleaved_layout=False,
        disable_tp_for_ba_proj=False,
        enable_fused_gdn_spec_decode=False,
        norm=SimpleNamespace(weight=torch.ones(1)),
        _output_projection=lambda out, z: torch.cat((out.flatten(-2), z.flatten(-2)), dim=-1),
    )
    layer.split_ba = MethodType(QwenGatedDeltaNetAttention.split_ba, layer)
    return layer


def load(layer: Any) -> None:
    """Weights through vLLM's loader, shard by shard."""
    for name, sizes in (("in_proj_qkvz", (KEYS, KEYS, VALUES, VALUES)), ("in_proj_ba", (MORE // 2,) * 2)):
        parameter = getattr(layer, name).weight
        for shard, rows in enumerate(sizes):
            parameter.weight_loader(parameter, whole(rows, HIDDEN, seed=7 * rows + shard), shard)
    for projection in (layer.in_proj_qkvz, layer.in_proj_ba):
        projection.quant_method._gemm_impl = lambda _, x, weight, bias: torch.nn.functional.linear(x, weight, bias)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's forward for a card; its core copies into the output what it is handed."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    def core(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
        handed = torch.cat((mixed_qkv, b, a), dim=-1)
        core_attn_out.copy_(handed[:, : core_attn_out[0].numel()].reshape(core_attn_out.shape))
        core_attn_out += handed.sum(-1)[:, None, None] % 5

    monkeypatch.setattr(torch.ops.vllm, "qwen_gdn_attention_core", core, raising=False)
    monkeypatch.setattr(gpu_bf16_linear, "is_ours", lambda _: True)
    return seams.stock_of(QwenGatedDeltaNetAttention.forward_cuda)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights that our op multiplied with."""
    seen: list[tuple[int, ...]] = []
    stock = bf16._bf16_linear

    def counted(x: Any, weight: Any, bias: Any) -> Any:
        seen.append(tuple(weight.shape))
        return stock(x, weight, bias)

    monkeypatch.setattr(bf16, "_bf16_linear", counted)
    return seen


def build(**changed: Any) -> Any:
    """A layer as our constructor leaves it."""
    layer = SimpleNamespace()

    def stock(self: Any, config: Any, vllm_config: Any, prefix: str = "") -> None:
        vars(self).update(vars(layer_of(**changed)))

    gpu_gdn_projections.with_one_weight(stock)(layer, None, config_of(), prefix="a.layer")
    return layer


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_one_product_gives_what_two_gave(forward: Any, products: list[tuple[int, ...]], tokens: int) -> None:
    plain, ours = layer_of(), build()
    load(plain)
    load(ours)
    x = whole(tokens, HIDDEN, seed=tokens)
    expected = forward(plain, x)
    assert torch.equal(gpu_gdn_projections.projected_once(forward)(ours, x), expected)
    assert products == [(ROWS + MORE, HIDDEN)]
    assert expected.abs().sum() > 0


def test_weights_that_lie_elsewhere_since_are_two_products(forward: Any, products: list[tuple[int, ...]]) -> None:
    plain, ours = layer_of(), build()
    load(plain)
    load(ours)
    ours.in_proj_ba.weight.data = ours.in_proj_ba.weight.data.clone()
    x = whole(2, HIDDEN)
    assert torch.equal(gpu_gdn_projections.projected_once(forward)(ours, x), forward(plain, x))
    assert products == [(ROWS, HIDDEN), (MORE, HIDDEN)]


def test_activations_are_multiplied_as_usual(forward: Any) -> None:
    assert forward is not None
    plain, ours = layer_of(), build()
    load(plain)
    load(ours)
    x = whole(5, HIDDEN)
    for name in ("in_proj_qkvz", "in_proj_ba"):
        assert torch.equal(getattr(ours, name)(x)[0], getattr(plain, name)(x)[0])


def test_layer_that_was_not_put_together_goes_through_vllm_alone(forward: Any, products: list[tuple[int, ...]]) -> None:
    layer = build(dtype=torch.float32)
    load(layer)
    gpu_gdn_projections.projected_once(forward)(layer, whole(2, HIDDEN).float())
    assert not products


def obstacle(layer: Any, **configured: Any) -> str:
    return gpu_gdn_projections.obstacle(layer, config_of(**configured)) or ""


def test_what_is_in_the_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bf16_linear, "is_ours", lambda _: True)
    assert not obstacle(layer_of())
    assert "adapters" in obstacle(layer_of(), adapters="some")
    assert "not both are in BF16" in obstacle(layer_of(dtype=torch.float16))
    assert "bias" in obstacle(layer_of(bias=True))
    assert f"[{ROWS}, {ROWS + MORE}]" in obstacle(layer_of(hidden=ROWS + MORE))
    assert f"[{ROWS}, {HIDDEN}] and [{MORE + 4}, {HIDDEN}]" in obstacle(layer_of(more=MORE + 4))  # of odd lines
    for offload in ({"uva": {"cpu_offload_gb": 1}}, {"prefetch": {"offload_group_size": 2}}):
        assert "offload" in obstacle(layer_of(), **offload)
    drafting = layer_of()
    drafting.enable_fused_gdn_spec_decode = True
    assert "draft" in obstacle(drafting)
    quantized = layer_of()
    quantized.in_proj_ba.quant_method = SimpleNamespace()
    assert "not both are in BF16" in obstacle(quantized)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "batch" in obstacle(layer_of())
    monkeypatch.undo()
    assert "told" in obstacle(layer_of())


def test_what_admission_serves_is_known_as_ours() -> None:
    assert gpu_bf16_linear.is_ours(gpu_bf16_linear.admitted_gemm(None))
    assert not gpu_bf16_linear.is_ours(torch.nn.functional.linear)


def test_class_is_changed_once_and_no_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    names = ("__init__", "forward_cuda")
    for name in names:
        monkeypatch.setattr(QwenGatedDeltaNetAttention, name, getattr(QwenGatedDeltaNetAttention, name))
    gpu_gdn_projections._apply()
    first = [getattr(QwenGatedDeltaNetAttention, name) for name in names]
    gpu_gdn_projections._apply()
    assert [getattr(QwenGatedDeltaNetAttention, name) for name in names] == first
    monkeypatch.undo()

    def forward_cuda(self: Any, hidden_states: Any, output: Any) -> None: ...

    monkeypatch.setattr(QwenGatedDeltaNetAttention, "forward_cuda", forward_cuda)
    monkeypatch.setattr(QwenGatedDeltaNetAttention, "__init__", seams.stock_of(QwenGatedDeltaNetAttention.__init__))
    with pytest.raises(UnsupportedHostError, match="forward_cuda"):
        gpu_gdn_projections._apply()


@pytest.mark.parametrize(("chosen", "needed"), [("hybrid", True), ("auto", False)])
def test_patch_is_for_hybrid_alone(monkeypatch: pytest.MonkeyPatch, chosen: str, needed: bool) -> None:
    monkeypatch.setenv(backend.VARIABLE, chosen)
    assert gpu_gdn_projections.PATCH.needed().needed is needed
