"""Checkpoint folders as they really arrive: pointers, pipes, folders instead of files, copies, strange indexes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint_files import LAYER, NVFP4_GROUP, packed_ct, plain, write_config, write_shard

from qwen_nvfp4_serve.checkpoint import inspect_folder
from qwen_nvfp4_serve.checkpoint.source import INDEX_NAME
from qwen_nvfp4_serve.errors import UsageError

NAME, OTHER = "model.safetensors", "other.safetensors"
TENSORS = packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | plain("lm_head", 64, 64)
MAP = dict.fromkeys(TENSORS, NAME)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint."""
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"g": NVFP4_GROUP}, "ignore": ["lm_head"]}
    write_config(tmp_path, quantization_config=quantization)
    write_shard(tmp_path / NAME, TENSORS)
    assert inspect_folder(tmp_path).errors == inspect_folder(tmp_path).warnings == ()
    return tmp_path


def link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "code", "word"),
    [
        (Path.mkdir, "missing-shard", "a directory"),
        (os.mkfifo, "missing-shard", "a pipe"),
        (link("/dev/zero"), "missing-shard", "a device"),
        (link("nowhere"), "missing-shard", "not there"),
        (link(OTHER), "missing-shard", "cannot be read"),
        (Path.touch, "shard", "0 bytes"),
        (
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            "shard",
            "Git LFS pointer",
        ),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)), "shard", "header alone"),
        (lambda path: path.write_bytes(b"\x80\x02}q\x01" + bytes(100)), "shard", "does not begin"),
    ],
)
def test_inspect_shard_that_is_something_else_is_named(
    folder: Path, make: Callable[[Path], object], code: str, word: str
) -> None:
    make(folder / OTHER)
    (fault,) = inspect_folder(folder).errors
    assert (fault.code, fault.names) == (code, (OTHER,))
    assert word in fault.says


def test_inspect_shard_that_is_a_link_to_a_file_is_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blob = tmp_path_factory.mktemp("blobs") / "0123"
    shutil.move(folder / NAME, blob)
    (folder / NAME).symlink_to(blob)
    assert inspect_folder(folder).errors == ()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, link("/dev/zero"), link(INDEX_NAME)])
def test_inspect_index_that_is_no_file_is_one_sentence(folder: Path, make: Callable[[Path], object]) -> None:
    make(folder / INDEX_NAME)
    with pytest.raises(UsageError, match=INDEX_NAME):
        inspect_folder(folder)


@pytest.mark.parametrize(
    ("index", "code", "name"),
    [
        ({}, "index", "weight_map"),
        ({"weight_map": {}}, "index", "weight_map"),
        ({"weight_map": ["a"]}, "index", "weight_map"),
        ({"weight_map": MAP | {"x": OTHER}}, "missing-shard", OTHER),
        ({"weight_map": MAP | {"x": NAME}}, "index", "x"),
        ({"weight_map": MAP | {"x": "/etc/passwd"}}, "missing-shard", "/etc/passwd"),
        ({"weight_map": MAP | {"x": f"../{OTHER}"}}, "missing-shard", f"../{OTHER}"),
        ({"weight_map": MAP | {"x": "a\0b"}}, "missing-shard", "a\0b"),
        ({"weight_map": MAP | {"x": "a\nb"}}, "missing-shard", "a\nb"),
        ({"weight_map": MAP | {"x": ""}}, "missing-shard", ""),
        ({"weight_map": MAP | {"x": None}}, "missing-shard", "None"),
        ({"weight_map": MAP | {"x": [NAME]}}, "missing-shard", f"['{NAME}']"),
    ],
)
def test_inspect_index_that_contradicts_the_folder_is_one_error(
    folder: Path, index: dict[str, Any], code: str, name: str
) -> None:
    (folder / INDEX_NAME).write_text(json.dumps(index))
    (fault,) = inspect_folder(folder).errors
    assert (fault.code, fault.names) == (code, (name,))
    assert fault.says.isprintable()


