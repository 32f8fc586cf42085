"""docker-compose.yml as Compose resolves it: valid by the specification, safe, and complete in its knobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine import TOOLS, need
from stack import ROOT, Stack

from qwen_nvfp4_serve.container import STOP_GRACE, STOP_MARGIN_S, duration_s
from qwen_nvfp4_serve.kernels.build import LIBRARIES
from qwen_nvfp4_serve.settings import default_of, load_settings

pytestmark = pytest.mark.docker

SERVERS, TOOLS_SERVICES = ("gpu", "cpu"), ("smoke", "bench")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """A project with no `.env`."""
    return Stack(tmp_path_factory.mktemp("empty"), "qwen-nvfp4-config", 8000)


@pytest.fixture(scope="module")
def services(stack: Stack) -> dict[str, Any]:
    """Every service, resolved."""
    return dict(stack.config()["services"])


def test_config_is_valid_by_the_compose_specification(stack: Stack) -> None:
    import compose_spec

    text = json.dumps(stack.config()).replace('"count": -1', '"count": "all"')  # Compose writes -1 for its own "all"
    project = compose_spec.PyCompose.from_json(text)
    project.validate()
    assert set(project.service_names()) == {*SERVERS, *TOOLS_SERVICES}
    with pytest.raises(ValueError, match="capdrop"):
        compose_spec.PyCompose.from_json(text.replace('"cap_drop"', '"capdrop"')).validate()


def test_up_alone_starts_the_gpu_service_and_nothing_else(stack: Stack) -> None:
    done = stack.compose("config", "--services")
    assert done.stdout.split() == ["gpu"]
    assert [name for name, row in stack.config()["services"].items() if not row.get("profiles")] == ["gpu"]


@pytest.mark.parametrize("name", SERVERS)
def test_server_is_confined(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["user"] == "1000:1000"
    assert service["read_only"] is True
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert service["logging"] == {"driver": "local"}  # which rotates
    assert service["restart"] == "unless-stopped"
    assert int(service["shm_size"]) >= 1 << 30
    assert not {"privileged", "ipc", "network_mode", "pid"} & service.keys()
    assert any(mount.startswith("/tmp:") and "exec" in mount for mount in service["tmpfs"])


@pytest.mark.parametrize("name", SERVERS)
def test_server_is_published_on_loopback_unless_told_otherwise(stack: Stack, name: str) -> None:
    ports = stack.config()["services"][name]["ports"]
    assert [(row["host_ip"], row["published"], row["target"]) for row in ports] == [("127.0.0.1", "8000", 8000)]
    ports = stack.config(more={"BIND_HOST": "192.0.2.7", "PORT": "9001"})["services"][name]["ports"]
    assert [(row["host_ip"], row["published"], row["target"]) for row in ports] == [("192.0.2.7", "9001", 9001)]


@pytest.mark.parametrize("name", SERVERS)
def test_server_listens_where_it_is_published_whatever_env_says_later(stack: Stack, name: str) -> None:
    """A restart reads `.env` anew, but the published port is that of the creation."""
    environment = stack.config()["services"][name]["environment"]
    assert (environment["BIND_HOST"], environment["PORT"]) == ("127.0.0.1", "8000")
    environment = stack.config(more={"BIND_HOST": "192.0.2.7", "PORT": "9001"})["services"][name]["environment"]
    assert (environment["BIND_HOST"], environment["PORT"]) == ("192.0.2.7", "9001")


def test_images_are_built_and_never_asked_of_a_registry(services: dict[str, Any]) -> None:
    assert {row["pull_policy"] for row in services.values()} == {"never"}
    assert all(row["build"]["target"] for row in services.values())


@pytest.mark.parametrize("name", SERVERS)
def test_server_health_check_and_grace_periods_fit_its_timeouts(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["healthcheck"]["test"] == ["CMD", "qwen-nvfp4", "ready"]
    assert (duration_s(service["healthcheck"]["start_period"]) or 0) >= int(default_of("START_TIMEOUT_S"))
    grace = duration_s(service["stop_grace_period"]) or 0
    assert grace >= int(default_of("SHUTDOWN_TIMEOUT_S")) + STOP_MARGIN_S
    assert service["environment"][STOP_GRACE] == "60s"


def test_gpu_service_reserves_cards_and_cpu_service_does_not(services: dict[str, Any]) -> None:
    devices = services["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"capabilities": ["gpu"], "driver": "nvidia", "count": -1}]
    assert "deploy" not in services["cpu"]


def test_secrets_of_the_shell_stay_there_and_only_their_names_are_passed_on(stack: Stack) -> None:
    secrets = {"VLLM_API_KEY": "sk-in-the-shell", "HF_TOKEN": "hf-in-the-shell"}
    shown = stack.compose("--profile", "*", "config", more=secrets).stdout
    assert "in-the-shell" not in shown
    assert "VLLM_API_KEY HF_TOKEN" in shown


def test_caches_are_volumes_and_hf_home_may_be_a_folder(stack: Stack, tmp_path: Path) -> None:
    mounts = {row["target"]: row for row in stack.config()["services"]["gpu"]["volumes"]}
    assert {target: row["type"] for target, row in mounts.items()} == {
        "/config": "bind",
        "/cache": "volume",
        "/cache/huggingface": "volume",
        "/models": "bind",
    }
    assert mounts["/config"]["read_only"] is True
    mounts = {row["target"]: row for row in stack.config(more={"HF_HOME": str(tmp_path)})["services"]["gpu"]["volumes"]}
    assert (mounts["/cache/huggingface"]["type"], mounts["/cache/huggingface"]["source"]) == ("bind", str(tmp_path))


def test_models_folder_of_the_host_is_seen_and_never_made(stack: Stack, tmp_path: Path) -> None:
    """Docker would make a misspelt folder, as root."""
    for given, source in ((None, stack.folder), (str(tmp_path), tmp_path), ("./mine", stack.folder / "mine")):
        more = {"QWEN_NVFP4_MODELS": given} if given else {}
        mounts = {row["target"]: row for row in stack.config(more=more)["services"]["gpu"]["volumes"]}
        models = mounts["/models"]
        assert (models["source"], models["read_only"]) == (str(source), True)
        assert models["bind"].get("create_host_path", False) is False


# What people's editors and habits make of a `.env`: its text, and the port and model that it means.
ENV_FILES = {
    "windows": (b"\xef\xbb\xbfPORT=8001\r\n\r\nMODEL=qwen3.5-27b\r\n# end\r\n", 8001, "qwen3.5-27b"),
    "quotes": (b"PORT=\"8001\" # the port\nMODEL='qwen3.5-27b'\n", 8001, "qwen3.5-27b"),
    "spaces": (b"PORT = 8001 \n  export MODEL=./my models/a#b # mine\n", 8001, "./my models/a#b"),
    "twice, no end of line": (b"PORT=8000\nMODEL=\nPORT=8001", 8001, None),
}


@pytest.mark.parametrize("name", ENV_FILES)
def test_odd_env_file_means_the_same_to_compose_and_to_us(stack: Stack, tmp_path: Path, name: str) -> None:
    text, port, model = ENV_FILES[name]
    (tmp_path / ".env").write_bytes(text)
    service = Stack(tmp_path, stack.name, 8000).config()["services"]["gpu"]
    published = [(row["published"], row["target"]) for row in service["ports"]]
    assert published == [(str(port), port)]
    environment = {key: value for key, value in service["environment"].items() if value is not None}
    for environ in (environment, {}):
        settings = load_settings(tmp_path / ".env", environ).settings
        assert (settings.port, settings.model) == (port, model)


def test_no_service_depends_on_another_and_tools_find_the_server_by_alias(services: dict[str, Any]) -> None:
    assert not any("depends_on" in service for service in services.values())
    for name in SERVERS:
        assert services[name]["networks"]["default"]["aliases"] == ["server"]
    for name in TOOLS_SERVICES:
        assert "http://server:8000/v1" in services[name]["entrypoint"]
        assert "ports" not in services[name]


def test_dockerfile_passes_hadolint() -> None:
    assert need(str(TOOLS / "bin" / "hadolint"), "--failure-threshold", "info", str(ROOT / "Dockerfile")) == ""


def test_dockerfile_ends_as_a_numbered_user_with_a_health_check() -> None:
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    for name in SERVERS:
        stage = next(text for text in stages if text.splitlines()[0].endswith(f" AS {name}"))
        words = [line.split(" ", 1) for line in stage.splitlines() if line and line[0].isupper()]
        last = {word[0]: word[-1] for word in words}
        assert last["USER"] == "1000:1000"
        assert last["STOPSIGNAL"] == "SIGTERM"
        assert last["ENTRYPOINT"] == '["qwen-nvfp4", "serve"]'
        assert 'CMD ["qwen-nvfp4", "ready"]' in last["HEALTHCHECK"]
        assert "org.opencontainers.image.title" in last["LABEL"]


def test_dockerfile_copies_what_the_kernels_are_compiled_from() -> None:
    """Folder by folder, so that no other change compiles them again."""
    copied = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:5] == "COPY "]
    folders = {ROOT / word for words in copied for word in words}
    for library in LIBRARIES:
        needed = {path.parent for path in (library.folder / library.sources[0], *library.headers)}
        assert needed <= folders, f"{library.name}: the stage `kernels`"
