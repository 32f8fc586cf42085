"""The checkpoint generator: the same weights in every style, exact dequantization, whole folders only."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from qwen_nvfp4_serve.cli.make_checkpoint import make_checkpoint
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.synthetic import (
    ARCHITECTURES,
    STYLES,
    CheckpointSpec,
    Precision,
    ensure_checkpoint,
    write_checkpoint,
    writing,
)
from qwen_nvfp4_serve.synthetic import config as documents
from qwen_nvfp4_serve.synthetic.layout import weights_of
from qwen_nvfp4_serve.synthetic.tokenizer import silent_ids, tokenizer_json

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
SafetensorError = pytest.importorskip("safetensors").SafetensorError

TINY = {"hidden": 64, "layers": 2, "attention_interval": 2, "head_dim": 32, "q_heads": 2, "kv_heads": 1}
GDN = {"gdn_k_heads": 1, "gdn_v_heads": 2}
MOE = dataclasses.replace(
    ARCHITECTURES["embedded"],
    **TINY,
    **GDN,
    experts=4,
    experts_per_token=2,
    expert_intermediate=32,
    shared_intermediate=32,
)
DENSE = dataclasses.replace(ARCHITECTURES["embedded-dense"], **TINY, **GDN, intermediate=96)
QUANTIZED = [style.name for style in STYLES if style.name != "bf16"]
LAYER = "model.language_model.layers"


def spec(style: str = "ct-w4a4", **changes: object) -> CheckpointSpec:
    return dataclasses.replace(CheckpointSpec(architecture=MOE, style=style, mtp=False), **changes)


def load(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors_torch.load_file(path)
    return tensors


def meaning(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """BF16 weight of a stored module, worked out from the formats' definitions alone."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([magnitudes, -magnitudes])
    packed = tensors.get(f"{module}.weight_packed", tensors.get(f"{module}.weight"))
    if packed.dtype is not torch.uint8:
        scale = tensors.get(f"{module}.weight_scale")
        return packed if scale is None else (packed.float() * scale.float()).bfloat16()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    scale = tensors[f"{module}.weight_scale"].float().repeat_interleave(16, 1)
    if f"{module}.weight_global_scale" in tensors:
        overall = 1.0 / tensors[f"{module}.weight_global_scale"]
    else:
        overall = tensors[f"{module}.weight_scale_2"]
    return (values[codes] * scale * overall).bfloat16()


@pytest.mark.parametrize("dims", [MOE, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("style", QUANTIZED)
def test_write_dequantized_equals_the_formats_definition(tmp_path: Path, style: str, dims: object) -> None:
    quantized = load(write_checkpoint(tmp_path / "q", spec(style, architecture=dims)))
    plain = load(write_checkpoint(tmp_path / "p", spec(style, architecture=dims, dequantized=True)))
    modules = {name.removesuffix(".weight_scale") for name in quantized if name.endswith(".weight_scale")}
    assert modules
    for module in modules:
        if ".experts." in module:
            parent, expert, part = module.rsplit(".", 2)
            stack = plain[f"{parent}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(expert)]
            half = 1 if part == "up_proj" else 0
            want = stack if part == "down_proj" else stack.chunk(2)[half]
        else:
            want = plain[f"{module}.weight"]
        assert torch.equal(meaning(quantized, module), want), module


@pytest.mark.parametrize("style", ["modelopt-nvfp4", "ct-w4a16"])
def test_write_the_same_precision_under_other_names_means_the_same_weights(tmp_path: Path, style: str) -> None:
    first = load(write_checkpoint(tmp_path / "a", spec("ct-w4a4", dequantized=True)))
    second = load(write_checkpoint(tmp_path / "b", spec(style, dequantized=True)))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_write_other_seed_gives_other_weights(tmp_path: Path) -> None:
    first = load(write_checkpoint(tmp_path / "a", spec("bf16")))
    second = load(write_checkpoint(tmp_path / "b", spec("bf16", seed=1)))
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])


@pytest.mark.parametrize("unequal", [False, True])
def test_write_global_scales_are_shared_unless_unequal(tmp_path: Path, unequal: bool) -> None:
    tensors = load(write_checkpoint(tmp_path / "a", spec("ct-w4a4", unequal_scales=unequal)))
    groups = [
        [f"{LAYER}.1.self_attn.{part}_proj" for part in "qkv"],
        [f"{LAYER}.0.mlp.experts.3.{part}_proj" for part in ("gate", "up")],
        [f"{LAYER}.0.mlp.shared_expert.{part}_proj" for part in ("gate", "up")],
    ]
    for group in groups:
        scales = {float(tensors[f"{module}.weight_global_scale"]) for module in group}
        assert (len(scales) > 1) is unequal


@pytest.mark.parametrize("style", [style.name for style in STYLES])
def test_write_never_quantizes_what_the_family_keeps(tmp_path: Path, style: str) -> None:
    tensors = load(write_checkpoint(tmp_path / "a", spec(style, mtp=True, vision=True)))
    kept = ("mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b", "mtp.", "visual", "embed_tokens", "conv1d")
    for name, tensor in tensors.items():
        if any(part in name for part in kept):
            assert tensor.dtype is torch.bfloat16, name
            assert not name.endswith("scale"), name


@pytest.mark.parametrize("style", QUANTIZED)
def test_configuration_names_every_kept_linear(style: str) -> None:
    declared = documents.quantization_config(spec(style))
    assert declared is not None
    kept = f"{LAYER}.0.mlp.gate"
    assert kept in declared["ignore"]
    assert (f"{LAYER}.0.linear_attn.out_proj" in declared["ignore"]) is not style.endswith("mixed")


def test_modelopt_mixed_declares_experts_once_for_a_layer() -> None:
    layers = documents.quantization_config(spec("modelopt-mixed"))["quantized_layers"]  # type: ignore[index]
    assert layers[f"{LAYER}.0.mlp.experts"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert layers[f"{LAYER}.1.self_attn.q_proj"] == {"quant_algo": "FP8"}
    assert not any(".experts.0." in name for name in layers)


def test_write_sharded_index_covers_every_tensor(tmp_path: Path) -> None:
    whole = load(write_checkpoint(tmp_path / "a", spec()))
    folder = write_checkpoint(tmp_path / "b", spec(shard_bytes=100_000))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {path.name: safetensors_torch.load_file(path) for path in folder.glob("*.safetensors")}
    assert len(shards) > 1
    assert index["weight_map"].keys() == whole.keys()
    assert all(torch.equal(shards[shard][name], whole[name]) for name, shard in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


def test_write_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "_write_documents", fail)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "a", spec())
    assert list(tmp_path.iterdir()) == []


def test_write_into_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        write_checkpoint(tmp_path, spec())
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_write_full_disk_is_one_sentence_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "older").write_text("")
    monkeypatch.setattr(safetensors_torch, "save_file", fail)
    with pytest.raises(QwenNvfp4Error, match="/a cannot be written: seen No space left"):
        write_checkpoint(tmp_path / "a", spec(), overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "older"]


