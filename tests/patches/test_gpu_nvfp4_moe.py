"""Which experts our kernels take, with which weights and scales, and that the rest is left to vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.patches.moe_block import Loaded  # noqa: E402
from tests.patches.moe_patched import GROUPED, LIBRARY, MOST, SMALL, ExpertsStandIn, table  # noqa: E402

from qwen_nvfp4_patches import backend, gpu_nvfp4_moe, gpu_nvfp4_moe_block, seams  # noqa: E402
from qwen_nvfp4_serve.errors import UnsupportedHostError  # noqa: E402
from qwen_nvfp4_serve.kernels import admission  # noqa: E402
from qwen_nvfp4_serve.kernels.admission import Shape, Span  # noqa: E402
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS, WITHOUT_LIMIT  # noqa: E402
from qwen_nvfp4_serve.synthetic import CheckpointSpec  # noqa: E402
from qwen_nvfp4_serve.synthetic.config import model_config  # noqa: E402


def test_experts_keep_the_global_scales_of_gate_and_up(patched_experts: dict[str, ExpertsStandIn]) -> None:
    loaded = Loaded("ct-w4a4")
    held = loaded.block.experts.routed_experts.nvfp4_experts
    assert not torch.equal(held.gate_scale, held.up_scale)
    for ours, wanted in zip(held.tensors(), loaded.weights.tensors(), strict=True):
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=1e-6, atol=0)


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
    patched_experts: dict[str, ExpertsStandIn], change: dict[str, Any], words: str
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


def test_experts_in_other_schemes_or_formats_are_left_to_vllm(patched_experts: dict[str, ExpertsStandIn]) -> None:
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
    patched_experts: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

    loaded = Loaded("ct-w4a4")
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", gpu_nvfp4_moe.EXPERTS)
    with set_current_vllm_config(loaded.config):
        reason = gpu_nvfp4_moe.refusal(loaded.block.experts.moe_config, kNvfp4Static, None)
    assert reason == "VLLM_DISABLED_KERNELS names it"


def test_selection_without_an_admitted_kernel_is_vllms(
    patched_experts: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
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
    patched_experts: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Loaded("ct-w4a4").block.experts.moe_config
    text = model_config(CheckpointSpec())["text_config"]
    wanted = Shape(2 * text["moe_intermediate_size"], 256, text["num_experts"], text["num_experts_per_tok"])
    assert gpu_nvfp4_moe.shape_of(config) == wanted


def test_kernels_that_round_activations_serve_only_checkpoints_that_do(
    patched_experts: dict[str, ExpertsStandIn], monkeypatch: pytest.MonkeyPatch
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


def test_conversion_of_other_layers_is_vllms(patched_experts: dict[str, ExpertsStandIn]) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    names = dict.fromkeys(gpu_nvfp4_moe.CONVERT[2:11])
    found = nvfp4.convert_to_nvfp4_moe_kernel_format(
        nvfp4_backend=nvfp4.NvFp4MoeBackend.FLASHINFER_MOE_EP_CUTEDSL, layer=torch.nn.Module(), **names
    )
    assert found == (None,) * 8


def test_apply_twice_replaces_once_in_every_module(patched_experts: dict[str, ExpertsStandIn]) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4
    from vllm.model_executor.layers.quantization import modelopt

    first = nvfp4.select_nvfp4_moe_backend
    gpu_nvfp4_moe._apply()
    gpu_nvfp4_moe_block._apply()
    assert nvfp4.select_nvfp4_moe_backend is first is modelopt.select_nvfp4_moe_backend
    assert getattr(first, seams.MARK) is seams.stock_of(first)


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
