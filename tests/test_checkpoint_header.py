"""A shard's header is accepted where the safetensors library opens the file, and refused where it does not."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from tests.checkpoint_files import packed_ct, plain, write_config, write_shard

from qwen_nvfp4_serve.checkpoint import inspect_folder
from qwen_nvfp4_serve.checkpoint.source import read_shard

Header = dict[str, Any]
NAME = "model.safetensors"


def entry(first: int, end: int, *, dtype: str = "U8", shape: list[Any] | None = None) -> Header:
    return {"dtype": dtype, "shape": [end - first] if shape is None else shape, "data_offsets": [first, end]}


def write(folder: Path, header: Header | bytes, data_bytes: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / NAME).write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))


def opens(path: Path) -> bool:
    """Whether the library that vLLM loads with takes the file."""
    try:
        with safe_open(path, framework="np"):
            return True
    except SafetensorError:
        return False


FOUR = b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
ODD: list[tuple[str, Header | bytes, int, str]] = [
    ("sound", {"a": entry(0, 4)}, 4, ""),
    ("no tensor", {}, 0, ""),
    ("other order", {"b": entry(4, 6), "a": entry(0, 4)}, 6, ""),
    ("empty tensor", {"a": entry(0, 0), "b": entry(0, 4)}, 4, ""),
    ("padded", b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}   ', 4, ""),
    ("no metadata", {"__metadata__": None, "a": entry(0, 4)}, 4, ""),
    ("two in a byte", {"a": entry(0, 4, dtype="F4", shape=[8])}, 4, ""),
    ("complex", {"a": entry(0, 8, dtype="C64", shape=[1])}, 8, ""),
    ("too long", {"a": entry(0, 4)}, 5, "end at"),
    ("too short", {"a": entry(0, 4)}, 3, "cut short"),
    ("hole", {"a": entry(0, 4), "b": entry(6, 8)}, 8, "hole"),
    ("hole at the start", {"a": entry(2, 4)}, 4, "hole"),
    ("overlap", {"a": entry(0, 4), "b": entry(2, 6)}, 6, "overlaps"),
    ("same place", {"a": entry(0, 4), "b": entry(0, 4)}, 4, "overlaps"),
    ("name twice", b'{"a":' + FOUR + b',"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}', 8, "hole"),
    ("unknown type", {"a": entry(0, 4, dtype="X9")}, 4, "unknown type"),
    ("half a byte", {"a": entry(0, 4, dtype="F4", shape=[7])}, 4, "inside a byte"),
    ("fraction", {"a": entry(0, 4, shape=[4.0])}, 4, "no tensor"),
    ("fraction after a whole one", {"a": entry(0, 4), "b": entry(4, 8, shape=[4.0])}, 8, "no tensor"),
    ("place with a fraction", b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0.0,4]}}', 4, "no tensor"),
    ("exponent", b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4e0]}}', 4, "no tensor"),
    ("truth after a one", {"a": entry(0, 1), "b": entry(1, 2, shape=[True])}, 2, "no tensor"),
    ("true in a name", {"true": entry(0, 1), "b": entry(1, 2)}, 2, ""),
    ("half of a letter", b'{"a\\ud800":' + FOUR + b"}", 4, "no JSON"),
    ("key of a later format", b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1.5}}', 4, ""),
    ("NaN", b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', 4, "no tensor"),
    ("boolean", {"a": entry(0, 1, shape=[True])}, 1, "no tensor"),
    ("two negatives", {"a": entry(0, 4, shape=[-2, -2])}, 4, "no tensor"),
    ("three places", {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}}, 4, "no tensor"),
    ("text for a shape", {"a": {"dtype": "U8", "shape": "4", "data_offsets": [0, 4]}}, 4, "no tensor"),
    ("object for a shape", {"a": {"dtype": "U8", "shape": {}, "data_offsets": [0, 1]}}, 1, "no tensor"),
    ("text for places", {"a": {"dtype": "U8", "shape": [4], "data_offsets": "04"}}, 4, "no tensor"),
    ("list for a type", {"a": {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]}}, 4, "no tensor"),
    ("one place", {"a": entry(0, 4), "b": {"dtype": "U8", "shape": [], "data_offsets": [4]}}, 5, "no tensor"),
    ("no size in the second", {"a": entry(0, 4), "b": {"dtype": "U8", "data_offsets": [4, 5]}}, 5, "no tensor"),
    ("second contradicts", {"a": entry(0, 4), "b": entry(4, 8, shape=[3])}, 8, "b of shape [3]"),
    ("backwards", {"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}, 4, "contradicts"),
    ("metadata of numbers", {"__metadata__": {"x": 1}, "a": entry(0, 4)}, 4, "__metadata__"),
    ("list", b"[]", 0, "no JSON object"),
    ("mark", b"\xef\xbb\xbf{}", 0, "no JSON"),
    ("Latin-1", b'{"\xe9":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4, "no JSON"),
    ("UTF-16", "{}".encode("utf-16"), 0, "no JSON"),
    ("nothing", b"", 0, "no JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "data_bytes", "says"), [row[1:] for row in ODD], ids=[row[0] for row in ODD])
def test_header_odd_is_refused_where_the_library_refuses(
    tmp_path: Path, header: Header | bytes, data_bytes: int, says: str
) -> None:
    write(tmp_path, header, data_bytes)
    shard = read_shard(tmp_path, NAME)
    assert (shard.reason is None) == opens(tmp_path / NAME) == (not says)
    assert says in (shard.reason or "")


SOUND: Header = {
    "a.weight": entry(0, 32, shape=[4, 8]),
    "a.scale": entry(32, 36, dtype="F32", shape=[]),
    "b.weight": entry(36, 44, dtype="BF16", shape=[2, 2]),
}


@st.composite
def changed(draw: st.DrawFn) -> tuple[Header, int]:
    """A header with up to two numbers or types changed, and how much data follows it."""
    header = copy.deepcopy(SOUND)
    for _ in range(draw(st.integers(0, 2))):
        target = header[draw(st.sampled_from(sorted(header)))]
        key = draw(st.sampled_from(("dtype", "shape", "data_offsets")))
        if key == "dtype":
            target[key] = draw(st.sampled_from(("U8", "F32", "BF16", "F8_E4M3", "I64", "F4", "?")))
        else:
            target[key] = draw(st.lists(st.integers(-1, 44), max_size=3))
    return header, draw(st.sampled_from((44, 44, 44, 43, 45, 0)))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed())
def test_header_changed_is_refused_where_the_library_refuses(tmp_path: Path, case: tuple[Header, int]) -> None:
    write(tmp_path, *case)
    assert (read_shard(tmp_path, NAME).reason is None) == opens(tmp_path / NAME)


def test_inspect_shard_with_bytes_after_its_tensors_names_the_file(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_shard(tmp_path / NAME, plain("lm_head", 64, 64))
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"rest of a longer download")
    (fault,) = inspect_folder(tmp_path).errors
    assert (fault.code, fault.names) == ("shard", (NAME,))


def test_inspect_many_listed_modules_gives_each_its_algorithm(tmp_path: Path) -> None:
    modules = [f"model.language_model.layers.{i}.mlp.experts.{e}.{p}" for i in range(2) for e in range(3)
               for p in ("gate_proj", "up_proj", "down_proj")]  # fmt: skip
    layers = {module: {"quant_algo": "W4A16_NVFP4"} for module in modules}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    write_config(tmp_path, quantization_config=quantization)
    write_shard(
        tmp_path / NAME, {name: shape for module in modules for name, shape in packed_ct(module, 64, 64).items()}
    )
    report = inspect_folder(tmp_path)
    assert report.precision.by_class == {"experts": "NVFP4 W4A16"}
    assert report.errors == ()