def test_write_failed_rename_puts_the_older_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return real(self, target)

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "older").write_text("")
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(QwenNvfp4Error, match="Input/output"):
        write_checkpoint(tmp_path / "a", spec(), overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "older"]


def test_write_removes_what_killed_runs_left_and_nothing_else(tmp_path: Path) -> None:
    gone, alive = 2**22 + 1, os.getppid()
    names = [f".a.partial-{gone}", f".a.retired-{gone}", f".a.partial-{alive}", f".b.partial-{gone}", ".a.partial-x"]
    for name in names:
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path / "a", spec())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[2:], "a"])


@pytest.mark.parametrize("dest", ["file", "file/model", "file/deep/model", "x" * 300])
def test_make_checkpoint_where_no_folder_can_be_is_refused(tmp_path: Path, dest: str) -> None:
    (tmp_path / "file").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="checkpoint folder") as caught:
            make_checkpoint(tmp_path / dest, overwrite=overwrite)
        assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_make_checkpoint_in_a_read_only_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match="seen Permission denied"):
        make_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("receipt", ["", "{", "[" * 100_000, "null"])
def test_ensure_unreadable_receipt_is_not_ours(tmp_path: Path, receipt: str) -> None:
    (tmp_path / "synthetic.json").write_text(receipt)
    with pytest.raises(UsageError, match=r"synthetic\.json"):
        ensure_checkpoint(tmp_path, spec())
    assert [path.name for path in tmp_path.iterdir()] == ["synthetic.json"]


def test_ensure_writes_once_and_again_for_another_spec(tmp_path: Path) -> None:
    folder = ensure_checkpoint(tmp_path / "a", spec())
    stamp = (folder / "config.json").stat().st_mtime_ns
    ensure_checkpoint(folder, spec())
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    ensure_checkpoint(folder, spec("bf16"))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "changes",
    [
        {"style": "nvfp5"},
        {"gdn": Precision.FP8_TENSOR},
        {"architecture": dataclasses.replace(MOE, hidden=40)},
        {"architecture": dataclasses.replace(MOE, experts_per_token=5)},
    ],
)
def test_write_impossible_spec_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="expected"):
        write_checkpoint(tmp_path / "a", dataclasses.replace(spec(), **changes))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("preset", "billions"), [("35b-a3b", 35.952), ("27b", 27.8)])
def test_real_presets_have_the_published_parameter_count(preset: str, billions: float) -> None:
    real = CheckpointSpec(architecture=ARCHITECTURES[preset], vision=True)
    count = 0
    for weight in weights_of(real):
        size = 1
        for dim in weight.shape:
            size *= dim
        count += size
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_tokenizer_round_trips_every_byte_and_decodes_every_id() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(320)))
    text = "Grüße, 世界 🙂\n\t<|im_start|>user <think>x</think>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert all(isinstance(tokenizer.decode([index]), str) for index in range(320))
    assert len(tokenizer.encode("<|im_end|>").ids) == 1


def test_random_head_is_silent_where_text_would_break(tmp_path: Path) -> None:
    tensors = load(write_checkpoint(tmp_path / "a", spec("bf16")))
    head = tensors["lm_head.weight"]
    assert not head[silent_ids(320)].any()
    assert head[ord("a")].any()
