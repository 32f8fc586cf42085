"""The command line: dry-run, exit codes, one line for every refusal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [str(Path(sys.executable).parent / "qwen-nvfp4")]


def run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
    base |= {"XDG_CACHE_HOME": str(cwd / "cache"), "DEVICE": "cpu"} | env
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, env=base, capture_output=True, text=True, check=False)


def test_dry_run_prints_command_and_environment_and_writes_nothing(tmp_path: Path) -> None:
    done = run("serve", "--dry-run", cwd=tmp_path, VLLM_API_KEY="hunter2")
    assert done.returncode == 0, done.stderr
    assert " serve " in done.stdout
    assert "--kv-cache-dtype fp8" in done.stdout
    assert "VLLM_API_KEY='********'" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    assert "max_model_len is" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "says", "code"),
    [
        ("VLLM_NVFP4_GEMM_BACKEND=marlin", "linear-backend", 2),
        ("MAX_MODEL_LENGTH=4096", "MAX_MODEL_LEN", 2),
        ("KV_CACHE_DTYPE=nvfp4", "KV_CACHE_DTYPE", 2),
        ("MAX_MODEL_LEN=1000000", "MAX_MODEL_LEN", 2),
        ("MAX_MODEL_LEN=200000\nCPU_KV_CACHE_GIB=0.01", "MAX_MODEL_LEN", 2),
        ("MODEL=no-such-model", "MODEL: unknown model", 2),
        ("MODEL=./missing", "MODEL: model folder missing", 2),
        ("BIND_HOST=0.0.0.0", "/invocations", 2),
        ("PATCHES=off", "NVFP4", 2),
        ("VISION=1", "Set VISION=0", 1),
        ("TENSOR_PARALLEL=9", "TENSOR_PARALLEL", 2),
        ("EXTRA_ARGS=--host 0.0.0.0", "BIND_HOST", 2),
    ],
)
def test_serve_bad_setting_is_one_line_and_the_right_exit_code(tmp_path: Path, line: str, says: str, code: int) -> None:
    (tmp_path / ".env").write_text(line + "\n")
    done = run("serve", "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_serve_cuda_without_a_card_is_an_unsupported_host(tmp_path: Path) -> None:
    done = run("serve", "--dry-run", cwd=tmp_path, DEVICE="cuda", CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 3
    assert "DEVICE=cpu" in done.stderr


def test_serve_crlf_env_file_serves_what_it_says(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"PORT=8123\r\nMAX_NUM_SEQS=3\r\n")
    done = run("serve", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--port 8123" in done.stdout
    assert "--max-num-seqs 3" in done.stdout


def test_serve_without_compiler_warns_once_and_runs_eager(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("python3", "sh"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    done = run("serve", "--dry-run", cwd=tmp_path, PATH=str(tools))
    assert done.returncode == 0, done.stderr
    assert "--enforce-eager" in done.stdout
    assert done.stdout.count("C++ compiler") == 1


def test_serve_env_file_that_was_named_and_is_missing_is_refused(tmp_path: Path) -> None:
    done = run("serve", "--dry-run", "--env-file", "mistyped.env", cwd=tmp_path)
    assert done.returncode == 2
    assert "mistyped.env" in done.stderr


@pytest.mark.parametrize(("name", "says"), [("", "an empty path"), (".", "--env-file .: seen a folder")])
def test_doctor_env_file_that_is_no_file_is_refused(tmp_path: Path, name: str, says: str) -> None:
    done = run("doctor", "--env-file", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_serve_sigterm_while_preparing_exits_0(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DEVICE": "cpu", "CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [*COMMAND, "serve"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "preflight:" in line:
            break
    process.terminate()
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0
    assert "stopped: before the server was started" in rest
    assert not (tmp_path / "cache").exists()


def test_smoke_nothing_listens_is_one_line_and_1(tmp_path: Path) -> None:
    done = run("smoke", "--base-url", "http://127.0.0.1:9", cwd=tmp_path)
    assert done.returncode == 1
    assert "no OpenAI endpoint answers" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_ready_names_the_port_that_it_looked_at_or_the_server_that_it_found(tmp_path: Path) -> None:
    none = run("ready", cwd=tmp_path, PORT="8123", TMPDIR=str(tmp_path))
    assert (none.returncode, none.stdout) == (1, "not ready on port 8123: no server runs\n"), none.stderr
    state = {"pid": os.getpid(), "stage": "load", "message": "weights", "since": 0, "model": "m"}
    file = tmp_path / f"qwen-nvfp4-{os.getuid()}-8123.json"
    file.write_text(json.dumps(state | {"url": "http://127.0.0.1:8123/v1"}))
    some = run("ready", cwd=tmp_path, PORT="8123", TMPDIR=str(tmp_path))
    assert (some.returncode, some.stdout) == (1, "not ready at http://127.0.0.1:8123/v1: load: weights\n"), some.stderr


def test_version_and_models_print(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).stdout.strip()
    assert "qwen3.5-35b-a3b" in run("models", cwd=tmp_path, COLUMNS="200").stdout


def test_listing_on_a_terminal_without_utf8_is_printed_all_the_same(tmp_path: Path) -> None:
    done = run("plan", "--gpu", "rtx-5090", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "? KV cache" in done.stdout


def test_output_that_cannot_be_written_is_one_line_and_1(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "models"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device\n"


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("models", "typer"),
        ("models", "qwen_nvfp4_serve.models"),
        ("kernels", "qwen_nvfp4_serve.cli.kernels"),
        ("kernels", "rich.console"),
        ("--help", "qwen_nvfp4_serve.cli.quality"),
        ("nonsense", "qwen_nvfp4_serve.cli.wrong_use"),
        ("nonsense", "rich._emoji_codes"),
    ],
)
def test_interrupt_while_modules_are_loaded_is_130_without_a_traceback(
    tmp_path: Path, command: str, module: str
) -> None:
    code = (
        "import sys\nclass Interrupt:\n    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n            print('interrupted', flush=True)\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\nfrom qwen_nvfp4_serve.cli import main\nmain()\n"
    )
    words = [sys.executable, "-c", code, command]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")


def test_help_lists_every_command(tmp_path: Path) -> None:
    shown = run("--help", cwd=tmp_path, COLUMNS="200").stdout
    for name in ("serve", "smoke", "models", "patches", "make-checkpoint"):
        assert name in shown


@pytest.mark.parametrize("words", ["plan --gpu rtx-5090", "models", "inspect --help"])
def test_quick_commands_do_not_import_the_server(tmp_path: Path, words: str) -> None:
    code = (
        "import sys\nfrom qwen_nvfp4_serve.cli import main\ntry:\n    main()\nfinally:\n"
        "    print(*(set(sys.modules) & {'qwen_nvfp4_serve.serve', 'torch', 'vllm', 'httpx'}), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serv", "No such command 'serv'. Did you mean 'serve'? See qwen-nvfp4 --help."),
        ("plan --context 1e5", "--context: seen '1e5', expected a whole number. See qwen-nvfp4 plan --help."),
        ("plan --kv-pool-gib much", "--kv-pool-gib: seen 'much', expected a number."),
        (
            "plan --kv-cache-dtype nvfp4",
            "expected one of 'fp8', 'bfloat16'. An NVFP4 KV cache is refused by our policy",
        ),
        ("plan --contxt 5", "No such option: --contxt"),
        ("plan 5", "Got unexpected extra argument"),
        ("inspect", "Missing argument"),
        ("inspect x --speculative-tokens -1", "--speculative-tokens: seen '-1', expected at least 0."),
    ],
)
def test_wrong_words_are_one_line_and_2(tmp_path: Path, words: str, says: str) -> None:
    done = run(*words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_dry_run_json_safe_environment_has_no_newlines(tmp_path: Path) -> None:
    done = run("serve", "--dry-run", cwd=tmp_path)
    names = [line.partition("=")[0] for line in done.stdout.splitlines() if not line.startswith("#")][:-1]
    assert all(name.isidentifier() for name in names), json.dumps(names)