PLACES = ("ignore", "targets")
SLOW = (r"(\w+\.?)+!", "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)!", "(?:.|..)*!", r"((x*)*.)*!")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pattern", SLOW)
def test_inspect_expression_that_tries_for_ever_is_one_error(folder: Path, pattern: str, place: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    listed = quantization if place == "ignore" else quantization["config_groups"]["g"]
    listed[place] = [f"re:{pattern}", *listed[place]]
    (folder / "config.json").write_text(json.dumps(config))
    before = signal.getsignal(signal.SIGVTALRM)
    (fault,) = inspect_folder(folder).errors
    assert (fault.code, fault.names) == ("slow-pattern", (f"re:{pattern}",))
    assert "layers.0.mlp.down_proj" in fault.says
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_inspect_expression_that_repeats_and_is_quick_is_followed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = [r"re:(?:\w+\.)*down_proj$", "re:.*lm_head.*"]
    (folder / "config.json").write_text(json.dumps(config))
    assert [fault.code for fault in inspect_folder(folder).errors] == ["ignored-but-packed"]


@pytest.mark.parametrize("pattern", ["a{99999999999}", "(" * 5000 + ")" * 5000])
def test_inspect_expression_that_cannot_be_compiled_is_one_error(folder: Path, pattern: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = [f"re:{pattern}"]
    (folder / "config.json").write_text(json.dumps(config))
    assert [fault.code for fault in inspect_folder(folder).errors] == ["config"]


@pytest.mark.parametrize("total", [-1, 0, "20", float("nan"), float("inf"), True, [1], 10**400])
def test_inspect_total_size_that_is_no_size_is_a_warning(folder: Path, total: Any) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": MAP}))
    report = inspect_folder(folder)
    assert report.errors == ()
    assert [fault.code for fault in report.warnings] == ["index"]


def test_inspect_many_missing_shards_are_one_error(folder: Path) -> None:
    absent = {f"x{i}": f"model-{i:05}.safetensors" for i in range(30)}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": MAP | absent}))
    (fault,) = inspect_folder(folder).errors
    assert fault.code == "missing-shard"
    assert "29 more" in fault.says


def test_inspect_many_damaged_shards_are_one_error_that_names_them(folder: Path) -> None:
    names = tuple(f"cut-{i}.safetensors" for i in range(3))
    for name in names:
        (folder / name).write_bytes((folder / NAME).read_bytes()[:-1])
    (fault,) = inspect_folder(folder).errors
    assert (fault.code, fault.names) == ("shard", names)


def test_inspect_tensor_in_two_files_is_a_warning(folder: Path) -> None:
    write_shard(folder / OTHER, plain("lm_head", 64, 64))
    (fault,) = inspect_folder(folder).warnings
    assert (fault.code, fault.names) == ("duplicate", (OTHER,))
    assert f"lm_head.weight is in {NAME} and in {OTHER}" in fault.says


def test_inspect_tensor_that_the_index_leaves_out_is_a_warning(folder: Path) -> None:
    rest = {name: shard for name, shard in MAP.items() if name != "lm_head.weight"}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": rest}))
    report = inspect_folder(folder)
    assert report.errors == ()
    assert [fault.names for fault in report.warnings] == [("lm_head.weight",)]


def test_inspect_numbered_shards_without_an_index_miss_the_others(folder: Path) -> None:
    (folder / NAME).rename(folder / "model-00002-of-00003.safetensors")
    (fault,) = inspect_folder(folder).errors
    assert fault.code == "missing-shard"
    assert fault.names == ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")


@pytest.mark.parametrize(
    ("named", "codes"),
    [
        (["LlamaForCausalLM"], ["architecture"]),
        (["Qwen3NextForCausalLM"], ["architecture"]),
        (["Qwen3_5ForConditionalGeneration"], []),
        (["Qwen3_5MoeForCausalLM"], []),
        ([], []),
        (None, []),
    ],
)
def test_inspect_architecture_of_another_family_is_an_error(folder: Path, named: Any, codes: list[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": named}))
    assert [fault.code for fault in inspect_folder(folder).errors] == codes


MODULE = f"{LAYER}.mlp.down_proj"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"weight_scale": ("F8_E4M3", (63, 4))}, "scale-shape"),
        ({"weight_scale": ("F8_E4M3", (64, 2))}, "scale-shape"),
        ({"weight_scale": ("BF16", (64, 4))}, "scale-shape"),
        ({"weight_packed": ("U8", (2048,))}, "kernel-dims"),
        ({"weight_packed": ("U8", (0, 32)), "weight_scale": ("F8_E4M3", (0, 4))}, "kernel-dims"),
        ({"weight_packed": ("U8", (64, 12)), "weight_scale": ("F8_E4M3", (64, 1))}, "kernel-dims"),
    ],
)
def test_inspect_packed_matrix_and_scales_that_do_not_fit_are_an_error(
    folder: Path, changes: dict[str, Any], code: str
) -> None:
    tensors = TENSORS | {f"{MODULE}.{leaf}": shape for leaf, shape in changes.items()}
    write_shard(folder / NAME, tensors)
    (fault,) = inspect_folder(folder).errors
    assert (fault.code, fault.names) == (code, (MODULE,))


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj"])
def test_inspect_global_scale_that_is_none_is_an_error(folder: Path, scale: float, part: str) -> None:
    gate, up = (f"{LAYER}.mlp.{name}" for name in ("gate_proj", "up_proj"))
    values = {f"{name}.weight_global_scale": 1.0 for name in (gate, up)} | {
        f"{LAYER}.mlp.{part}.weight_global_scale": scale
    }
    write_shard(folder / NAME, packed_ct(gate, 64, 64) | packed_ct(up, 64, 64) | TENSORS, values)
    (fault,) = inspect_folder(folder).errors
    assert (fault.code, fault.names) == ("bad-scale", (f"{LAYER}.mlp.{part}",))
