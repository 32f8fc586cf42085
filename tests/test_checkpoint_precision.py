"""What the inspector says of each module's precision: declared, stored, fused, or at odds with itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint_files import (
    GDN,
    GDN_PARTS,
    GDN_ROWS,
    LAYER,
    NVFP4_GROUP,
    Shape,
    codes,
    compressed_tensors,
    gdn_plain,
    inspect_tensors,
    packed_ct,
    packed_modelopt,
    plain,
    write_config,
    write_shard,
)

from qwen_nvfp4_serve.checkpoint import inspect_folder
from qwen_nvfp4_serve.synthetic import CheckpointSpec, write_checkpoint

CASES = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "data" / "checkpoint_cases.json").read_text())
}


def test_case_ct_ignore_ok_has_no_error(tmp_path: Path) -> None:
    report = inspect_tensors(tmp_path, gdn_plain(), quantization_config=CASES["ct-ignore-ok"]["quantization_config"])
    assert report.errors == ()
    assert report.precision.by_class["in_proj_ba"] == "BF16"


@pytest.mark.parametrize("dropped", GDN_PARTS)
def test_case_ct_ignore_mixed_names_the_fused_module(tmp_path: Path, dropped: str) -> None:
    quantization = copy.deepcopy(CASES["ct-ignore-ok"]["quantization_config"])
    quantization["ignore"] = [name for name in quantization["ignore"] if not name.endswith(dropped)]
    report = inspect_tensors(tmp_path, gdn_plain(), quantization_config=quantization)
    fused = "in_proj_ba" if dropped in ("in_proj_a", "in_proj_b") else "in_proj_qkvz"
    assert codes(report.errors) == ["fused-split"]
    assert report.errors[0].names == (f"{GDN}.{fused}",)
    assert report.precision.by_class[fused] == "mixed"


def test_case_ct_ignored_but_packed_names_the_part(tmp_path: Path) -> None:
    tensors = gdn_plain() | {f"{GDN}.in_proj_qkv.weight_packed": ("U8", (10240, 2560))}
    report = inspect_tensors(tmp_path, tensors, quantization_config=CASES["ct-ignore-ok"]["quantization_config"])
    assert codes(report.errors) == ["ignored-but-packed"]
    assert report.errors[0].names == (f"{GDN}.in_proj_qkv",)


@pytest.mark.parametrize(
    "pattern", ["re:.*linear_attn.*", r"re:.*layers\.\d+\.linear_attn\..*", "re:language_model.*in_proj"]
)
def test_case_ct_ignore_regex_covers_the_parts(tmp_path: Path, pattern: str) -> None:
    report = inspect_tensors(tmp_path, gdn_plain(), quantization_config=compressed_tensors(ignore=["lm_head", pattern]))
    assert report.errors == ()


def test_ct_ignore_regex_under_the_checkpoints_prefix_misses_vllms_names(tmp_path: Path) -> None:
    ignore = [r"re:model\.language_model\..*linear_attn.*"]
    report = inspect_tensors(tmp_path, gdn_plain(), quantization_config=compressed_tensors(ignore=ignore))
    assert codes(report.errors) == ["nvfp4-in-name-only"]


def test_case_mo_mixed_reads_the_lists(tmp_path: Path) -> None:
    tensors = {f"{GDN}.{part}.weight": ("F8_E4M3", (GDN_ROWS[part], 5120)) for part in ("in_proj_qkv", "in_proj_z")}
    tensors |= {f"{GDN}.out_proj.weight": ("F8_E4M3", (5120, 6144))}
    tensors |= plain(f"{GDN}.in_proj_b", 48, 5120) | plain(f"{GDN}.in_proj_a", 48, 5120)
    layers = {f"{GDN}.{part}": {"quant_algo": "FP8"} for part in ("in_proj_qkv", "in_proj_z", "out_proj")}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    report = inspect_tensors(tmp_path, tensors, quantization_config=quantization)
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


@pytest.mark.parametrize("place", ["text_config", "compression_config", "hf_quant_config.json"])
def test_quantization_is_found_wherever_vllm_looks(tmp_path: Path, place: str) -> None:
    write_config(tmp_path, **({place: compressed_tensors()} if place == "compression_config" else {}))
    config = json.loads((tmp_path / "config.json").read_text())
    if place == "text_config":
        config["text_config"]["quantization_config"] = compressed_tensors()
        (tmp_path / "config.json").write_text(json.dumps(config))
    if place == "hf_quant_config.json":
        (tmp_path / place).write_text(json.dumps(compressed_tensors()))
    write_shard(tmp_path / "model.safetensors", packed_ct(f"{LAYER}.mlp.down_proj", 64, 64))
    report = inspect_folder(tmp_path)
    assert report.errors == ()
    assert report.precision.by_class["down_proj"] == "NVFP4 W4A4"


def test_mo_mixed_without_layers_takes_those_of_the_other_file(tmp_path: Path) -> None:
    layers = {f"{LAYER}.mlp.down_proj": {"quant_algo": "W4A16_NVFP4"}}
    write_config(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})
    nested = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(nested))
    write_shard(tmp_path / "model.safetensors", packed_modelopt(f"{LAYER}.mlp.down_proj", 64, 64))
    report = inspect_folder(tmp_path)
    assert report.errors == ()
    assert report.precision.by_class["down_proj"] == "NVFP4 W4A16"


@pytest.mark.parametrize("groups", [{}, None, {"kv": {"targets": ["re:.*Attention"]}}])
def test_ct_groups_that_reach_no_matrix_leave_packed_ones_undeclared(tmp_path: Path, groups: Any) -> None:
    quantization = compressed_tensors() | {"config_groups": groups, "kv_cache_scheme": {"num_bits": 8}}
    tensors = packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | plain("lm_head", 64, 64)
    report = inspect_tensors(tmp_path, tensors, quantization_config=quantization)
    assert codes(report.errors) == ["undeclared"]
    assert codes(report.warnings) == ["kv-scales"]


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
    report = inspect_tensors(tmp_path, tensors, quantization_config={"quant_method": "modelopt", **body})
    assert codes(report.errors) == ["unknown-algorithm"]


@pytest.mark.parametrize(("asked", "errors"), [(0, []), (1, ["no-mtp"]), (3, ["no-mtp"])])
def test_case_no_mtp_is_an_error_when_drafts_are_asked(tmp_path: Path, asked: int, errors: list[str]) -> None:
    report = inspect_tensors(tmp_path, plain("lm_head", 8, 16), speculative_tokens=asked)
    assert codes(report.errors) == errors
    assert report.mtp is False
    assert all("mtp" in name for fault in report.errors for name in fault.names)


@pytest.mark.parametrize(
    ("rows", "columns", "warned"), [(4304, 1152, True), (1152, 4304, True), (4352, 1152, False), (1184, 64, True)]
)
def test_case_visual_packed_warns_about_odd_dims(tmp_path: Path, rows: int, columns: int, warned: bool) -> None:
    tensors = packed_ct("model.visual.blocks.0.mlp.linear_fc1", rows, columns)
    report = inspect_tensors(tmp_path, tensors, quantization_config=compressed_tensors(ignore=["lm_head"]))
    assert report.errors == ()
    assert codes(report.warnings) == (["odd-dims"] if warned else [])
    assert report.vision is True
    assert all("visual" in name for fault in report.warnings for name in fault.names)


def test_visual_fault_becomes_an_error_when_vision_is_used(tmp_path: Path) -> None:
    tensors = packed_ct("model.visual.blocks.0.mlp.linear_fc1", 64, 64)
    quantization = compressed_tensors(ignore=["re:visual.*"])
    assert codes(inspect_tensors(tmp_path, tensors, quantization_config=quantization).warnings) == [
        "ignored-but-packed"
    ]
    used = inspect_tensors(tmp_path, tensors, quantization_config=quantization, vision=True)
    assert codes(used.errors) == ["ignored-but-packed"]


@pytest.mark.parametrize(("asked", "errors"), [(False, []), (True, ["no-vision"])])
def test_no_vision_tower_is_an_error_when_vision_is_asked(tmp_path: Path, asked: bool, errors: list[str]) -> None:
    report = inspect_tensors(tmp_path, plain("lm_head", 8, 16), vision=asked)
    assert codes(report.errors) == errors
    assert report.vision is False


def test_kernel_dims_inputs_off_the_block_are_an_error(tmp_path: Path) -> None:
    report = inspect_tensors(
        tmp_path, packed_ct(f"{LAYER}.mlp.down_proj", 64, 1000), quantization_config=compressed_tensors()
    )
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
    report = inspect_tensors(tmp_path, tensors, values=values, quantization_config=quantization)
    unequal = [fault for fault in report.warnings if fault.code == "unequal-scales"]
    assert report.errors == ()
    assert len(unequal) == 1
    assert "factor of 2.5" in unequal[0].says
    equal = dict.fromkeys(values, 128.0)
    assert "unequal-scales" not in codes(
        inspect_tensors(tmp_path, tensors, values=equal, quantization_config=quantization).warnings
    )


def test_unequal_global_scales_of_one_expert_are_found(tmp_path: Path) -> None:
    tensors: dict[str, Shape] = {}
    values = {}
    for expert in range(4):
        for part in ("gate_proj", "up_proj", "down_proj"):
            module = f"{LAYER}.mlp.experts.{expert}.{part}"
            tensors |= packed_ct(module, 64, 64)
            values[f"{module}.weight_global_scale"] = 8.0 if (expert, part) == (2, "up_proj") else 2.0
    report = inspect_tensors(tmp_path, tensors, values=values, quantization_config=compressed_tensors())
    assert report.errors == ()
    (fault,) = (fault for fault in report.warnings if fault.code == "unequal-scales")
    assert fault.names == (f"{LAYER}.mlp.experts.2",)
    assert "factor of 4" in fault.says


@pytest.mark.parametrize(("asked", "errors"), [(0, []), (2, ["quantized-mtp-fc"])])
def test_quantized_mtp_fc_is_an_error_when_drafts_are_asked(tmp_path: Path, asked: int, errors: list[str]) -> None:
    tensors = packed_ct("mtp.fc", 5120, 10240)
    report = inspect_tensors(tmp_path, tensors, quantization_config=compressed_tensors(), speculative_tokens=asked)
    assert codes(report.errors) == errors
    assert "quantized-mtp-fc" in codes(report.errors) + codes(report.warnings)


def test_quantized_gated_q_proj_is_a_warning(tmp_path: Path) -> None:
    tensors = {
        n: s for p in ("q_proj", "k_proj", "v_proj") for n, s in packed_ct(f"{LAYER}.self_attn.{p}", 1024, 64).items()
    }
    assert codes(inspect_tensors(tmp_path, tensors, quantization_config=compressed_tensors()).warnings) == [
        "gated-q-proj"
    ]


@pytest.mark.parametrize("moment", ["declared", "none"])
def test_bf16_export_of_declared_nvfp4_is_one_error(tmp_path: Path, moment: str) -> None:
    tensors = gdn_plain() | plain(f"{LAYER}.mlp.down_proj", 5120, 17408)
    config = {"quantization_config": compressed_tensors()} if moment == "declared" else {}
    report = inspect_tensors(tmp_path, tensors, **config)
    assert codes(report.errors) == (["nvfp4-in-name-only"] if moment == "declared" else [])


def test_packed_weights_without_a_config_are_undeclared(tmp_path: Path) -> None:
    report = inspect_tensors(
        tmp_path, packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | packed_ct(f"{LAYER}.mlp.up_proj", 64, 64)
    )
    assert codes(report.errors) == ["undeclared"]


def test_one_matrix_left_in_bf16_is_named(tmp_path: Path) -> None:
    tensors = packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | plain("model.language_model.layers.1.mlp.down_proj", 64, 64)
    report = inspect_tensors(tmp_path, tensors, quantization_config=compressed_tensors())
    assert codes(report.errors) == ["quantized-but-plain"]
    assert report.errors[0].names == ("model.language_model.layers.1.mlp.down_proj",)


def test_a_single_missing_scale_is_an_error(tmp_path: Path) -> None:
    tensors = packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | packed_ct(
        "model.language_model.layers.1.mlp.down_proj", 64, 64
    )
    del tensors["model.language_model.layers.1.mlp.down_proj.weight_scale"]
    report = inspect_tensors(tmp_path, tensors, quantization_config=compressed_tensors())
    assert codes(report.errors) == ["missing-scale"]


def test_router_stored_packed_is_an_error(tmp_path: Path) -> None:
    report = inspect_tensors(tmp_path, packed_ct(f"{LAYER}.mlp.gate", 64, 64), quantization_config=compressed_tensors())
    assert codes(report.errors) == ["ignored-but-packed"]
    assert "never quantizes" in report.errors[0].says


def test_mixed_layers_are_exceptions_of_their_class(tmp_path: Path) -> None:
    tensors: dict[str, Shape] = {}
    for layer in range(8):
        module = f"model.language_model.layers.{layer}.mlp.down_proj"
        tensors |= packed_ct(module, 64, 64) if layer < 6 else {f"{module}.weight": ("F8_E4M3", (64, 64))}
    fp8 = {"targets": ["re:.*layers[.][67][.]mlp.*"], "weights": {"num_bits": 8, "type": "float"}}
    groups = {"fp8": {**fp8, "input_activations": {"num_bits": 8}}, "nvfp4": NVFP4_GROUP}
    quantization = {**compressed_tensors(), "config_groups": groups}
    report = inspect_tensors(tmp_path, tensors, quantization_config=quantization)
    assert report.errors == ()
    assert report.precision.by_class["down_proj"] == "NVFP4 W4A4"
    assert report.precision.exceptions == (("down_proj", "FP8", (6, 7)),)


def test_unequal_scales_of_a_whole_checkpoint_are_warnings(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", CheckpointSpec(unequal_scales=True))
    report = inspect_folder(folder)
    assert report.errors == ()
    assert "unequal-scales" in codes(report.warnings)
