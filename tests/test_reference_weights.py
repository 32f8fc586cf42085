"""The tracked checkpoints: their size, their known answers, and the damage that those answers show."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from safetensors.torch import load_file  # noqa: E402
from tests.checkpoint_damage import Tensors, drop_global_scale, swizzle_block_scales  # noqa: E402
from training import checkpoint, gdn, known_answers, model, tokenizer  # noqa: E402
from training.commands import model_of  # noqa: E402
from training.mixture import SHORT  # noqa: E402
from training.model import ReferenceModel  # noqa: E402
from training.tokenizer import REFERENCE_DIR, FastEncoder  # noqa: E402

FOLDERS = ("moe", "dense")
MOST_BYTES = 16_000_000
ADDED = {"several tools", "second call", "asked tools", "lookup", "needle", "add", "subtract", "multiply"}
TASKS = {*SHORT} - {"arithmetic"} | ADDED


def records_of(name: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((REFERENCE_DIR / name / "known_answers.json").read_text())
    return records


def verdicts(damaged: ReferenceModel, records: list[dict[str, Any]]) -> Iterator[bool]:
    encoder = FastEncoder(tokenizer.load())
    for record in records:
        yield known_answers.judge(damaged, encoder, known_answers.conversation_of(record)).right


def from_tensors(tensors: Tensors) -> ReferenceModel:
    config = checkpoint.config_of(REFERENCE_DIR / "moe")
    made = ReferenceModel(config)
    made.load_state_dict(checkpoint.stacked(checkpoint.dequantized(tensors)))
    return made.eval()


def test_tracked_weights_together_fit_sixteen_megabytes() -> None:
    sizes = [(REFERENCE_DIR / name / "model.safetensors").stat().st_size for name in FOLDERS]
    assert sum(sizes) <= MOST_BYTES


@pytest.mark.parametrize("name", FOLDERS)
def test_checkpoint_tensors_are_finite_and_complete(name: str) -> None:
    config, state = checkpoint.read(REFERENCE_DIR / name)
    expected = {key: parameter.shape for key, parameter in ReferenceModel(config).named_parameters()}
    assert {key: tensor.shape for key, tensor in state.items()} == expected
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_known_answers_cover_every_task_in_both_modes() -> None:
    records = records_of("moe")
    assert len(records) >= 30
    assert len({record["id"] for record in records}) == len(records)
    assert {record["task"] for record in records} >= TASKS
    assert {record["enable_thinking"] for record in records} == {True, False}
    assert any(len(record["expect"].get("tool_calls", ())) > 1 for record in records)
    assert any(message["role"] == "tool" for record in records for message in record["messages"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FOLDERS)
def test_known_answers_all_right(name: str) -> None:
    records = records_of(name)
    wrong = [
        record["id"]
        for record, right in zip(records, verdicts(model_of(REFERENCE_DIR / name), records), strict=True)
        if not right
    ]
    assert not wrong


def swap_experts(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts.0." in name and ".layers.1." in name]:
        for other in range(1, 16, 2):
            left = name.replace("experts.0.", f"experts.{other - 1}.")
            right = name.replace("experts.0.", f"experts.{other}.")
            tensors[left], tensors[right] = tensors[right], tensors[left]


def double_values(tensors: Tensors) -> None:
    for name in tensors:
        if ".v_proj.weight_global_scale" in name:
            tensors[name] = tensors[name] / 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("damage", [drop_global_scale, swizzle_block_scales, swap_experts, double_values])
def test_known_answers_damaged_weights_are_caught(damage: Callable[[Tensors], None]) -> None:
    tensors = load_file(str(REFERENCE_DIR / "moe" / "model.safetensors"))
    damage(tensors)
    assert not all(verdicts(from_tensors(tensors), records_of("moe")))


def lose_state(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model.gated_delta_rule

    def forgetful(**parts: Any) -> Any:
        length = parts["document"].shape[1]
        return whole(**parts | {"document": parts["document"] + torch.arange(length) // 64})

    monkeypatch.setattr(model, "gated_delta_rule", forgetful)


def lose_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model.CausalConv.forward

    def forgetful(self: Any, values: Any, document: Any) -> Any:
        return whole(self, values, document + torch.arange(document.shape[1]))

    monkeypatch.setattr(model.CausalConv, "forward", forgetful)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("damage", [lose_state, lose_convolution])
def test_known_answers_lost_state_is_caught(
    damage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch)
    assert not all(verdicts(model_of(REFERENCE_DIR / "moe"), records_of("moe")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_known_answers_state_in_bf16_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gdn.scan_states
    monkeypatch.setattr(gdn, "scan_states", lambda *parts: whole(*parts).bfloat16().float())
    assert all(verdicts(model_of(REFERENCE_DIR / "moe"), records_of("moe")))
