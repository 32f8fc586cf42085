"""Our op in the place where vLLM asks what multiplies BF16 layers, with a card that is only pretended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches import backend, gpu_bf16_linear, gpu_nvfp4_linear, seams  # noqa: E402
from qwen_nvfp4_serve.kernels import admission  # noqa: E402
from qwen_nvfp4_serve.kernels.admission import Finding, Table, Verdict, bf16  # noqa: E402
from qwen_nvfp4_serve.kernels.admission.table import TIMED_TOKENS  # noqa: E402

pytestmark = pytest.mark.usefixtures("cpu_vllm")
NAME = "dispatch_unquantized_gemm"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's function as on a card with our libraries built, restored afterwards wherever it was taken by name."""
    from vllm.model_executor.layers import linear, utils  # noqa: F401

    stock = seams.stock_of(getattr(utils, NAME))
    before = {
        module: vars(module)[NAME]
        for name, module in list(sys.modules.items())
        if name.startswith("vllm") and NAME in vars(module)
    }

    def on_a_card(linear_backend: str = "auto") -> Any:
        told = linear_backend != "auto"
        return utils.cpu_unquantized_gemm if told else utils.default_unquantized_gemm

    on_a_card.__module__, on_a_card.__qualname__ = stock.__module__, stock.__qualname__
    for module in before:
        monkeypatch.setattr(module, NAME, on_a_card)
    monkeypatch.setattr(gpu_nvfp4_linear, "unsupported", lambda: None)
    monkeypatch.setattr(gpu_bf16_linear, "_building", lambda: False)
    monkeypatch.setenv(backend.VARIABLE, "hybrid")
    yield utils
    for module, function in before.items():
        setattr(module, NAME, function)


def test_vllm_is_answered_with_ours_everywhere_and_once(card: Any) -> None:
    from vllm.model_executor.layers import linear

    gpu_bf16_linear._apply()
    first = card.dispatch_unquantized_gemm
    gpu_bf16_linear._apply()
    assert card.dispatch_unquantized_gemm is first is linear.dispatch_unquantized_gemm
    assert card.dispatch_unquantized_gemm("auto") is not card.default_unquantized_gemm


def test_choice_that_vllm_was_told_is_left_alone(card: Any) -> None:
    gpu_bf16_linear._apply()
    assert card.dispatch_unquantized_gemm("flashinfer_cutlass") is card.cpu_unquantized_gemm


def test_machine_that_our_kernels_cannot_run_on_is_left_alone(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_nvfp4_linear, "unsupported", lambda: "no card")
    gpu_bf16_linear._apply()
    assert card.dispatch_unquantized_gemm() is card.default_unquantized_gemm


def test_answer_is_given_again_and_again_without_looking_for_libraries(
    card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_bf16_linear._apply()
    monkeypatch.setattr(gpu_nvfp4_linear, "unsupported", lambda: pytest.fail("looked again"))
    first = card.dispatch_unquantized_gemm()
    assert card.dispatch_unquantized_gemm() is first is not card.default_unquantized_gemm


@pytest.mark.parametrize(("dtype", "ours"), [(torch.bfloat16, True), (torch.float32, False), (torch.float16, False)])
def test_only_bf16_matrices_go_to_the_op(card: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any, ours: bool) -> None:
    gpu_bf16_linear._apply()
    calls: list[Any] = []
    monkeypatch.setattr(bf16, "_plans", Remembering(calls))
    x, weight = torch.randn(3, 256, dtype=dtype), torch.randn(64, 256, dtype=dtype)
    y = card.dispatch_unquantized_gemm()(torch.nn.Module(), x, weight, None)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight))
    assert calls == ([(64, 256)] if ours else [])


class Remembering(dict[Any, Any]):
    """No plans; which shapes were asked for."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def get(self, key: Any, default: Any = None) -> Any:
        self.calls.append(key)
        return default


def test_model_that_is_built_has_its_layers_admitted_once(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(gpu_bf16_linear, "_building", lambda: True)
    monkeypatch.setattr(gpu_bf16_linear, "follow_admission", lambda: asked.append(1))
    gpu_bf16_linear._apply()
    card.dispatch_unquantized_gemm()
    assert asked == [1]


def test_admission_is_of_the_models_shapes_and_the_op_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import vllm.config

    from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec
    from qwen_nvfp4_serve.synthetic.config import model_config

    values = model_config(CheckpointSpec(architecture=ARCHITECTURES["35b-a3b"], style="ct-w4a4"))
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(to_dict=lambda: values)),
        kernel_config=SimpleNamespace(linear_backend="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(gpu_nvfp4_linear, "this_card", lambda: (SimpleNamespace(name="a card"), "cuda:0"))

    def admit(shapes: Any, *, names: Any, spec: str, **_: Any) -> Table:
        assert (names, spec) == (admission.BF16, admission.BF16_SPEC)
        times = tuple((m, 1.0) for m in TIMED_TOKENS)
        found = [Finding(candidate=names[1], shape=s, verdict=Verdict.ADMITTED, times_us=times) for s in shapes]
        return Table(facts={}, findings=tuple(found), took_s=0.0)

    monkeypatch.setattr(admission, "admit", admit)
    gpu_bf16_linear.follow_admission.cache_clear()
    try:
        gpu_bf16_linear.follow_admission()
        assert bf16._plans[12288 // 2, 2048][-1].candidate == admission.BF16[1]
        assert (2048, 4096 // 2) in bf16._plans
    finally:
        gpu_bf16_linear.follow_admission.cache_clear()
        bf16._plans.clear()


@pytest.mark.parametrize(
    ("dtype", "told", "values"),
    [
        (torch.float16, "auto", None),
        (torch.bfloat16, "marlin", None),
        (torch.bfloat16, "auto", {"model_type": "llama", "hidden_size": 4096}),
    ],
    ids=["float16", "told", "another family"],
)
def test_model_that_is_not_for_our_kernel_is_built_without_an_admission(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, told: str, values: dict[str, Any] | None
) -> None:
    from types import SimpleNamespace

    import vllm.config

    from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec
    from qwen_nvfp4_serve.synthetic.config import model_config

    values = values or model_config(CheckpointSpec(architecture=ARCHITECTURES["35b-a3b"], style="ct-w4a4"))
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, hf_config=SimpleNamespace(to_dict=lambda: values)),
        kernel_config=SimpleNamespace(linear_backend=told),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(admission, "admit", lambda *_, **__: pytest.fail("admitted"))
    gpu_bf16_linear.follow_admission.cache_clear()
    try:
        gpu_bf16_linear.follow_admission()
        assert not bf16._plans
    finally:
        gpu_bf16_linear.follow_admission.cache_clear()
