"""vLLM's mixture-of-experts block run through our patches: what runs as one op, and what is left to vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.patches.moe_block import Loaded, assert_within, tokens  # noqa: E402
from tests.patches.moe_patched import GROUPED, MOST, SMALL, ExpertsStandIn  # noqa: E402

from qwen_nvfp4_patches import gpu_nvfp4_moe, gpu_nvfp4_moe_block  # noqa: E402
from qwen_nvfp4_serve.kernels.admission import Span  # noqa: E402
from qwen_nvfp4_serve.kernels.admission.table import WITHOUT_LIMIT  # noqa: E402
from qwen_nvfp4_serve.kernels.nvfp4_moe import reference  # noqa: E402

STYLES = ("ct-w4a4", "ct-w4a16", "modelopt-nvfp4", "modelopt-mixed")


@pytest.mark.parametrize("style", STYLES)
def test_block_at_few_tokens_is_our_op_on_one_copy_of_the_weights(
    patched_experts: dict[str, ExpertsStandIn], style: str
) -> None:
    loaded = Loaded(style)
    layer = loaded.block.experts.routed_experts
    assert type(layer.quant_method.moe_kernel.fused_experts).__name__ == gpu_nvfp4_moe.EXPERTS
    assert loaded.block.qwen_nvfp4_eligible
    for count in (1, MOST):
        x = tokens(count)
        assert_within(loaded.run(x), loaded.expected(x))
    assert not any(stand_in.calls for stand_in in patched_experts.values())  # the block's own kernels did it
    block = gpu_nvfp4_moe_block.block_of(loaded.block.experts)
    assert block is not None
    assert block.shared is not None
    for name, parameter in (("w13", layer.w13_weight), ("w2", layer.w2_weight)):
        assert getattr(block.experts, name).data_ptr() == parameter.data_ptr()
    assert block.shared.w13.data_ptr() == loaded.block.shared_expert.gate_up_proj.weight.data_ptr()


@pytest.mark.parametrize("style", STYLES)
def test_block_at_many_tokens_is_vllms_with_our_experts_and_layers(
    patched_experts: dict[str, ExpertsStandIn], style: str
) -> None:
    loaded, x = Loaded(style), tokens(MOST + 3)
    assert_within(loaded.run(x), loaded.expected(x), roundings=4)
    ((count, scales),) = patched_experts[GROUPED].calls
    assert count == MOST + 3
    assert patched_experts[SMALL].calls == []
    if loaded.input_scales is None:
        assert scales is None
    else:
        torch.testing.assert_close(scales, loaded.input_scales, rtol=1e-6, atol=0)


def test_shared_expert_in_bf16_is_left_to_vllm_beside_our_routed_ones(
    patched_experts: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, x = Loaded("ct-w4a4", ignore="re:.*shared_expert.*"), tokens(2)
    assert loaded.shared is None
    monkeypatch.setattr(type(loaded.block.shared_expert), "forward", lambda _self, x: x * 2)
    routed = reference.moe_block(x, loaded.block.gate.weight.data, loaded.weights, top_k=loaded.top_k)
    expected = reference.Bounded(routed.value + 2 * x.double(), routed.bound)
    assert_within(loaded.run(x), expected, roundings=2)
    assert not any(stand_in.calls for stand_in in patched_experts.values())


def test_block_with_its_experts_ids_captured_runs_as_vllms(patched_experts: dict[str, ExpertsStandIn]) -> None:
    loaded, seen = Loaded("ct-w4a4"), []
    loaded.block.experts.router.set_capture_fn(seen.append)
    loaded.run(tokens(1))
    assert len(seen) == 1
    assert [count for count, _ in patched_experts[SMALL].calls] == [1]


def test_block_is_one_op_under_torch_compile(patched_experts: dict[str, ExpertsStandIn]) -> None:
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
    patched_experts: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch, where: str, value: Any, words: str
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


def test_block_without_our_verdict_runs_vllms_forward(patched_experts: dict[str, ExpertsStandIn]) -> None:
    loaded = Loaded("ct-w4a4")
    loaded.block.qwen_nvfp4_eligible = False
    x = tokens(2)
    assert_within(loaded.run(x), loaded.expected(x), roundings=4)
    assert [count for count, _ in patched_experts[SMALL].calls] == [2]


def test_block_whose_one_token_goes_elsewhere_is_left_to_vllm(
    patched_experts: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_nvfp4_moe, "spans_for", lambda _config, **_: (Span(WITHOUT_LIMIT, GROUPED),))
    loaded, x = Loaded("ct-w4a4"), tokens(1)
    assert gpu_nvfp4_moe_block.block_of(loaded.block.experts) is None
    assert_within(loaded.run(x), loaded.expected(x), roundings=4)
    assert [count for count, _ in patched_experts[GROUPED].calls] == [1]
