"""The gated delta rule, the rounding, and a short training run on a CPU."""

import json
import sys
import time
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
torch = pytest.importorskip("torch")

from training import checkpoint, export  # noqa: E402
from training.calibrate import input_amax  # noqa: E402
from training.config import MODELS, TINY  # noqa: E402
from training.gdn import gated_delta_rule, unit_lower_inverse  # noqa: E402
from training.model import ReferenceModel, Rows, initialize, rotary  # noqa: E402
from training.optim import MasterWeights  # noqa: E402
from training.quant import fake_quantize, fake_quantize_activation  # noqa: E402
from training.train import _rest, load_state, options_from, run  # noqa: E402

from qwen_nvfp4_serve.kernels.nvfp4 import dequantize_nvfp4, quantize_nvfp4  # noqa: E402


def test_unit_lower_inverse_random_equals_linalg() -> None:
    strict = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1)).tril(-1) * 0.3
    expected = torch.linalg.inv((torch.eye(64) + strict).double())
    assert (unit_lower_inverse(strict) - expected).abs().max() / expected.abs().max() < 1e-4


def test_gated_delta_rule_packed_documents_equal_recurrence_with_gradients() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(1, 128, 1, 32, generator=generator, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 128, 2, 32, generator=generator, requires_grad=True)
    decay = (-torch.rand(1, 128, 2, generator=generator)).requires_grad_()
    beta = torch.rand(1, 128, 2, generator=generator).requires_grad_()
    document = (torch.arange(128) >= 70).int()[None]
    leaves = (query, key, value, decay, beta)
    ours = gated_delta_rule(query=query, key=key, value=value, log_decay=decay, beta=beta, document=document)
    parts = [
        modeling.torch_recurrent_gated_delta_rule(
            query[:, part].repeat_interleave(2, 2),
            key[:, part].repeat_interleave(2, 2),
            value[:, part],
            g=decay[:, part],
            beta=beta[:, part],
            use_qk_l2norm_in_kernel=True,
        )[0]
        for part in (slice(0, 70), slice(70, 128))
    ]
    expected = torch.cat(parts, 1)
    assert (ours - expected).norm() / expected.norm() < 1e-5
    weight = torch.randn(ours.shape, generator=generator)
    got = torch.autograd.grad((ours * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    assert all((left - right).norm() / right.norm() < 1e-4 for left, right in zip(got, wanted, strict=True))


def test_fake_quantize_weights_equal_the_kernels_format() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    scale = float(weight.abs().max()) / (6 * 448)
    stored = quantize_nvfp4(weight, scale)
    assert torch.allclose(fake_quantize(weight, scale), stored.dequantize(), rtol=1e-6)


def test_fake_quantize_activation_outlier_is_not_clipped() -> None:
    values = torch.full((1, 4, 32), 0.5)
    values[0, 0, 0] = 5000.0
    rounded = fake_quantize_activation(values)
    assert rounded[0, 0, 0] == pytest.approx(5000.0, rel=0.1)
    assert rounded[0, 1, 0] == pytest.approx(0.5, rel=0.1)


def test_refresh_quantized_leaves_masters_and_matches_the_exported_weights() -> None:
    model = ReferenceModel(TINY)
    initialize(model, 4)
    weights = MasterWeights(model, torch.device("cpu"), torch.float32)
    before = {name: master.clone() for name, master in weights.masters.items()}
    weights.refresh(quantized=True)
    assert all(torch.equal(before[name], master) for name, master in weights.masters.items())
    packed, _ = export.quantize(dict(weights.masters))
    name = "layers.0.mlp.experts.gate_up_proj"
    seen = model.get_parameter(name)[2]
    pair = [packed[f"layers.0.mlp.experts.2.{leaf}"].dequantize() for leaf in ("gate_proj", "up_proj")]
    assert torch.allclose(seen, torch.cat(pair), atol=1e-7)


def test_write_both_packagings_same_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = ReferenceModel(TINY)
    initialize(model, 5)
    tokens = torch.arange(64)[None]
    largest = input_amax(model, Rows(tokens, torch.zeros_like(tokens), *rotary(64, tokens.device, torch.float32)))
    export.write_compressed_tensors(tmp_path / "ct", TINY, model.state_dict(), largest)
    export.convert_to_modelopt(tmp_path / "ct", tmp_path / "mo")
    ours, theirs = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("ct", "mo"))
    modules = [name.removesuffix(".weight_packed") for name in ours if name.endswith(".weight_packed")]
    assert len(modules) > 30
    for module in modules:
        first = dequantize_nvfp4(
            ours[f"{module}.weight_packed"], ours[f"{module}.weight_scale"], 1 / ours[f"{module}.weight_global_scale"]
        )
        second = dequantize_nvfp4(
            theirs[f"{module}.weight"], theirs[f"{module}.weight_scale"], theirs[f"{module}.weight_scale_2"]
        )
        assert torch.allclose(first, second, rtol=1e-6)
    gate, up = (
        f"model.language_model.layers.0.mlp.experts.0.{leaf}.weight_global_scale" for leaf in ("gate_proj", "up_proj")
    )
    assert torch.equal(ours[gate], ours[up])
    assert (
        json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]["quant_method"]
        == "compressed-tensors"
    )


def test_read_checkpoint_gives_the_rounded_parameters(tmp_path: Path) -> None:
    model = ReferenceModel(TINY)
    initialize(model, 6)
    largest = dict.fromkeys(export.quantize(export.published(model.state_dict()))[0], 8.0)
    export.write_compressed_tensors(tmp_path, TINY, model.state_dict(), largest)
    config, state = checkpoint.read(tmp_path)
    assert config == TINY
    assert {name: tensor.shape for name, tensor in state.items()} == {
        name: parameter.shape for name, parameter in model.named_parameters()
    }
    error = state["layers.0.mlp.experts.down_proj"] - model.get_parameter("layers.0.mlp.experts.down_proj")
    assert 0.05 < error.norm() / model.get_parameter("layers.0.mlp.experts.down_proj").norm() < 0.15
    assert checkpoint.input_amax_of(tmp_path) == pytest.approx(largest)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_train_fifty_steps_on_cpu_lowers_the_loss_and_resumes(tmp_path: Path) -> None:
    common = ["--model", "tiny", "--state", str(tmp_path), "--rows", "2", "--length", "256", "--workers", "1"]
    common += ["--no-compile", "--evaluate-count", "0", "--total-seconds", "100000", "--slice-seconds", "500"]
    first = run(options_from([*common, "--max-steps", "50"]))
    losses = [float(line.split("[")[1].split(",")[0]) for line in first["log"]]
    assert losses[-1] < losses[0] - 1.5
    assert load_state(tmp_path, "tiny") is not None
    second = run(options_from([*common, "--max-steps", "2"]))
    assert second["step"] == 52
    resumed = float(second["log"][-1].split("[")[1].split(",")[0])
    assert resumed < losses[0] - 1


def test_rest_lasts_as_long_as_the_pause_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pause = tmp_path / "pause"
    assert _rest(None) == _rest(pause) == 0
    pause.touch()
    monkeypatch.setattr(time, "sleep", lambda _: pause.unlink())
    assert _rest(pause) > 0
    assert not pause.exists()


def test_models_named_as_the_commands_expect() -> None:
    assert set(MODELS) == {"moe", "dense", "tiny"}
