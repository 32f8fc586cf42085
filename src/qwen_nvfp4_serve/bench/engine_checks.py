"""What can be said of an engine bench before its engine starts, which takes minutes: each raises UsageError."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen_nvfp4_serve.bench.engine import EngineSpec
from qwen_nvfp4_serve.bench.engine_worker import DEFAULTS
from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.preflight import read_config

APART = "VLLM_ENABLE_V1_MULTIPROCESSING"
AS_FITS = -1  # as max_model_len: vLLM takes what its memory holds, up to the model's own


def check_engines(spec: EngineSpec) -> None:
    """The model's folder, where the core shall run, and whether what is asked fits each configuration."""
    if os.environ.get(APART, "1") not in ("0", "1"):
        raise UsageError(APART, seen=repr(os.environ[APART]), expected="0 or 1", do="Set it so, or unset it.")
    positions = _positions(Path(spec.model_folder))
    for label, overrides in spec.configurations.items():
        options = DEFAULTS | overrides
        for name in ("max_model_len", "max_num_seqs"):
            value = options[name]
            if type(value) is not int or (value < 1 and (name, value) != ("max_model_len", AS_FITS)):
                expected, do = "a whole number above 0", "Change it in --config."
                raise UsageError(f"{name} of {label}", seen=str(value), expected=expected, do=do)
        _check_length(spec, label, options, None if _stretched(options) else positions)
        _check_streams(spec, label, options["max_num_seqs"])


def _positions(folder: Path) -> int | None:
    """Tokens that the model was made for. None where config.json does not say, or says how to go beyond."""
    config = read_config(folder, "Name a model's folder.")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        seen = type(text).__name__
        raise UsageError(f"{folder / 'config.json'}, text_config", seen=seen, expected="a JSON object")
    found = text.get("max_position_embeddings")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    plain = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) == "default"
    return found if type(found) is int and plain else None


def _stretched(options: dict[str, Any]) -> bool:
    """True if vLLM may allow more than config.json says."""
    return "hf_overrides" in options or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") != "0"


def _check_length(spec: EngineSpec, label: str, options: dict[str, Any], positions: int | None) -> None:
    length: int | None = options["max_model_len"]
    if length == AS_FITS:
        length = positions
    elif positions is not None and options["max_model_len"] > positions:
        expected = f"at most {positions}, the max_position_embeddings of config.json"
        do = f'Add "max_model_len": {positions} to its --config.'
        raise UsageError(f"max_model_len of {label}", seen=str(length), expected=expected, do=do)
    for name, tokens in _lengths(spec):
        if length is not None and tokens > length:
            do = "Ask for fewer, or raise its max_model_len."
            expected = f"at most {length}, prompt and answer together"
            raise UsageError(f"{name} of {label}", seen=f"{tokens} tokens", expected=expected, do=do)


def _lengths(spec: EngineSpec) -> Iterator[tuple[str, int]]:
    """The longest request of each kind, its answer counted."""
    if spec.streams:
        yield "streams", spec.prompt + spec.long
    if spec.prefills:
        yield "prefills", max(spec.prefills) + 1
    if spec.depths:
        yield "depths", max(spec.depths) + spec.long


def _check_streams(spec: EngineSpec, label: str, most: int) -> None:
    """More would wait for each other and not be decoded at once."""
    profiled = spec.profile_streams if spec.profile_tokens else ()
    for name, values in (("streams", spec.streams), ("profile_streams", profiled)):
        if max(values, default=0) > most:
            expected = f"at most {most}, its max_num_seqs"
            do = f'Ask for fewer, or add "max_num_seqs": {max(values)} to its --config.'
            raise UsageError(f"{name} of {label}", seen=str(max(values)), expected=expected, do=do)
