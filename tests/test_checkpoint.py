"""The inspector on folders with one fault each, and on sound ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint_files import (
    LAYER,
    NVFP4_GROUP,
    Shape,
    packed_ct,
    packed_modelopt,
    plain,
    write_config,
    write_shard,
)

from qwen_nvfp4_serve.checkpoint import Report, inspect_folder, knows_type, plan_model, require_servable
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.planner import PlanRequest, plan
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, STYLES, CheckpointSpec, write_checkpoint

CASES = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "data" / "checkpoint_cases.json").read_text())
}
GDN = f"{LAYER}.linear_attn"
GDN_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
GDN_ROWS = {"in_proj_qkv": 10240, "in_proj_z": 6144, "in_proj_b": 48, "in_proj_a": 48}


def gdn_plain() -> dict[str, Shape]:
    """The four input projections of a GDN layer in BF16."""
    return {name: shape for part in GDN_PARTS for name, shape in plain(f"{GDN}.{part}", GDN_ROWS[part], 5120).items()}


def inspect(
    folder: Path, tensors: dict[str, Shape], *, values: dict[str, float] | None = None, **config: Any
) -> Report:
    """The report on a one-shard checkpoint of these tensors. speculative_tokens and vision are for the inspector."""
    asked = {key: config.pop(key) for key in ("speculative_tokens", "vision") if key in config}
    write_config(folder, **config)
    write_shard(folder / "model.safetensors", tensors, values)
    return inspect_folder(folder, **asked)


def codes(faults: tuple[Any, ...]) -> list[str]:
    return [fault.code for fault in faults]


def compressed_tensors(**keys: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": NVFP4_GROUP},
        **keys,
    }


def test_case_ct_ignore_ok_has_no_error(tmp_path: Path) -> None:
    report = inspect(tmp_path, gdn_plain(), quantization_config=CASES["ct-ignore-ok"]["quantization_config"])
    assert report.errors == ()
    assert report.precision.by_class["in_proj_ba"] == "BF16"


@pytest.mark.parametrize("dropped", GDN_PARTS)
def test_case_ct_ignore_mixed_names_the_fused_module(tmp_path: Path, dropped: str) -> None:
    quantization = copy.deepcopy(CASES["ct-ignore-ok"]["quantization_config"])
    quantization["ignore"] = [name for name in quantization["ignore"] if not name.endswith(dropped)]
    report = inspect(tmp_path, gdn_plain(), quantization_config=quantization)
    fused = "in_proj_ba" if dropped in ("in_proj_a", "in_proj_b") else "in_proj_qkvz"
    assert codes(report.errors) == ["fused-split"]
    assert report.errors[0].names == (f"{GDN}.{fused}",)
    assert report.precision.by_class[fused] == "mixed"


def test_case_ct_ignored_but_packed_names_the_part(tmp_path: Path) -> None:
    tensors = gdn_plain() | {f"{GDN}.in_proj_qkv.weight_packed": ("U8", (10240, 2560))}
    report = inspect(tmp_path, tensors, quantization_config=CASES["ct-ignore-ok"]["quantization_config"])
    assert codes(report.errors) == ["ignored-but-packed"]
    assert report.errors[0].names == (f"{GDN}.in_proj_qkv",)


@pytest.mark.parametrize(
    "pattern", ["re:.*linear_attn.*", r"re:.*layers\.\d+\.linear_attn\..*", "re:language_model.*in_proj"]
)
def test_case_ct_ignore_regex_covers_the_parts(tmp_path: Path, pattern: str) -> None:
    report = inspect(tmp_path, gdn_plain(), quantization_config=compressed_tensors(ignore=["lm_head", pattern]))
    assert report.errors == ()


def test_ct_ignore_regex_under_the_checkpoints_prefix_misses_vllms_names(tmp_path: Path) -> None:
    ignore = [r"re:model\.language_model\..*linear_attn.*"]
    report = inspect(tmp_path, gdn_plain(), quantization_config=compressed_tensors(ignore=ignore))
    assert codes(report.errors) == ["nvfp4-in-name-only"]


def test_case_mo_mixed_reads_the_lists(tmp_path: Path) -> None:
    tensors = {f"{GDN}.{part}.weight": ("F8_E4M3", (GDN_ROWS[part], 5120)) for part in ("in_proj_qkv", "in_proj_z")}
    tensors |= {f"{GDN}.out_proj.weight": ("F8_E4M3", (5120, 6144))}
    tensors |= plain(f"{GDN}.in_proj_b", 48, 5120) | plain(f"{GDN}.in_proj_a", 48, 5120)
    layers = {f"{GDN}.{part}": {"quant_algo": "FP8"} for part in ("in_proj_qkv", "in_proj_z", "out_proj")}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    report = inspect(tmp_path, tensors, quantization_config=quantization)
    assert report.errors == ()
    assert report.precision.by_class == {"in_proj_qkvz": "FP8", "out_proj": "FP8", "in_proj_ba": "BF16"}


@pytest.mark.parametrize("nested", [False, True], ids=["config.json", "hf_quant_config.json"])
def test_case_mo_w4a16_reads_the_layer(tmp_path: Path, nested: bool) -> None:
    body = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {f"{LAYER}.mlp.down_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
    }
    tensors: dict[str, Shape] = {f"{LAYER}.mlp.down_proj.weight": ("U8", (5120, 8704))}
    write_config(tmp_path, **({} if nested else {"quantization_config": {"quant_method": "modelopt", **body}}))
    if nested:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": body}))
    write_shard(tmp_path / "model.safetensors", tensors)
    report = inspect_folder(tmp_path)
    assert report.errors == ()
    assert report.precision.by_class["down_proj"] == "NVFP4 W4A16"


@pytest.mark.parametrize(
    "body",
    [
        {"quant_algo": "FOO4"},
        {"quant_algo": "nvfp5", "exclude_modules": []},
        {"quant_algo": ""},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {f"{LAYER}.mlp.down_proj": {"quant_algo": "FOO4"}}},
    ],
)
def test_case_mo_unknown_algo_is_one_error(tmp_path: Path, body: dict[str, Any]) -> None:
    tensors: dict[str, Shape] = {f"{LAYER}.mlp.down_proj.weight": ("U8", (5120, 8704))}
    report = inspect(tmp_path, tensors, quantization_config={"quant_method": "modelopt", **body})
    assert codes(report.errors) == ["unknown-algorithm"]


@pytest.mark.parametrize(("asked", "errors"), [(0, []), (1, ["no-mtp"]), (3, ["no-mtp"])])
def test_case_no_mtp_is_an_error_when_drafts_are_asked(tmp_path: Path, asked: int, errors: list[str]) -> None:
    report = inspect(tmp_path, plain("lm_head", 8, 16), speculative_tokens=asked)
    assert codes(report.errors) == errors
    assert report.mtp is False
    assert all("mtp" in name for fault in report.errors for name in fault.names)


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
    ("rows", "columns", "warned"), [(4304, 1152, True), (1152, 4304, True), (4352, 1152, False), (1184, 64, True)]
)
def test_case_visual_packed_warns_about_odd_dims(tmp_path: Path, rows: int, columns: int, warned: bool) -> None:
    tensors = packed_ct("model.visual.blocks.0.mlp.linear_fc1", rows, columns)
    report = inspect(tmp_path, tensors, quantization_config=compressed_tensors(ignore=["lm_head"]))
    assert report.errors == ()
    assert codes(report.warnings) == (["odd-dims"] if warned else [])
    assert report.vision is True
    assert all("visual" in name for fault in report.warnings for name in fault.names)


def test_visual_fault_becomes_an_error_when_vision_is_used(tmp_path: Path) -> None:
    tensors = packed_ct("model.visual.blocks.0.mlp.linear_fc1", 64, 64)
    quantization = compressed_tensors(ignore=["re:visual.*"])
    assert codes(inspect(tmp_path, tensors, quantization_config=quantization).warnings) == ["ignored-but-packed"]
    used = inspect(tmp_path, tensors, quantization_config=quantization, vision=True)
    assert codes(used.errors) == ["ignored-but-packed"]


def test_kernel_dims_inputs_off_the_block_are_an_error(tmp_path: Path) -> None:
    report = inspect(tmp_path, packed_ct(f"{LAYER}.mlp.down_proj", 64, 1000), quantization_config=compressed_tensors())
    assert codes(report.errors) == ["kernel-dims"]
    assert "1,000 inputs" in report.errors[0].says


@pytest.mark.parametrize("writer", ["compressed-tensors", "modelopt"])
def test_unequal_global_scales_give_the_ratio(tmp_path: Path, writer: str) -> None:
    parts = {part: f"{LAYER}.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")}
    make = packed_ct if writer == "compressed-tensors" else packed_modelopt
    scale = "weight_global_scale" if writer == "compressed-tensors" else "weight_scale_2"
    tensors = {name: shape for module in parts.values() for name, shape in make(module, 1024, 5120).items()}
    values = {f"{module}.{scale}": 128.0 for module in parts.values()} | {f"{parts['v_proj']}.{scale}": 320.0}
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
    quantization = compressed_tensors() if writer == "compressed-tensors" else modelopt
    report = inspect(tmp_path, tensors, values=values, quantization_config=quantization)
    unequal = [fault for fault in report.warnings if fault.code == "unequal-scales"]
    assert report.errors == ()
    assert len(unequal) == 1
    assert "factor of 2.5" in unequal[0].says
    equal = dict.fromkeys(values, 128.0)
    assert "unequal-scales" not in codes(
        inspect(tmp_path, tensors, values=equal, quantization_config=quantization).warnings
    )


def test_unequal_global_scales_of_one_expert_are_found(tmp_path: Path) -> None:
    tensors: dict[str, Shape] = {}
    values = {}
    for expert in range(4):
        for part in ("gate_proj", "up_proj", "down_proj"):
            module = f"{LAYER}.mlp.experts.{expert}.{part}"
            tensors |= packed_ct(module, 64, 64)
            values[f"{module}.weight_global_scale"] = 8.0 if (expert, part) == (2, "up_proj") else 2.0
    report = inspect(tmp_path, tensors, values=values, quantization_config=compressed_tensors())
    assert report.errors == ()
    (fault,) = (fault for fault in report.warnings if fault.code == "unequal-scales")
    assert fault.names == (f"{LAYER}.mlp.experts.2",)
    assert "factor of 4" in fault.says


@pytest.mark.parametrize(("asked", "errors"), [(0, []), (2, ["quantized-mtp-fc"])])
def test_quantized_mtp_fc_is_an_error_when_drafts_are_asked(tmp_path: Path, asked: int, errors: list[str]) -> None:
    tensors = packed_ct("mtp.fc", 5120, 10240)
    report = inspect(tmp_path, tensors, quantization_config=compressed_tensors(), speculative_tokens=asked)
    assert codes(report.errors) == errors
    assert "quantized-mtp-fc" in codes(report.errors) + codes(report.warnings)


def test_quantized_gated_q_proj_is_a_warning(tmp_path: Path) -> None:
    tensors = {
        n: s for p in ("q_proj", "k_proj", "v_proj") for n, s in packed_ct(f"{LAYER}.self_attn.{p}", 1024, 64).items()
    }
    assert codes(inspect(tmp_path, tensors, quantization_config=compressed_tensors()).warnings) == ["gated-q-proj"]


@pytest.mark.parametrize("moment", ["declared", "none"])
def test_bf16_export_of_declared_nvfp4_is_one_error(tmp_path: Path, moment: str) -> None:
    tensors = gdn_plain() | plain(f"{LAYER}.mlp.down_proj", 5120, 17408)
    config = {"quantization_config": compressed_tensors()} if moment == "declared" else {}
    report = inspect(tmp_path, tensors, **config)
    assert codes(report.errors) == (["nvfp4-in-name-only"] if moment == "declared" else [])


def test_packed_weights_without_a_config_are_undeclared(tmp_path: Path) -> None:
    report = inspect(tmp_path, packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | packed_ct(f"{LAYER}.mlp.up_proj", 64, 64))
    assert codes(report.errors) == ["undeclared"]


def test_one_matrix_left_in_bf16_is_named(tmp_path: Path) -> None:
    tensors = packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | plain("model.language_model.layers.1.mlp.down_proj", 64, 64)
    report = inspect(tmp_path, tensors, quantization_config=compressed_tensors())
    assert codes(report.errors) == ["quantized-but-plain"]
    assert report.errors[0].names == ("model.language_model.layers.1.mlp.down_proj",)


def test_a_single_missing_scale_is_an_error(tmp_path: Path) -> None:
    tensors = packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | packed_ct(
        "model.language_model.layers.1.mlp.down_proj", 64, 64
    )
    del tensors["model.language_model.layers.1.mlp.down_proj.weight_scale"]
    report = inspect(tmp_path, tensors, quantization_config=compressed_tensors())
    assert codes(report.errors) == ["missing-scale"]


def test_router_stored_packed_is_an_error(tmp_path: Path) -> None:
    report = inspect(tmp_path, packed_ct(f"{LAYER}.mlp.gate", 64, 64), quantization_config=compressed_tensors())
    assert codes(report.errors) == ["ignored-but-packed"]
    assert "never quantizes" in report.errors[0].says


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
    report = inspect(tmp_path, plain("lm_head", 8, 16), **config)
    assert codes(report.errors) == [code]


def test_auto_map_is_a_warning_and_never_run(tmp_path: Path) -> None:
    report = inspect(tmp_path, plain("lm_head", 8, 16), auto_map={"AutoModel": "modeling.Model"})
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


def test_mixed_layers_are_exceptions_of_their_class(tmp_path: Path) -> None:
    tensors: dict[str, Shape] = {}
    for layer in range(8):
        module = f"model.language_model.layers.{layer}.mlp.down_proj"
        tensors |= packed_ct(module, 64, 64) if layer < 6 else {f"{module}.weight": ("F8_E4M3", (64, 64))}
    fp8 = {"targets": ["re:.*layers[.][67][.]mlp.*"], "weights": {"num_bits": 8, "type": "float"}}
    groups = {"fp8": {**fp8, "input_activations": {"num_bits": 8}}, "nvfp4": NVFP4_GROUP}
    quantization = {**compressed_tensors(), "config_groups": groups}
    report = inspect(tmp_path, tensors, quantization_config=quantization)
    assert report.errors == ()
    assert report.precision.by_class["down_proj"] == "NVFP4 W4A4"
    assert report.precision.exceptions == (("down_proj", "FP8", (6, 7)),)


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


def test_unequal_scales_of_a_whole_checkpoint_are_warnings(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", CheckpointSpec(unequal_scales=True))
    report = inspect_folder(folder)
    assert report.errors == ()
    assert "unequal-scales" in codes(report.warnings)


def test_plan_model_of_folder_without_weights_is_computed(tmp_path: Path) -> None:
    quantization = compressed_tensors(ignore=["lm_head", "re:.*linear_attn.*", "re:.*visual.*", "re:.*mtp.*"])
    write_config(tmp_path, quantization_config=quantization)
    model = plan_model(inspect_folder(tmp_path), "shape")
    # vLLM 0.33.0 loaded this shape in 25.18 GiB on an H200.
    assert (model.weights.decoder + model.weights.embeddings) / 2**30 == pytest.approx(25.18, rel=0.01)
    assert plan(PlanRequest(model=model)).block_size_tokens == 1568


def test_plan_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    report = inspect(tmp_path, plain("lm_head", 8, 16), model_type="llama")
    with pytest.raises(UsageError, match="llama"):
        plan_model(report, "x")


def test_require_servable_raises_the_first_error(tmp_path: Path) -> None:
    with pytest.raises(QwenNvfp4Error, match="is packed"):
        require_servable(inspect(tmp_path, packed_ct(f"{LAYER}.mlp.down_proj", 64, 64)))


def test_knows_type_installed_transformers_decides() -> None:
    pytest.importorskip("transformers")
    assert knows_type("qwen3_5_moe") is True
    assert knows_type("no_such_type") is False
    assert knows_type("../../etc") is False
    assert knows_type("x" * 5000) is False
