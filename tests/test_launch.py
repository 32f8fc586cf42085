"""The command: what is served by default, what a knob changes, and that nothing secret is shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.launch import MASK, Capacity, Host, Launch, Model, build_launch, shown_command, shown_environment
from qwen_nvfp4_serve.settings import load_settings

CPU = Host(device="cpu", python="python", has_cxx=True)
GPU = Host(device="cuda", python="python", has_cxx=True)
LOCAL = Model(source="/models/a", ids=("a",), revision=None, local=True)
HUB = Model(source="owner/A", ids=("a", "owner/A"), revision="f" * 40, local=False)


def launch(host: Host = CPU, model: Model = LOCAL, capacity: Capacity | None = None, **env: str) -> Launch:
    loaded = load_settings(None, env)
    return build_launch(loaded.settings, model=model, capacity=capacity or Capacity(), host=host)


def value_of(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_build_launch_serves_the_promised_defaults() -> None:
    argv = launch().argv
    assert value_of(argv, "--host") == "127.0.0.1"
    assert value_of(argv, "--port") == "8000"
    assert value_of(argv, "--kv-cache-dtype") == "fp8"
    assert value_of(argv, "--reasoning-parser") == "qwen3"
    assert value_of(argv, "--tool-call-parser") == "qwen3_coder"
    assert {"--enable-prefix-caching", "--enable-auto-tool-choice", "--language-model-only"} <= set(argv)
    assert "--enforce-eager" not in argv


def test_build_launch_hub_model_is_served_under_alias_and_full_id_at_its_revision() -> None:
    argv = launch(GPU, HUB).argv
    start = argv.index("--served-model-name")
    assert argv[start + 1 : start + 3] == ("a", "owner/A")
    assert value_of(argv, "--revision") == "f" * 40


@pytest.mark.parametrize(("settings", "name"), [({}, "a"), ({"SERVED_MODEL_NAME": "mine"}, "mine")])
def test_build_launch_asks_for_the_name_that_it_serves(settings: dict[str, str], name: str) -> None:
    made = launch(GPU, HUB, **settings)
    assert made.model_id == name == value_of(made.argv, "--served-model-name")


def test_build_launch_knobs_reach_the_command() -> None:
    argv = launch(
        GPU, HUB, PORT="9000", KV_CACHE_DTYPE="bfloat16", PREFIX_CACHING="0", VISION="1", TENSOR_PARALLEL="2",
        MAX_MODEL_LEN="4096", SPECULATIVE_TOKENS="2", GDN_PREFILL="triton", GPU_MEMORY_UTILIZATION="0.9",
        NVFP4_BACKEND="marlin", EXTRA_ARGS="--seed 7", SERVED_MODEL_NAME="mine", SHUTDOWN_TIMEOUT_S="5",
    ).argv  # fmt: skip
    for flag, value in {
        "--port": "9000", "--kv-cache-dtype": "bfloat16", "--tensor-parallel-size": "2", "--max-model-len": "4096",
        "--gdn-prefill-backend": "triton", "--gpu-memory-utilization": "0.9", "--linear-backend": "marlin",
        "--moe-backend": "marlin", "--seed": "7", "--served-model-name": "mine", "--shutdown-timeout": "5",
    }.items():  # fmt: skip
        assert value_of(argv, flag) == value
    assert "--no-enable-prefix-caching" in argv
    assert "--language-model-only" not in argv
    assert '"num_speculative_tokens":2' in value_of(argv, "--speculative-config")


def test_build_launch_without_compiler_is_eager_with_one_warning() -> None:
    result = launch(Host(device="cpu", python="python", has_cxx=False))
    assert "--enforce-eager" in result.argv
    assert [notice for notice in result.notices if "compiler" in notice] == list(result.notices)
    assert len(result.notices) == 1
    assert result.environment["TORCHDYNAMO_DISABLE"] == "1"


def test_build_launch_asked_for_eager_does_not_warn_about_the_compiler() -> None:
    result = launch(Host(device="cpu", python="python", has_cxx=False), ENFORCE_EAGER="1")
    assert result.argv.count("--enforce-eager") == 1
    assert not result.notices


def test_build_launch_in_a_container_listens_everywhere_whatever_is_published() -> None:
    inside = Host(device="cpu", python="python", has_cxx=True, in_container=True)
    assert value_of(launch(inside).argv, "--host") == "0.0.0.0"


def test_build_launch_secrets_are_in_the_environment_only_and_masked_when_shown() -> None:
    result = launch(VLLM_API_KEY="key-1", HF_TOKEN="hf-1")
    assert result.environment["VLLM_API_KEY"] == "key-1"
    assert result.environment["HF_TOKEN"] == "hf-1"
    shown = shown_environment(result)
    assert shown["VLLM_API_KEY"] == shown["HF_TOKEN"] == MASK
    assert not any("key-1" in word or "hf-1" in word for word in (*result.argv, *result.notices, *shown.values()))


@pytest.mark.parametrize(
    "extra",
    ["--host 0.0.0.0", "--host=0.0.0.0", "--hos 0.0.0.0", "--api-key x", "--api_key x", "--uds /x", "--config f.yaml",
     "--max-model-len 5", "--served-model-name z", "--chat-template x.jinja", "--port=1", "-tp 2", "--enforce-eager",
     "-tp2", "--no-enforce-eager", "--speculative_config.method mtp", "-sc.method mtp", "--api-key.x 1", "--host.foo 1",
     "--no-language-model-only", "--default_chat_template_kwargs.keep_thinking none", "--headless", "--grpc", "-h"],
)  # fmt: skip
def test_build_launch_extra_args_that_a_knob_owns_are_refused(extra: str) -> None:
    with pytest.raises(UsageError, match="EXTRA_ARGS sets"):
        launch(EXTRA_ARGS=extra)


@pytest.mark.parametrize("extra", ["model", "@file", "--seed 1 @file"])
def test_build_launch_extra_args_that_are_no_flags_are_refused(extra: str) -> None:
    with pytest.raises(UsageError, match="EXTRA_ARGS"):
        launch(EXTRA_ARGS=extra)


def test_build_launch_extra_args_of_other_flags_are_passed_on() -> None:
    argv = launch(EXTRA_ARGS="--seed 7 --max-logprobs=5").argv
    assert value_of(argv, "--seed") == "7"
    assert "--max-logprobs=5" in argv


def test_shown_command_and_environment_mask_passwords_and_every_token() -> None:
    loaded = load_settings(None, {"EXTRA_ARGS": "--otlp-traces-endpoint http://u:hunter2@h:1"})
    extra = {"HF_HUB_TOKEN": "hunter2", "HTTPS_PROXY": "http://u:hunter2@h"}
    made = build_launch(loaded.settings, model=LOCAL, capacity=Capacity(), host=CPU, passthrough=extra)
    assert "hunter2" not in shown_command(made)
    assert "hunter2" not in str(shown_environment(made))
    assert "@h" in shown_command(made)


def test_build_launch_telemetry_is_off_and_only_our_plugin_loads() -> None:
    environment = launch().environment
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["VLLM_PLUGINS"] == "qwen_nvfp4"


def test_build_launch_patches_off_and_activations_reach_the_plugin() -> None:
    environment = launch(PATCHES="off", CPU_ACTIVATIONS="w4a4").environment
    assert environment["QWEN_NVFP4_PATCHES"] == "off"
    assert environment["QWEN_NVFP4_CPU_ACTIVATIONS"] == "w4a4"


def test_build_launch_url_of_an_ipv6_host_has_brackets() -> None:
    assert launch(BIND_HOST="::1").url == "http://[::1]:8000/v1"


def test_build_launch_serves_our_template_with_the_thinking_that_is_kept() -> None:
    argv = launch(GPU, HUB, KEEP_THINKING="turn").argv
    assert Path(value_of(argv, "--chat-template")).read_text().startswith("{#- The chat format")
    assert value_of(argv, "--chat-template-content-format") == "openai"
    assert value_of(argv, "--default-chat-template-kwargs") == '{"keep_thinking": "turn"}'


@pytest.mark.parametrize(
    ("knob", "own_format", "ours"),
    [("auto", False, True), ("auto", True, False), ("ours", True, True), ("checkpoint", False, False)],
)
def test_build_launch_template_is_ours_unless_the_model_or_the_user_has_another(
    knob: str, own_format: bool, ours: bool
) -> None:
    argv = launch(CPU, dataclasses.replace(LOCAL, own_format=own_format), CHAT_TEMPLATE=knob).argv
    assert ("--chat-template" in argv) is ours


def test_build_launch_kernels_setting_and_cache_reach_the_plugin() -> None:
    environment = launch(GPU, NVFP4_BACKEND="hybrid", CACHE_DIR="/cache").environment
    assert environment["QWEN_NVFP4_BACKEND"] == "hybrid"
    assert environment["QWEN_NVFP4_CACHE_DIR"] == "/cache"
    assert launch(GPU).environment["QWEN_NVFP4_BACKEND"] == "auto"
