"""Whatever config.json, hf_quant_config.json, the index or a header say, inspect ends in a report or one sentence."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint_files import LAYER, NVFP4_GROUP, packed_ct, packed_modelopt, plain, write_shard

from qwen_nvfp4_serve.checkpoint import inspect_folder, plan_model
from qwen_nvfp4_serve.doctor import diagnose, facts_from
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.planner import PlanRequest, plan

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**14) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
TEXT = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 2}
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "auto_map": None,
    "text_config": {"model_type": "qwen3_5_text", "layer_types": None, "mamba_ssm_dtype": "float32", **TEXT},
    "vision_config": {"depth": 2, "hidden_size": 64},
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": NVFP4_GROUP},
        "kv_cache_scheme": None,
    },
}
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "ignore": ["lm_head", "mtp*"],
    "quantized_layers": {f"{LAYER}.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}},
}
INDEX: dict[str, Any] = {
    "metadata": {"total_size": 100},
    "weight_map": {"lm_head.weight": "model.safetensors", f"{LAYER}.mlp.down_proj.weight": "model.safetensors"},
}
TENSORS = {
    **packed_ct(f"{LAYER}.mlp.gate_proj", 64, 64),
    **packed_modelopt(f"{LAYER}.mlp.down_proj", 64, 64),
    **plain("lm_head", 64, 64),
    **packed_ct("mtp.fc", 64, 128),
}


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [prefix] + [path for key, value in inner for path in paths(value, (*prefix, key))]


@st.composite
def damaged(draw: st.DrawFn, tree: dict[str, Any]) -> Any:
    """The tree with up to three places replaced by arbitrary JSON."""
    result: Any = copy.deepcopy(tree)
    for _ in range(draw(st.integers(0, 3))):
        path, value = draw(st.sampled_from(paths(result))), draw(JSON)
        if not path:
            result = value
            continue
        owner = result
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = value
    return result


def one_line(error: UsageError) -> None:
    """Fail for an error that is no single sentence."""
    assert str(error)
    assert "\n" not in str(error)


def attempt(folder: Path) -> None:
    """Inspect and plan; only our own errors may come out."""
    try:
        report = inspect_folder(folder, speculative_tokens=1, vision=True)
        assert all("\n" not in fault.says for fault in (*report.errors, *report.warnings))
        plan(PlanRequest(model=plan_model(report, "fuzzed")))
    except UsageError as error:
        one_line(error)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(CONFIG), st.none() | damaged(MODELOPT), st.none() | damaged(INDEX), st.booleans())
def test_inspect_damaged_json_ends_in_a_report_or_a_sentence(config: Any, quant: Any, index: Any, nested: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if quant is not None and nested and isinstance(config, dict):
            config["quantization_config"] = quant
        (folder / "config.json").write_text(json.dumps(config))
        if quant is not None and not nested:
            (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quant}))
        if index is not None:
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        write_shard(folder / "model.safetensors", TENSORS)
        attempt(folder)


HEADER = {
    f"{LAYER}.mlp.down_proj.weight": {"dtype": "U8", "shape": [4, 8], "data_offsets": [0, 32]},
    f"{LAYER}.mlp.down_proj.weight_scale_2": {"dtype": "F32", "shape": [], "data_offsets": [32, 36]},
}


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(HEADER), st.binary(max_size=40))
def test_inspect_damaged_header_ends_in_a_report_or_a_sentence(header: Any, tail: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + tail)
        attempt(folder)


FACTS: dict[str, Any] = {
    **{"driver": "580.1", "cuda_image": "13.0", "gpu": "RTX 5090", "capability": [12, 0], "compat_libs": True},
    **{"shm_mib": 64, "tensor_parallel": 2, "env": "PORT=1\n", "cache_uid": 0, "run_uid": 1000, "mode": "0755"},
    **{"memory_free_mib": 30000, "docker_version": "28", "port": 1, "port_holder": "", "vllm_version": "0.33.0"},
}


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(FACTS))
def test_doctor_damaged_facts_end_in_checks_or_a_sentence(facts: Any) -> None:
    if not isinstance(facts, dict):
        return
    try:
        diagnosis = diagnose(facts_from(facts))
    except UsageError as error:
        one_line(error)
    else:
        assert all(check.says for check in diagnosis.checks)
