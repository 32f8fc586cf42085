"""Settings: every wrong line of `.env` stops the start with the key and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_nvfp4_serve import knob_docs
from qwen_nvfp4_serve import settings as settings_module
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.settings import Settings, knobs, load_settings


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    return tmp_path / ".env"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("VLLM_NVFP4_GEMM_BACKEND=marlin", "linear-backend"),
        ("VLLM_USE_FLASHINFER_MOE_FP4=1", "moe-backend"),
        ("VLLM_ATTENTION_BACKEND=FLASHINFER", "attention-backend"),
        ("MAX_MODEL_LENGTH=4096", "MAX_MODEL_LEN"),
        ("GPU_MEMORY_UTILISATION=0.9", "GPU_MEMORY_UTILIZATION"),
        ("KV_CACHE_DTYP=fp8", "KV_CACHE_DTYPE"),
        ("max_model_len=4096", "MAX_MODEL_LEN"),
        ("HOST=0.0.0.0", "BIND_HOST"),
        ("API_KEY=x", "VLLM_API_KEY"),
        ("TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL"),
        ("SOMETHING_ELSE=1", "SOMETHING_ELSE"),
        ("KV_CACHE_DTYPE=nvfp4", "refused by our policy"),
        ("KV_CACHE_DTYPE=int8", "KV_CACHE_DTYPE"),
        ("MAX_MODEL_LEN=4k", "MAX_MODEL_LEN"),
        ("MAX_MODEL_LEN=-1", "MAX_MODEL_LEN"),
        ("MAX_NUM_SEQS=0", "MAX_NUM_SEQS"),
        ("GPU_MEMORY_UTILIZATION=94", "GPU_MEMORY_UTILIZATION"),
        ("GPU_MEMORY_UTILIZATION=nan", "GPU_MEMORY_UTILIZATION"),
        ("PORT=70000", "PORT"),
        ("PORT=http", "PORT"),
        ("VISION=maybe", "VISION"),
        ("PATCHES=of", "PATCHES"),
        ("DEVICE=gpu", "DEVICE"),
        ("NVFP4_BACKEND=cutlass", "NVFP4_BACKEND"),
        ("EXTRA_ARGS='--a \"'", "EXTRA_ARGS"),
        ("just words", ".env line 1"),
        ("MAX_NUM_SEQS=8\nMAX_NUM_BATCHED_TOKENS=16\nMAX_NUM_SEQS=64", "MAX_NUM_BATCHED_TOKENS"),
    ],
)
def test_load_settings_bad_line_is_refused_naming_what_would_be_right(env_file: Path, line: str, says: str) -> None:
    env_file.write_text(line + "\n")
    with pytest.raises(UsageError, match=says) as caught:
        load_settings(env_file, {})
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("PORT=70000", "a whole number from 1 to 65535"),
        ("PORT=http", "a whole number from 1 to 65535"),
        ("PORT=8000.5", "a whole number from 1 to 65535"),
        ("PORT=" + "9" * 5000, "a whole number from 1 to 65535"),
        ("MAX_MODEL_LEN=15", "a whole number, at least 16"),
        ("GPU_MEMORY_UTILIZATION=1", "a number, more than 0 and less than 1"),
        ("GPU_MEMORY_UTILIZATION=nan", "a number, more than 0 and less than 1"),
        ("CPU_KV_CACHE_GIB=inf", "a number, more than 0 and at most 1024"),
        ("VISION=perhaps", "1 or 0"),
        ("KV_CACHE_DTYPE=int8", "fp8 or bfloat16"),
        ("DEVICE=gpu", "auto, cuda or cpu"),
        ("SERVED_MODEL_NAME=a b", "letters, digits and . / : @ + - _ only, a letter or digit first"),
        ("VLLM_API_KEY=a b", "printable ASCII without spaces: no client can send another key"),
    ],
)
def test_load_settings_bad_value_says_what_was_seen_expected_and_where_to_change_it(
    env_file: Path, line: str, expected: str
) -> None:
    env_file.write_text(line + "\n")
    name, _, value = line.partition("=")
    with pytest.raises(UsageError) as caught:
        load_settings(env_file, {})
    error = caught.value
    assert (error.what, error.expected) == (name, expected)
    assert error.do
    assert error.do.endswith(f"Change {name} in .env.")
    assert error.seen == "a secret" if "KEY" in name else value[:20] in str(error.seen)
    with pytest.raises(UsageError, match="in the environment, which wins over"):
        load_settings(env_file, {name: value})


def test_load_settings_value_close_to_a_right_one_is_guessed(env_file: Path) -> None:
    env_file.write_text("KV_CACHE_DTYPE=bf16\n")
    with pytest.raises(UsageError, match="Did you mean bfloat16"):
        load_settings(env_file, {})


@pytest.mark.parametrize(
    ("text", "notices"),
    [
        ("PORT=8001\nVISION=1\n", []),
        ("PORT=8001\n#PORT=8002\n", []),
        (
            "PORT=8001\n\n# mine\nVISION=1\n\n\nexport PORT=8003\n",
            ["WARNING: PORT is set on lines 1 and 7 of .env: line 7 counts"],
        ),
        (
            "PORT=1\r\nHF_TOKEN=hunter1\r\nHF_TOKEN='hunter2'\r\nPORT=2\r\nPORT=8003\r\n",
            [
                "WARNING: PORT is set on lines 1, 4 and 5 of .env: line 5 counts",
                "WARNING: HF_TOKEN is set on lines 2 and 3 of .env: line 3 counts",
            ],
        ),
    ],
)
def test_load_settings_key_set_twice_is_one_warning_and_the_last_counts(
    env_file: Path, text: str, notices: list[str]
) -> None:
    env_file.write_bytes(text.encode())
    loaded = load_settings(env_file, {})
    assert [notice for notice in loaded.notices if "is set" in notice] == notices
    assert loaded.settings.port == (8003 if notices else 8001)
    assert "hunter" not in "".join(loaded.notices)


def test_load_settings_malformed_line_after_blank_ones_is_named_by_its_own_number(env_file: Path) -> None:
    env_file.write_text("PORT=8001\n\n\njust words\n")
    with pytest.raises(UsageError, match=r"\.env line 4"):
        load_settings(env_file, {})


def test_load_settings_two_bad_values_are_both_named(env_file: Path) -> None:
    env_file.write_text("PORT=0\nMAX_NUM_SEQS=x\n")
    with pytest.raises(UsageError, match=r"PORT.*MAX_NUM_SEQS"):
        load_settings(env_file, {})


def test_load_settings_secret_of_wrong_kind_is_not_echoed(env_file: Path) -> None:
    env_file.write_text("VLLM_API_KEY=hunter2\nPORT=0\n")
    with pytest.raises(UsageError) as caught:
        load_settings(env_file, {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
def test_load_settings_file_of_windows_is_read(env_file: Path, newline: str) -> None:
    env_file.write_bytes(b"\xef\xbb\xbf" + f"GPU_MEMORY_UTILIZATION=0.94{newline}PORT=8001{newline}".encode())
    loaded = load_settings(env_file, {})
    assert (loaded.settings.gpu_memory_utilization, loaded.settings.port) == (0.94, 8001)
    assert ["GPU_MEMORY_UTILIZATION, PORT" in notice for notice in loaded.notices] == (
        [True] if newline == "\r\n" else []
    )


def test_load_settings_carriage_return_from_the_environment_is_stripped_with_a_notice() -> None:
    loaded = load_settings(None, {"GPU_MEMORY_UTILIZATION": "0.94\r"})
    assert loaded.settings.gpu_memory_utilization == 0.94
    assert any("GPU_MEMORY_UTILIZATION" in notice for notice in loaded.notices)


def test_load_settings_environment_wins_and_empty_means_unset(env_file: Path) -> None:
    env_file.write_text("PORT=8001\nMODEL=\nexport MAX_NUM_SEQS=3  # comment\n")
    settings = load_settings(env_file, {"PORT": "8002"}).settings
    assert (settings.port, settings.model, settings.max_num_seqs) == (8002, None, 3)


def test_load_settings_misspelt_environment_variable_is_refused_and_others_are_left_alone() -> None:
    load_settings(None, {"PATH": "/bin", "HOSTNAME": "a", "PORTS": "1", "LANG": "C", "VLLM_LOGGING_LEVEL": "DEBUG"})
    with pytest.raises(UsageError, match="MAX_MODEL_LEN"):
        load_settings(None, {"MAX_MODEL_LENGTH": "1"})


def test_load_settings_variables_of_vllm_pass_through_if_vllm_reads_them(
    env_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_nvfp4_serve.settings_names._vllm_variables", lambda: frozenset({"VLLM_LOGGING_LEVEL"}))
    env_file.write_text("VLLM_LOGGING_LEVEL=DEBUG\nNCCL_DEBUG=INFO\n")
    assert load_settings(env_file, {}).passthrough == {"VLLM_LOGGING_LEVEL": "DEBUG", "NCCL_DEBUG": "INFO"}
    env_file.write_text("VLLM_LOGING_LEVEL=DEBUG\n")
    with pytest.raises(UsageError, match="VLLM_LOGGING_LEVEL"):
        load_settings(env_file, {})


def test_load_settings_reads_file_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "VLLM_API_KEY").write_text("from-file\n")
    monkeypatch.setattr(settings_module, "SECRETS_DIR", tmp_path)
    key = load_settings(None, {}).settings.vllm_api_key
    assert key is not None
    assert key.get_secret_value() == "from-file"


@pytest.mark.parametrize("line", ["VLLM_API_KEY hunter2", 'VLLM_API_KEY="hunter2', "HF_TOKEN: hunter2"])
def test_load_settings_malformed_line_does_not_echo_what_may_be_a_secret(env_file: Path, line: str) -> None:
    env_file.write_text(line + "\n")
    with pytest.raises(UsageError, match=r"\.env line 1") as caught:
        load_settings(env_file, {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["HF_TOKN", "HF_TOKENS", "CUDA_VISIBLE_DEVICE", "HF_HUB_OFLINE"])
def test_load_settings_misspelt_knob_with_a_library_prefix_is_refused(env_file: Path, name: str) -> None:
    env_file.write_text(f"{name}=x\n")
    with pytest.raises(UsageError, match="Did you mean"):
        load_settings(env_file, {})
    if len(name) >= 8:  # shorter names in the environment are not judged
        with pytest.raises(UsageError, match="Did you mean"):
            load_settings(None, {name: "x"})
    load_settings(None, {"HF_HUB_CACHE": "x", "CUDA_HOME": "x", "HF_XET_CACHE": "x"})


def test_load_settings_misspelt_name_of_the_docker_stack_is_refused(env_file: Path) -> None:
    """Only Compose reads these, and Compose passes over a name that it does not know."""
    env_file.write_text("QWEN_NVFP4_SHM_SIZE=4gb\nQWEN_NVFP4_MODELS=/data\n")
    load_settings(env_file, {})
    env_file.write_text("QWEN_NVFP4_SHMSIZE=4gb\n")
    with pytest.raises(UsageError, match="Did you mean QWEN_NVFP4_SHM_SIZE"):
        load_settings(env_file, {})


@pytest.mark.parametrize("key", ["schlüssel", "two words", "a\tb"])
def test_load_settings_key_that_no_client_can_send_is_refused_unechoed(key: str) -> None:
    with pytest.raises(UsageError, match="VLLM_API_KEY") as caught:
        load_settings(None, {"VLLM_API_KEY": key})
    assert key not in str(caught.value)


@pytest.mark.parametrize("value", ["--api-key", 'a"b', "a b", "-x"])
@pytest.mark.parametrize("name", ["SERVED_MODEL_NAME", "REVISION"])
def test_load_settings_name_that_would_be_read_as_a_flag_is_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        load_settings(None, {name: value})


def test_load_settings_env_file_that_is_a_directory_or_leads_nowhere_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="directory"):
        load_settings(tmp_path, {})
    (tmp_path / ".env").symlink_to(tmp_path / "none")
    with pytest.raises(UsageError, match="nowhere"):
        load_settings(tmp_path / ".env", {})


def test_load_settings_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not there"):
        load_settings(tmp_path / "mistyped.env", {}, required=True)


def test_load_settings_missing_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_settings(tmp_path / "none", {}).settings == Settings()


def test_load_settings_file_that_is_no_text_is_refused(env_file: Path) -> None:
    env_file.write_bytes(b"PORT=\xff\xfe\n")
    with pytest.raises(UsageError, match="UTF-8"):
        load_settings(env_file, {})


def test_settings_every_knob_has_group_and_description() -> None:
    for name, field in knobs().items():
        assert name == name.upper()
        assert field.description
        assert isinstance(field.json_schema_extra, dict)
        assert field.json_schema_extra["group"]


def test_env_example_matches_the_knobs_and_loads(tmp_path: Path) -> None:
    assert (knob_docs.ROOT / ".env.example").read_text() == knob_docs.env_example(), "run scripts/generate-docs"
    lines = [
        line.removeprefix("#") for line in knob_docs.env_example().splitlines() if "=" in line and line[1:2] != " "
    ]
    assert {line.partition("=")[0] for line in lines} == set(knobs())
    uncommented = tmp_path / ".env"
    uncommented.write_text("\n".join(lines))
    assert load_settings(uncommented, {}).settings == Settings()


def test_readme_table_matches_the_knobs() -> None:
    readme = (knob_docs.ROOT / "README.md").read_text()
    assert readme == knob_docs.with_table(readme), "run scripts/generate-docs"
