"""The tables of models, cards and vLLM versions, and the dims that a config.json gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve.dims import Dims, attention_pattern, dims_from_config
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.gpus import GPU_NAMES, GPUS, find_gpu, match_gpu
from qwen_nvfp4_serve.models import DIMS_27B, DIMS_35B_A3B, DIMS_397B_A17B, MODELS, Precision, find_model, resolve_model
from qwen_nvfp4_serve.planner.weights import mtp_params, vision_params, weight_bytes
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec
from qwen_nvfp4_serve.synthetic.config import model_config
from qwen_nvfp4_serve.versions import CPU_WINDOW, GPU_WINDOW, VLLM_CPU, VLLM_GPU, check_vllm


def test_models_names_and_repos_are_unique() -> None:
    repos = [row.repo for row in MODELS if row.repo]
    assert len({row.name for row in MODELS}) == len(MODELS)
    assert len(set(repos)) == len(repos)
    assert {"qwen3.5-35b-a3b", "qwen3.5-27b", "qwen3.5-397b-a17b", "embedded"} <= {row.name for row in MODELS}


def test_models_revisions_are_commits_or_unknown() -> None:
    assert all(row.revision is None or len(row.revision) == 40 for row in MODELS)


def test_models_recommendations_name_cards_of_the_table() -> None:
    for row in MODELS:
        assert all(advice.gpu in GPU_NAMES and advice.reason for advice in row.recommended)


@pytest.mark.parametrize(
    ("dims", "total_b", "mtp_m"),
    # From safetensors headers of the published checkpoints; the largest by its name, its drafter left out.
    [(DIMS_35B_A3B, 35.952, 844.6), (DIMS_27B, 27.78, 424.7), (DIMS_397B_A17B, 397.0, None)],
)
def test_dims_parameters_sum_to_the_published_counts(dims: Dims, total_b: float, mtp_m: float | None) -> None:
    precision = Precision(gdn="BF16", attention="BF16", ffn="BF16", shared_expert="BF16", lm_head="BF16")
    weights = weight_bytes(dims, precision)
    counted = weights.total if mtp_m else weights.total - weights.mtp
    assert counted / 2e9 == pytest.approx(total_b, rel=0.002)
    assert mtp_m is None or mtp_params(dims) / 1e6 == pytest.approx(mtp_m, rel=0.001)


def test_vision_params_of_the_tower_match_the_published_count() -> None:
    assert vision_params(DIMS_35B_A3B) / 1e6 == pytest.approx(446.6, rel=0.002)


@pytest.mark.parametrize("given", ["qwen3.5-35b-a3b", " Qwen3.5-35B-A3B ", "Kbenkhaled/Qwen3.5-35B-A3B-NVFP4"])
def test_resolve_model_catalogue_name_or_repo_gives_the_row(given: str) -> None:
    ref = resolve_model(given)
    assert ref.row is not None
    assert (ref.row.name, ref.repo) == ("qwen3.5-35b-a3b", "Kbenkhaled/Qwen3.5-35B-A3B-NVFP4")


def test_resolve_model_folder_and_hub_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).path == tmp_path
    assert resolve_model("someone/thing-1.0_x").repo == "someone/thing-1.0_x"
    assert resolve_model("someone/thing").row is None


@pytest.mark.parametrize(
    "given", ["", " ", "qwen", "a/b/c", "/no/such", "~/no-such-model", "owner/..", "../x", "a b/c"]
)
def test_resolve_model_anything_else_is_refused(given: str) -> None:
    with pytest.raises(UsageError):
        resolve_model(given)


@pytest.mark.parametrize(
    "given",
    [
        "~nouser/x",
        "x" * 5000,
        "/" + "x" * 5000,
        "a/" + "x" * 5000,
        "/x" * 3000,
        "/" + "ab/" * 1000,
        "a\0b",
        "/a\0b",
        "a\nb",
    ],
)
def test_resolve_model_unusable_name_is_one_short_sentence(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_model(given)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    assert ".." not in str(caught.value)
    assert len(caught.value.seen or "") <= 60


def test_resolve_model_typo_names_the_neighbour() -> None:
    with pytest.raises(UsageError, match=r"Did you mean qwen3\.5-27b"):
        resolve_model("qwen3.5-27")


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"),
        ("NVIDIA GeForce RTX 5070", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4060 Ti", None),
        ("Tesla T4", None),
    ],
)
def test_match_gpu_driver_name_gives_the_row(driver_name: str, name: str | None) -> None:
    row = match_gpu(driver_name)
    assert (row.name if row else None) == name


@pytest.mark.parametrize("row", GPUS, ids=lambda row: row.name)
def test_gpus_rows_are_consistent(row: Any) -> None:
    assert find_gpu(row.name) is row
    assert match_gpu(f"NVIDIA {row.title}") is row
    assert row.usable_bytes <= row.memory_bytes
    assert row.nvcc_arch.startswith(f"sm_{row.capability[0]}{row.capability[1]}")
    assert row.native_fp4 == (row.capability >= (10, 0))


def test_find_gpu_unknown_card_names_the_neighbour() -> None:
    with pytest.raises(UsageError, match="Did you mean rtx-5090"):
        find_gpu("rtx5090x")


@pytest.mark.parametrize(
    ("version", "gpu", "ok"),
    [
        ("0.32.0", False, True),
        ("0.32.0+cpu", False, True),
        ("0.33.1", False, True),
        ("0.34.0", False, False),
        ("0.31.9", False, False),
        ("0.32.0", True, False),
        ("0.33.0", True, True),
        ("0.33.0rc1", True, False),
        ("0.33.0.dev5+g12", True, False),
        ("0.33.1rc1", True, True),
        ("0.33.1.dev5+g12.cu129", True, True),
        ("0.33.0.post1", True, True),
        ("0.34.0rc1", True, False),
        ("0.34.0.dev7", True, False),
        ("0.32.0rc2", False, False),
        ("0.33.0rc1", False, True),
        ("newest", True, False),
        ("", False, False),
        (None, True, False),
    ],
)
def test_check_vllm_version_gives_verdict(version: str | None, gpu: bool, ok: bool) -> None:
    verdict = check_vllm(version, gpu=gpu)
    assert verdict.ok is ok
    assert (GPU_WINDOW if gpu else CPU_WINDOW).specifier in verdict.sentence


def test_pinned_versions_are_inside_their_windows() -> None:
    assert check_vllm(VLLM_CPU, gpu=False).ok
    assert check_vllm(VLLM_GPU, gpu=True).ok


def test_dims_from_config_real_shapes_equal_the_table() -> None:
    for architecture, dims in (("35b-a3b", DIMS_35B_A3B), ("27b", DIMS_27B)):
        config = model_config(CheckpointSpec(architecture=ARCHITECTURES[architecture], style="bf16", vision=True))
        assert dims_from_config(config) == dims


def test_dims_from_config_missing_keys_take_transformers_defaults() -> None:
    transformers = pytest.importorskip("transformers")
    for model_type, name in (("qwen3_5_moe_text", "Qwen3_5MoeTextConfig"), ("qwen3_5_text", "Qwen3_5TextConfig")):
        default = getattr(transformers, name)()
        dims = dims_from_config({"model_type": model_type})
        assert (dims.hidden, dims.layers, dims.vocab) == (
            default.hidden_size,
            default.num_hidden_layers,
            default.vocab_size,
        )
        assert (dims.kv_heads, dims.head_dim) == (default.num_key_value_heads, default.head_dim)
        assert dims.gdn_value_heads == default.linear_num_value_heads
        assert dims.max_context == default.max_position_embeddings
        assert sum(kind == "full_attention" for kind in default.layer_types) == dims.attention_layers


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 0},
        {"hidden_size": -1},
        {"hidden_size": 2.5},
        {"hidden_size": True},
        {"hidden_size": "2048"},
        {"hidden_size": 10**12},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 9_999_999},
        {"layer_types": ["linear_attention"] * 40},
        {"layer_types": ["sliding"] * 40},
        {"layer_types": [["linear_attention"]] * 40},
        {"layer_types": "linear_attention"},
        {"mamba_ssm_dtype": "float8"},
        {"full_attention_interval": 0},
    ],
)
def test_dims_from_config_bad_value_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        dims_from_config({"model_type": "qwen3_5_moe", "text_config": change})


@pytest.mark.parametrize(
    "config", [{}, {"model_type": None}, {"model_type": "llama"}, {"model_type": "qwen3_5", "text_config": []}]
)
def test_dims_from_config_other_architecture_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        dims_from_config(config)


def test_attention_pattern_interval_and_list_agree() -> None:
    listed = json.loads(json.dumps(["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(40)]))
    by_interval = attention_pattern({"model_type": "qwen3_5_moe", "text_config": {"full_attention_interval": 4}})
    assert by_interval == attention_pattern({"model_type": "qwen3_5_moe", "text_config": {"layer_types": listed}})


def test_find_model_empty_name_is_none() -> None:
    assert find_model("") is None
