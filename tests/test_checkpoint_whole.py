"""The inspector on checkpoints that lost tensors, or whose config.json is another model's."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint_files import codes

from qwen_nvfp4_serve.checkpoint import inspect_folder
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, STYLES, CheckpointSpec, write_checkpoint

Folders = Callable[[str, str], Path]
NVFP4 = next(style.name for style in STYLES if style.ffn.is_nvfp4)
MOE_STYLE, DENSE_STYLE = ("embedded", STYLES[0].name), ("embedded-dense", STYLES[0].name)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Sound checkpoints by architecture and style, each written once."""
    made: dict[tuple[str, str], Path] = {}

    def folder(architecture: str, style: str) -> Path:
        if (architecture, style) not in made:
            spec = CheckpointSpec(architecture=ARCHITECTURES[architecture], style=style)
            made[architecture, style] = write_checkpoint(tmp_path_factory.mktemp("sound") / "model", spec)
        return made[architecture, style]

    return folder


def rewrite(source: Path, folder: Path, rename: Callable[[str], str | None]) -> Path:
    """A copy of a checkpoint whose tensors are renamed, or left out for None; its index is left out."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.index.json"))
    for shard in folder.glob("*.safetensors"):
        named = {rename(name): tensor for name, tensor in load_file(shard).items()}
        save_file({name: tensor for name, tensor in named.items() if name is not None}, shard)
    return folder


def change_config(folder: Path, **keys: Any) -> None:
    """Change keys of the text part; `model_type` changes at the top too."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= {key: value for key, value in keys.items() if key != "model_type"}
    if "layer_types" in config["text_config"] and "num_hidden_layers" in keys:
        del config["text_config"]["layer_types"]
    config |= {key: value for key, value in keys.items() if key == "model_type"}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", [MOE_STYLE, DENSE_STYLE])
@pytest.mark.parametrize(
    ("lost", "name"),
    [
        (r"layers\.2\.", "layers.2"),
        (r"^lm_head", "lm_head"),
        (r"language_model\.embed_tokens", "embed_tokens"),
        (r"language_model\.norm", "language_model.norm"),
        (r"layers\.3\.self_attn\.o_proj\.", "layers.3.self_attn.o_proj"),
        (r"layers\.3\.self_attn\.k_proj\.", "layers.3.self_attn.k_proj"),
        (r"layers\.3\.self_attn\.q_proj\.weight(_packed)?$", "layers.3.self_attn.q_proj"),
        (r"layers\.0\.linear_attn\.A_log", "A_log"),
        (r"norm", "language_model.norm"),
    ],
)
def test_lost_tensors_are_an_error(sound: Folders, tmp_path: Path, kind: tuple[str, str], lost: str, name: str) -> None:
    folder = rewrite(sound(*kind), tmp_path / "cut", lambda tensor: None if re.search(lost, tensor) else tensor)
    faults = [fault for fault in inspect_folder(folder).errors if fault.code == "missing"]
    assert len(faults) == 1
    assert any(found.endswith(name) for found in faults[0].names)


@pytest.mark.parametrize("lost", [r"mlp\.experts\.1\.", r"layers\.1\.mlp\.experts\.1\.up_proj\.weight(_packed)?$"])
def test_lost_experts_are_an_error(sound: Folders, tmp_path: Path, lost: str) -> None:
    folder = rewrite(sound("embedded", NVFP4), tmp_path / "cut", lambda name: None if re.search(lost, name) else name)
    faults = [fault for fault in inspect_folder(folder).errors if fault.code == "missing"]
    assert any("layers.1.mlp.experts.1.up_proj" in name for fault in faults for name in fault.names)


def test_lost_stack_of_experts_is_an_error(sound: Folders, tmp_path: Path) -> None:
    lost = "model.language_model.layers.1.mlp.experts.down_proj"
    folder = rewrite(sound("embedded", "bf16"), tmp_path / "cut", lambda name: None if name == lost else name)
    faults = [fault for fault in inspect_folder(folder).errors if fault.code == "missing"]
    assert [fault.names for fault in faults] == [(lost,)]


@pytest.mark.parametrize(
    ("kind", "keys", "code"),
    [
        (MOE_STYLE, {"hidden_size": 1024}, "shape"),
        (MOE_STYLE, {"vocab_size": 5000}, "shape"),
        (MOE_STYLE, {"num_experts": 3}, "shape"),
        (MOE_STYLE, {"num_experts": 300}, "shape"),
        (MOE_STYLE, {"moe_intermediate_size": 1024}, "shape"),
        (("embedded", NVFP4), {"moe_intermediate_size": 1024}, "shape"),
        (("embedded", NVFP4), {"num_experts": 3}, "shape"),
        (("embedded", NVFP4), {"num_experts": 300}, "missing"),
        (MOE_STYLE, {"shared_expert_intermediate_size": 1024}, "shape"),
        (MOE_STYLE, {"head_dim": 32}, "shape"),
        (MOE_STYLE, {"model_type": "qwen3_5"}, "shape"),
        (DENSE_STYLE, {"model_type": "qwen3_5_moe"}, "shape"),
        (DENSE_STYLE, {"intermediate_size": 5000}, "shape"),
        (DENSE_STYLE, {"num_hidden_layers": 64}, "missing"),
        (DENSE_STYLE, {"num_hidden_layers": 3, "full_attention_interval": 2}, "shape"),
    ],
)
def test_config_of_another_model_is_an_error(
    sound: Folders, tmp_path: Path, kind: tuple[str, str], keys: dict[str, Any], code: str
) -> None:
    folder = shutil.copytree(sound(*kind), tmp_path / "other")
    change_config(folder, **keys)
    assert code in codes(inspect_folder(folder).errors)


@pytest.mark.parametrize("root", ["model.", "language_model.model.", "language_model.", "some.other."])
@pytest.mark.parametrize("architecture", ["embedded", "embedded-dense"])
def test_other_prefixes_of_a_sound_checkpoint_miss_nothing(
    sound: Folders, tmp_path: Path, architecture: str, root: str
) -> None:
    style = next(style.name for style in STYLES if not style.ffn.is_nvfp4)
    source = sound(architecture, style)
    folder = rewrite(source, tmp_path / "named", lambda name: name.replace("model.language_model.", root))
    assert not {"missing", "shape"} & set(codes(inspect_folder(folder).errors))


def test_tied_embeddings_need_no_head(sound: Folders, tmp_path: Path) -> None:
    folder = rewrite(sound(*DENSE_STYLE), tmp_path / "tied", lambda name: None if name.startswith("lm_head") else name)
    change_config(folder, tie_word_embeddings=True)
    assert inspect_folder(folder).errors == ()
