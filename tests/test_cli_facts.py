"""plan, inspect, doctor and fetch from the command line: exit codes, JSON keys, and odd input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import typer
from tests.checkpoint_files import LAYER, NVFP4_GROUP, packed_ct, plain, write_config, write_shard
from tests.hub_stand_in import REPO, serve
from typer.testing import CliRunner

from qwen_nvfp4_serve import fetch as fetching
from qwen_nvfp4_serve.cli import doctor, fetch, inspect, plan
from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.hub import find_repo

PLAN_KEYS = {
    *("model", "gpu", "fits", "max_model_len", "block_size_tokens", "blocks_per_request", "pool_blocks", "pool_tokens"),
    *("concurrency", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "bytes"),
    *("roofline_tokens_per_s", "notices", "reasons"),
}
BYTES_KEYS = {"weights", "embeddings", "kv_pool", "state", "graphs", "workspaces", "vision", "mtp", "headroom"}

app = typer.Typer()
for command in (plan, inspect, doctor, fetch):
    command.register(app)


def run(*words: object) -> tuple[int, str]:
    """Exit code and output; an error of ours counts with its own exit code, as `main` makes of it."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, QwenNvfp4Error):
        return result.exception.exit_code, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def run_json(*words: object) -> tuple[int, dict[str, Any]]:
    """Exit code and parsed output."""
    code, output = run(*words, "--json")
    return code, json.loads(output)


def test_plan_json_has_the_promised_keys() -> None:
    code, planned = run_json("plan", "--model", "qwen3.5-27b", "--gpu", "rtx-5090")
    assert code == 0
    assert set(planned) >= PLAN_KEYS
    assert set(planned["bytes"]) == BYTES_KEYS
    assert set(planned["roofline_tokens_per_s"]) == {"at_4k", "at_context"}
    assert planned["fits"] is True


def test_plan_published_pool_gives_published_tokens() -> None:
    _, planned = run_json("plan", "--kv-pool-gib", "5.98", "--context", 131072, "--gdn-prefill", "triton")
    assert (planned["block_size_tokens"], planned["pool_blocks"], planned["pool_tokens"]) == (2096, 299, 567_978)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 0),
        (["--gpu", "rtx-5090"], 0),
        (["--model", "qwen3.5-397b-a17b", "--gpu", "rtx-4090"], 1),
        (["--model", "qwen3.6-27b", "--gpu", "rtx-4060"], 1),
        (["--gpu", "rtx-4090", "--context", "262144"], 1),
        (["--kv-pool-gib", "0.01"], 1),
        (["--model", "embedded"], 0),
        (["--model", "no-such-model"], 2),
        (["--model", "/no/such/folder"], 2),
        (["--model", "../.."], 2),
        (["--model", ""], 2),
        (["--gpu", "rtx-9999"], 2),
        (["--gpu", ""], 2),
        (["--context", "-5"], 2),
        (["--context", "0"], 2),
        (["--context", "many"], 2),
        (["--context", "99999999999999999999"], 2),
        (["--kv-pool-gib", "-1"], 2),
        (["--kv-pool-gib", "nan"], 2),
        (["--kv-pool-gib", "inf"], 2),
        (["--kv-cache-dtype", "nvfp4"], 2),
        (["--gdn-prefill", "magic"], 2),
        (["--tensor-parallel", "5"], 2),
        (["--speculative-tokens", "99"], 2),
        (["--seqs", "0"], 2),
        (["--no-such-option"], 2),
    ],
)
def test_plan_words_give_exit_code(words: list[str], code: int) -> None:
    seen, output = run("plan", *words)
    assert seen == code
    assert "Traceback" not in output


def test_plan_that_does_not_fit_says_what_would() -> None:
    _, output = run("plan", "--gpu", "rtx-4090", "--context", "262144")
    assert "does not fit" in output
    assert "it fits with --context" in output


