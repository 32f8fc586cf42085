"""The inspector on whole folders: shards, index, config.json, sound checkpoints, and what is made of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint_files import (
    LAYER,
    codes,
    compressed_tensors,
    gdn_plain,
    inspect_tensors,
    packed_ct,
    plain,
    write_config,
    write_shard,
)

from qwen_nvfp4_serve.checkpoint import inspect_folder, knows_type, plan_model, require_servable
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.planner import PlanRequest, plan
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, STYLES, CheckpointSpec, write_checkpoint


def write_sharded(folder: Path, total_size: int) -> None:
    """Two shards of 6e9 bytes each under an index that declares `total_size`."""
    write_config(folder)
    names = {
        f"model-0000{i}-of-00002.safetensors": f"model.language_model.layers.{i}.mlp.gate_proj.weight" for i in (1, 2)
    }
    for shard, name in names.items():
        write_shard(folder / shard, {name: ("BF16", (3_000_000, 1000))})
    index = {"metadata": {"total_size": total_size}, "weight_map": {name: shard for shard, name in names.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kept_bytes", [0, 3, 8, 100, 1000, 100_000])
def test_case_truncated_names_the_file(tmp_path: Path, kept_bytes: int) -> None:
    tensors = gdn_plain() | {
        f"model.language_model.layers.{i}.input_layernorm.weight": ("BF16", (5120,)) for i in range(64)
    }
    write_config(tmp_path)
    write_shard(tmp_path / "model-00001-of-00002.safetensors", gdn_plain())
    cut = tmp_path / "model-00002-of-00002.safetensors"
    write_shard(cut, tensors)
    with cut.open("r+b") as file:
        file.truncate(kept_bytes)
    report = inspect_folder(tmp_path)
    assert codes(report.errors) == ["shard"]
    assert report.errors[0].names == (cut.name,)


@pytest.mark.parametrize(
    ("total", "errors", "warnings"),
    [
        (20_000_000_000, ["short"], []),
        (12_200_000_000, ["short"], []),
        (12_050_000_000, [], []),
        (12_000_000_000, [], []),
        (9_000_000_000, [], ["index"]),
    ],
)
def test_case_short_compares_index_and_shards(
    tmp_path: Path, total: int, errors: list[str], warnings: list[str]
) -> None:
    write_sharded(tmp_path, total)
    report = inspect_folder(tmp_path)
    assert (codes(report.errors), codes(report.warnings)) == (errors, warnings)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, 12_000_000_000)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    report = inspect_folder(tmp_path)
    assert codes(report.errors) == ["missing-shard"]
    assert report.errors[0].names == ("model-00002-of-00002.safetensors",)


def test_index_naming_absent_tensor_is_an_error(tmp_path: Path) -> None:
    write_sharded(tmp_path, 12_000_000_000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    report = inspect_folder(tmp_path)
    assert codes(report.errors) == ["index"]
    assert report.errors[0].names == ("lm_head.weight",)


def test_index_naming_a_file_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    write_shard(tmp_path / "outside.safetensors", plain("lm_head", 8, 16))
    folder = tmp_path / "model"
    write_config(folder)
    index = {"weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert codes(inspect_folder(folder).errors) == ["missing-shard"]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"model_type": "llama"}, "architecture"),
        ({"model_type": "qwen3"}, "architecture"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "unknown-method"),
        ({"quantization_config": ["nvfp4"]}, "config"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "ignore": "lm_head"}}, "config"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {}}}}, "config"),
        ({"quantization_config": compressed_tensors(ignore=["re:*bad("])}, "config"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}, "config"),
        ({"text_config": {"num_hidden_layers": -3}}, "config"),
        ({"text_config": {"hidden_size": "many"}}, "config"),
    ],
)
def test_config_that_cannot_be_served_is_one_error(tmp_path: Path, config: dict[str, Any], code: str) -> None:
    report = inspect_tensors(tmp_path, plain("lm_head", 8, 16), **config)
    assert codes(report.errors) == [code]


def test_auto_map_is_a_warning_and_never_run(tmp_path: Path) -> None:
    report = inspect_tensors(tmp_path, plain("lm_head", 8, 16), auto_map={"AutoModel": "modeling.Model"})
    assert codes(report.warnings) == ["remote-code"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": ', "\x00\x01"])
def test_broken_config_json_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        inspect_folder(tmp_path)


def test_empty_config_and_no_weights_are_one_error_each(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert codes(inspect_folder(tmp_path).errors) == ["config"]
    write_config(tmp_path)
    assert codes(inspect_folder(tmp_path).errors) == ["no-weights"]


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": {}}',
        b'{"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "BF16", "shape": [4], "data_offsets": [-8, 0]}}',
        b'{"a": {"dtype": "BF16", "shape": "x", "data_offsets": [0, 8]}}',
        b'{"a": 3}',
    ],
)
def test_damaged_header_is_named(tmp_path: Path, header: bytes) -> None:
    write_config(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    report = inspect_folder(tmp_path)
    assert codes(report.errors) == ["shard"]
    assert report.errors[0].names == ("model.safetensors",)


@pytest.mark.parametrize("style", [style.name for style in STYLES])
@pytest.mark.parametrize("architecture", ["embedded", "embedded-dense"])
def test_sound_checkpoint_of_each_style_has_no_error(tmp_path: Path, style: str, architecture: str) -> None:
    spec = CheckpointSpec(architecture=ARCHITECTURES[architecture], style=style, vision=True)
    report = inspect_folder(write_checkpoint(tmp_path / "model", spec), speculative_tokens=1, vision=True)
    assert report.errors == ()
    assert (report.mtp, report.vision) == (True, True)
    stored = sum(tensor.stat().st_size for tensor in (tmp_path / "model").glob("*.safetensors"))
    assert report.weights is not None
    assert report.weights.total == pytest.approx(stored, rel=0.02)


def test_plan_model_of_folder_without_weights_is_computed(tmp_path: Path) -> None:
    quantization = compressed_tensors(ignore=["lm_head", "re:.*linear_attn.*", "re:.*visual.*", "re:.*mtp.*"])
    write_config(tmp_path, quantization_config=quantization)
    model = plan_model(inspect_folder(tmp_path), "shape")
    # vLLM 0.33.0 loaded this shape in 25.18 GiB on an H200.
    assert (model.weights.decoder + model.weights.embeddings) / 2**30 == pytest.approx(25.18, rel=0.01)
    assert plan(PlanRequest(model=model)).block_size_tokens == 1568


@pytest.mark.parametrize("kept_bytes", [None, 0, 100])
def test_plan_of_shards_that_cannot_be_read_says_so(tmp_path: Path, kept_bytes: int | None) -> None:
    spec = CheckpointSpec(architecture=ARCHITECTURES["embedded-dense"], style=STYLES[0].name)
    folder = write_checkpoint(tmp_path / "model", spec)
    assert not any(
        "shards" in notice for notice in plan(PlanRequest(model=plan_model(inspect_folder(folder), "x"))).notices
    )
    sound = plan_model(inspect_folder(folder), "x").weights
    for shard in folder.glob("*.safetensors"):
        shard.unlink() if kept_bytes is None else shard.write_bytes(shard.read_bytes()[:kept_bytes])
    model = plan_model(inspect_folder(folder), "x")
    assert model.weights.decoder == pytest.approx(sound.decoder, rel=0.02)
    notices = plan(PlanRequest(model=model)).notices
    assert any("shards could not be read: weights are estimated" in notice for notice in notices)


@pytest.mark.parametrize("is_there", [True, False])
def test_plan_of_one_lost_shard_counts_all_weights(tmp_path: Path, is_there: bool) -> None:
    write_config(tmp_path)
    names = ["model.language_model.embed_tokens", f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.down_proj"]
    tensors = gdn_plain() | {name: shape for module in names for name, shape in plain(module, 64, 64).items()}
    write_shard(tmp_path / "model-00001-of-00002.safetensors", tensors)
    if is_there:
        (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"")
    model = plan_model(inspect_folder(tmp_path), "x")
    assert model.weights.decoder > 2 * 24e9  # the 27B's in BF16
    assert any("shards could not be read" in notice for notice in plan(PlanRequest(model=model)).notices)


def test_plan_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    report = inspect_tensors(tmp_path, plain("lm_head", 8, 16), model_type="llama")
    with pytest.raises(UsageError, match="llama"):
        plan_model(report, "x")


def test_require_servable_raises_the_first_error(tmp_path: Path) -> None:
    with pytest.raises(QwenNvfp4Error, match="is packed"):
        require_servable(inspect_tensors(tmp_path, packed_ct(f"{LAYER}.mlp.down_proj", 64, 64)))


def test_knows_type_installed_transformers_decides() -> None:
    pytest.importorskip("transformers")
    assert knows_type("qwen3_5_moe") is True
    assert knows_type("no_such_type") is False
    assert knows_type("../../etc") is False
    assert knows_type("x" * 5000) is False
