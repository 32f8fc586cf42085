"""The inspector on as many tensors as a large mixture of experts has: what it costs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
from tests.checkpoint_files import Shape, compressed_tensors, packed_ct, plain, write_config, write_shard

from qwen_nvfp4_serve.checkpoint import inspect_folder
from qwen_nvfp4_serve.checkpoint.check_whole import check_whole
from qwen_nvfp4_serve.checkpoint.contents import group_tensors
from qwen_nvfp4_serve.checkpoint.header import Tensor
from qwen_nvfp4_serve.checkpoint.source import INDEX_NAME
from qwen_nvfp4_serve.dims import dims_from_config

EXPERTS, SHARDS = 256, 4
PARTS = ("gate_proj", "up_proj", "down_proj")
MOST_CALLS = 7.5  # for one more tensor: 6.9 were counted (10.4 when each matrix was looked at by itself)
MOST_READINGS = 2.9  # 2.4 were measured on a busy machine


def layer_tensors(layer: int) -> dict[str, Shape]:
    """A layer of the 35B: packed experts, each with its scales, and attention in BF16."""
    owner, tensors = f"model.language_model.layers.{layer}", {}
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors |= plain(f"{owner}.self_attn.{part}", 64, 64)
    for expert in range(EXPERTS):
        for part in PARTS:
            tensors |= packed_ct(f"{owner}.mlp.experts.{expert}.{part}", 64, 64)
    return tensors


def write_large(folder: Path, layers: int) -> int:
    """Write a checkpoint of so many layers, spread over shards; returns the number of its tensors."""
    write_config(folder, quantization_config=compressed_tensors(ignore=["lm_head", "re:.*self_attn.*"]))
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        tensors = {
            name: shape for layer in range(shard, layers, SHARDS) for name, shape in layer_tensors(layer).items()
        }
        write_shard(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return len(weight_map)


def calls_of_inspect(folder: Path) -> int:
    """How many functions are called while the folder is inspected, those of C counted in."""
    seen: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, _what: object) -> None:
        seen[event] += 1

    sys.setprofile(count)
    try:
        report = inspect_folder(folder)
    finally:
        sys.setprofile(None)
    assert report.errors == ()
    return seen["call"] + seen["c_call"]


def test_inspect_many_tensors_takes_few_calls_for_each(tmp_path: Path) -> None:
    tensors = {layers: write_large(tmp_path / str(layers), layers) for layers in (4, 8)}
    calls = {layers: calls_of_inspect(tmp_path / str(layers)) for layers in tensors}
    more = (calls[8] - calls[4]) / (tensors[8] - tensors[4])
    assert more < MOST_CALLS


def test_looking_for_missing_experts_takes_no_call_for_each() -> None:
    tensors = {
        f"model.language_model.{name}.weight": Tensor("BF16", (8, 64), "", 0, 0) for name in ("norm", "embed_tokens")
    }
    text = {"hidden_size": 64, "num_hidden_layers": 4, "moe_intermediate_size": 64, "num_experts": EXPERTS}
    config = {"model_type": "qwen3_5_moe", "text_config": text}
    calls = []
    for layers in (2, 4):
        tensors |= {
            name: Tensor(dtype, shape, "", 0, 0)
            for layer in range(layers)
            for name, (dtype, shape) in (layer_tensors(layer) | plain("lm_head", 8, 64)).items()
        }
        contents, dims, seen = group_tensors([tensors]), dims_from_config(config), Counter[str]()
        sys.setprofile(lambda _frame, event, _what, seen=seen: seen.update([event]))
        try:
            found = list(check_whole(contents, dims, config))
        finally:
            sys.setprofile(None)
        assert found  # so they were looked at
        calls.append(seen["call"] + seen["c_call"])
    assert calls[1] - calls[0] < 2 * EXPERTS


READ = """
import json, sys
from pathlib import Path
for path in Path(sys.argv[1]).iterdir():
    with path.open("rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little")) if path.suffix == ".safetensors" else file.read()
    json.loads(text)
"""
INSPECT = "from qwen_nvfp4_serve.cli import main; main()"


def cpu_s(*words: str) -> float:
    """What Python takes of the processor for a program, its start counted in."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_inspect_124_000_tensors_takes_a_few_times_what_json_does(tmp_path: Path) -> None:
    assert write_large(tmp_path, 40) > 120_000
    # The best of both under the same conditions: seconds alone say more about the machine and what else it does.
    reading, inspecting = zip(*((cpu_s(READ, str(tmp_path)), cpu_s(INSPECT, "inspect", str(tmp_path)))
                                for _ in range(5)), strict=True)  # fmt: skip
    assert min(inspecting) < MOST_READINGS * min(reading), (reading, inspecting)