def write_sound(folder: Path) -> None:
    """A small checkpoint without faults."""
    write_config(
        folder, quantization_config={"quant_method": "compressed-tensors", "config_groups": {"g": NVFP4_GROUP}}
    )
    write_shard(folder / "model.safetensors", packed_ct(f"{LAYER}.mlp.down_proj", 64, 64) | plain("lm_head", 64, 64))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The cards of this machine, none at first; the working folder has no `.env`."""
    found: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qwen_nvfp4_serve.host.detect_gpus", lambda _visible=None: tuple(found))
    for name in ("MODEL", "DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    ("words", "card", "env", "model"),
    [
        ([], False, "", "embedded"),
        ([], True, "", "qwen3.5-35b-a3b"),
        ([], False, "DEVICE=cuda", "qwen3.5-35b-a3b"),
        ([], True, "DEVICE=cpu", "embedded"),
        ([], False, "MODEL=qwen3.8-27b", "qwen3.8-27b"),
        (["--gpu", "rtx-5090"], False, "", "qwen3.5-35b-a3b"),
        (["--gpu", "rtx-5090"], False, "MODEL=qwen3.6-27b", "qwen3.6-27b"),
        (["--kv-pool-gib", "5"], False, "", "qwen3.5-35b-a3b"),
        (["--model", "qwen3.5-27b"], False, "MODEL=qwen3.6-27b", "qwen3.5-27b"),
    ],
)
def test_plan_without_a_model_takes_what_serve_would(
    cards: list[str], words: list[str], card: bool, env: str, model: str
) -> None:
    cards += ["NVIDIA GeForce RTX 5090"] * card
    Path(".env").write_text(env + "\n")
    assert run_json("plan", *words)[1]["model"] == model


def test_plan_without_a_card_and_a_name_is_that_of_serve_on_this_machines_cpu(
    cards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_nvfp4_serve.room.free_memory_bytes", lambda: 30 << 30)
    Path(".env").write_text("CPU_KV_CACHE_GIB=0.5\nMAX_NUM_SEQS=7\n")
    code, planned = run_json("plan")
    assert (code, planned["fits"], planned["gpu"]) == (0, True, None)
    assert (planned["block_size_tokens"], planned["max_num_seqs"]) == (384, 7)  # as test_serve.py has them
    sizes = planned["bytes"]
    assert sizes["kv_pool"] + sizes["state"] == 1 << 29
    assert sizes["graphs"] == 0
    _, output = run("plan")
    assert "embedded on this machine's CPU: fits" in output
    assert not {word for word in ("CUDA", "FlashInfer", "--gpu", "WARNING") if word in output}
    Path(".env").write_text("MODEL=qwen3.5-35b-a3b\n")
    assert "64.56 GiB of weights in BF16" in run("plan")[1]


def test_plan_without_a_card_says_how_to_name_one(cards: list[str]) -> None:
    code, planned = run_json("plan", "--model", "qwen3.5-27b")
    assert (code, planned["fits"]) == (0, None)
    assert "--gpu" in planned["reasons"][0]


@pytest.mark.parametrize("words", [[], ["embedded"]])
def test_fetch_of_the_embedded_model_has_nothing_to_do_and_says_so_in_one_line(
    cards: list[str], words: list[str]
) -> None:
    code, output = run("fetch", *words)
    assert (code, len(output.splitlines())) == (0, 1)
    assert output.startswith("nothing to download: embedded")


@pytest.mark.parametrize("command", ["doctor", "fetch"])
def test_env_file_that_is_named_and_missing_is_wrong_use(command: str, tmp_path: Path) -> None:
    code, output = run(command, "--env-file", tmp_path / "mistyped.env")
    assert code == 2
    assert "is not there" in output


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_doctor_env_that_is_no_file_is_a_failed_check(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / ".env")
    _, diagnosis = run_json("doctor")
    (check,) = (check for check in diagnosis["checks"] if check["id"] == "env")
    assert not check["ok"]
    assert ".env" in check["says"]


def test_doctor_counts_a_wrong_variable_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KV_CACHE_DTYPE", "int8")
    _, diagnosis = run_json("doctor")
    assert "KV_CACHE_DTYPE" in next(check["says"] for check in diagnosis["checks"] if check["id"] == "env")


def test_inspect_of_a_repository_sends_the_token_of_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sound(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("HF_TOKEN=hf_of_env\n")
    seen: list[str | None] = []
    monkeypatch.setattr("qwen_nvfp4_serve.hub.find_repo", lambda _name, _revision, token: seen.append(token) or repo)
    with serve(files) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        repo = find_repo(REPO)
        assert run("inspect", REPO)[0] == 0
        assert run("plan", "--model", REPO)[0] == 0
    assert seen == ["hf_of_env", "hf_of_env"]


def test_plan_of_a_folder_takes_its_dims(tmp_path: Path) -> None:
    write_sound(tmp_path)
    code, planned = run_json("plan", "--model", tmp_path)
    assert (code, planned["block_size_tokens"], planned["model"]) == (0, 1568, tmp_path.name)


def test_plan_of_a_folder_without_drafter_refuses_drafts(tmp_path: Path) -> None:
    write_sound(tmp_path)
    code, output = run("plan", "--model", tmp_path, "--speculative-tokens", 2)
    assert code == 2
    assert "mtp" in output


def test_inspect_json_has_the_promised_keys(tmp_path: Path) -> None:
    write_sound(tmp_path)
    code, report = run_json("inspect", tmp_path)
    assert code == 0
    assert set(report) >= {"precision", "errors", "warnings", "mtp", "vision", "bytes_per_token"}
    assert report["precision"]["down_proj"] == "NVFP4 W4A4"
    assert (report["mtp"], report["vision"], report["errors"]) == (False, False, [])


def test_inspect_fault_has_code_names_sentence_and_advice(tmp_path: Path) -> None:
    write_sound(tmp_path)
    code, report = run_json("inspect", tmp_path, "--speculative-tokens", 3)
    assert code == 1
    (fault,) = report["errors"]
    assert set(fault) == {"code", "names", "says", "do"}
    assert fault["names"] == ["mtp"]
    assert "no-mtp" in run("inspect", tmp_path, "--speculative-tokens", 3)[1]


@pytest.mark.parametrize("words", [["/no/such"], ["."], [""], ["a/b/c"], ["--revision"]])
def test_inspect_of_nothing_is_wrong_use(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("inspect", *words)[0] == 2


def test_inspect_embedded_reads_the_packaged_model() -> None:
    code, report = run_json("inspect", "embedded")
    assert (code, report["errors"]) == (0, [])
    assert report["precision"]["experts"] == "NVFP4 W4A4"


def test_inspect_and_plan_of_a_repository_read_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sound(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    files["model.safetensors"] = files["model.safetensors"]
    with serve(files) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        code, report = run_json("inspect", REPO)
        assert (code, report["errors"]) == (0, [])
        assert report["precision"] == run_json("inspect", tmp_path)[1]["precision"]
        assert run_json("plan", "--model", REPO)[1]["block_size_tokens"] == 1568
        shards = [wanted for _, path, wanted in hub.log if path.endswith(".safetensors")]
        assert shards
        assert all(shards)
        hub.status = 401
        code, output = run("inspect", REPO)
        assert code == 1
        assert "HF_TOKEN" in output


def test_inspect_of_a_repository_finds_a_cut_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sound(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    files["model.safetensors"] = files["model.safetensors"][:-7]
    with serve(files) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        code, report = run_json("inspect", REPO)
    assert code == 1
    assert report["errors"][0]["names"] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ("{}", 0),
        ('{"driver": "570.133.20", "cuda_image": "13.0", "gpu": "RTX 5090", "capability": [12, 0]}', 3),
        ('{"shm_mib": 64, "tensor_parallel": 2}', 1),
        ('{"driver": 580}', 2),
        ("[]", 2),
        ("{", 2),
        ("", 2),
    ],
)
def test_doctor_facts_give_exit_code(tmp_path: Path, facts: str, code: int) -> None:
    path = tmp_path / "facts.json"
    path.write_text(facts)
    assert run("doctor", "--facts", path)[0] == code


def test_doctor_json_has_the_promised_keys(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text('{"shm_mib": 64, "tensor_parallel": 2}')
    _, report = run_json("doctor", "--facts", path)
    assert set(report) == {"ok", "checks"}
    assert set(report["checks"][0]) == {"id", "ok", "seen", "needed", "says", "do"}
    assert run("doctor", "--facts", tmp_path / "none.json")[0] == 2


def test_doctor_of_this_host_ends_with_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, report = run_json("doctor")
    assert code in (0, 1, 3)
    assert (code == 0) is report["ok"]
    assert len({check["id"] for check in report["checks"]}) == len(report["checks"])


def test_fetch_downloads_then_finds_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sound(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    monkeypatch.setattr(fetching, "DISK_MARGIN_BYTES", 0)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with serve(files) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        code, output = run("fetch", REPO)
        assert code == 0
        folder = Path(output.strip().splitlines()[-1])
        assert {path.name for path in folder.iterdir()} == set(files)
        hub.status = 401
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert run("fetch", REPO)[0] == 0
        monkeypatch.delenv("HF_HUB_OFFLINE")
        code, output = run("fetch", REPO)
        assert code == 1
        assert "HF_TOKEN" in output
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
        hub.status = None
        assert run("fetch", REPO)[0] == 0
        assert list((tmp_path / "elsewhere").glob("models--*"))
    assert run("fetch", tmp_path / "model")[0] == 2
    write_sound(tmp_path / "model")
    code, output = run("fetch", tmp_path / "model")
    assert code == 2
    assert "nothing to download" in output


@pytest.mark.parametrize(
    "words",
    [["plan", "--gpu", "rtx-5090"], ["plan"], ["inspect", "FOLDER"], ["doctor"]],
    ids=["plan", "bare plan", "inspect", "doctor"],
)
def test_command_loads_neither_torch_nor_vllm(tmp_path: Path, words: list[str]) -> None:
    write_sound(tmp_path)
    arguments = [str(tmp_path) if word == "FOLDER" else word for word in words]
    code = f"""
import importlib, sys
from qwen_nvfp4_serve import cli
from qwen_nvfp4_serve.cli import {words[0]}
{words[0]}.register(cli.app)
try:
    cli.app({arguments!r})
except SystemExit as stop:
    pass
heavy = {{"torch", "vllm", "transformers", "numpy"}} & set(sys.modules)
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
