"""Is this a name we know? Unknown, misspelt and obsolete variables, each with the right spelling."""

from __future__ import annotations

import difflib
import importlib.util
import io
import re
from collections.abc import Mapping
from pathlib import Path

from dotenv import dotenv_values
from dotenv.parser import Original, parse_stream

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.secret_files import opened

# Variables that vLLM once read and now ignores in silence, with what replaced them (vllm/envs.py of 0.33.0 lacks them).
OBSOLETE = {
    "VLLM_NVFP4_GEMM_BACKEND": "set NVFP4_BACKEND, or EXTRA_ARGS=--linear-backend …",
    "VLLM_USE_FLASHINFER_MOE_FP4": "set NVFP4_BACKEND, or EXTRA_ARGS=--moe-backend …",
    "VLLM_USE_FLASHINFER_MOE_FP8": "set EXTRA_ARGS=--moe-backend …",
    "VLLM_FLASHINFER_MOE_BACKEND": "set EXTRA_ARGS=--moe-backend …",
    "VLLM_USE_NVFP4_CT_EMULATIONS": "set EXTRA_ARGS=--linear-backend emulation",
    "VLLM_ATTENTION_BACKEND": "set EXTRA_ARGS=--attention-backend …",
    "VLLM_USE_V1": "remove it: there is only one engine now",
}
# Names people try, and what they mean here.
ALIASES = {
    "HOST": "BIND_HOST",
    "ADDRESS": "BIND_HOST",
    "VLLM_HOST": "BIND_HOST",
    "VLLM_PORT": "PORT",
    "API_KEY": "VLLM_API_KEY",
    "OPENAI_API_KEY": "VLLM_API_KEY",
    "MODEL_ID": "MODEL",
    "MODEL_NAME": "MODEL",
    "MODEL_PATH": "MODEL",
    "MODEL_REVISION": "REVISION",
    "CONTEXT": "MAX_MODEL_LEN",
    "CONTEXT_LENGTH": "MAX_MODEL_LEN",
    "MAX_CONTEXT": "MAX_MODEL_LEN",
    "MAX_LEN": "MAX_MODEL_LEN",
    "GPU_UTIL": "GPU_MEMORY_UTILIZATION",
    "GPU_MEM_UTIL": "GPU_MEMORY_UTILIZATION",
    "TP": "TENSOR_PARALLEL",
    "TENSOR_PARALLEL_SIZE": "TENSOR_PARALLEL",
    "TP_SIZE": "TENSOR_PARALLEL",
    "KV_DTYPE": "KV_CACHE_DTYPE",
    "CACHE_DTYPE": "KV_CACHE_DTYPE",
    "NUM_SPECULATIVE_TOKENS": "SPECULATIVE_TOKENS",
    "HUGGING_FACE_HUB_TOKEN": "HF_TOKEN",
    "HUGGINGFACE_TOKEN": "HF_TOKEN",
    "VLLM_EXTRA_ARGS": "EXTRA_ARGS",
    "VLLM_ARGS": "EXTRA_ARGS",
}
# `.env` may carry these for vLLM and its libraries, and Compose's own.
FOREIGN_PREFIXES = (
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "HF_",
    "TORCH",
    "TRITON_",
    "FLASHINFER_",
    "OMP_",
    "COMPOSE_",
    "DOCKER_",
    "PYTORCH_",
)
FOREIGN_NAMES = frozenset(
    {"MAX_JOBS", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "TZ", "TMPDIR", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"}
)
# What only docker-compose.yml reads (docs/docker.md, "Settings"). Compose itself passes over a name it does not know.
COMPOSE_PREFIX = "QWEN_NVFP4_"
COMPOSE_NAMES = frozenset(
    COMPOSE_PREFIX + name
    for name in (
        "GPU_BASE",
        "CPU_BASE",
        "FLASHINFER_KERNELS",
        "GPU_IMAGE",
        "CPU_IMAGE",
        "TOOLS_IMAGE",
        "MODELS",
        "RESULTS",
        "SHM_SIZE",
        "STOP_GRACE",
    )
)
# How alike, and how long, an environment variable must be to count as a misspelt knob: most names there are not ours.
CLOSE_IN_ENVIRONMENT = 0.87
DISTINCT_LENGTH = 8
CLOSE_IN_FILE = 0.6


def read_env_file(path: Path) -> tuple[dict[str, str], list[str]]:
    """The assignments of a `.env` file and a notice for each key that it sets twice; both empty when there is none.

    The last assignment counts, as for Compose and every other reader. Raises UsageError on a line that is none.
    """
    try:
        if not path.exists() and not path.is_symlink():
            return {}, []
        if not path.is_file() and not path.is_char_device():
            raise UsageError(f"{path}", seen=_kind(path), expected="a text file with KEY=value lines")
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows write a byte-order mark
    except PermissionError:
        raise UsageError(f"{path} may not be read by this user", do=f"Type: {opened(path)}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise UsageError(
            f"{path}", seen=str(error), expected="a readable UTF-8 text file", do="Save it as UTF-8."
        ) from None
    lines: dict[str, list[int]] = {}
    for binding in parse_stream(io.StringIO(text)):
        if binding.key:
            lines.setdefault(binding.key, []).append(_line(binding.original))
        if binding.error or (binding.key and binding.value is None):
            # Only the first word is shown: the rest may be a secret.
            word = re.match(r"\s*(?:export\s+)?([A-Za-z_]\w*)", binding.original.string)
            raise UsageError(
                f"{path.name} line {_line(binding.original)}",
                seen=f"{word[1]} …" if word else "no name",
                expected="KEY=value",
                do="Correct or remove the line.",
            )
    values = {key: value or "" for key, value in dotenv_values(stream=io.StringIO(text), interpolate=False).items()}
    return values, [_repeated(path, key, places) for key, places in lines.items() if len(places) > 1]


def _line(original: Original) -> int:
    """Where an assignment stands; the parser counts from the blank lines before it."""
    text = original.string
    return original.line + text[: len(text) - len(text.lstrip())].count("\n")


def _repeated(path: Path, key: str, lines: list[int]) -> str:
    *earlier, last = map(str, lines)
    return f"WARNING: {key} is set on lines {', '.join(earlier)} and {last} of {path.name}: line {last} counts"


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a directory (a container engine makes one where a file to mount is missing)"
    return "a link that leads nowhere" if path.is_symlink() else "no regular file"


def check_names(from_file: Mapping[str, str], environ: Mapping[str, str], knobs: frozenset[str]) -> dict[str, str]:
    """The file's variables that belong to vLLM or a library. Raises UsageError for every name that is nobody's."""
    for name in (*from_file, *environ):
        if name in OBSOLETE:
            raise UsageError(f"{name} is obsolete and would be ignored by vLLM", do=f"Instead, {OBSOLETE[name]}.")
    for name in environ:
        if len(name) < DISTINCT_LENGTH or name in knobs or name in FOREIGN_NAMES:
            continue
        if guess := _closest(name, knobs, CLOSE_IN_ENVIRONMENT):
            raise UsageError(f"{name} is not a knob", do=f"Did you mean {guess}? Rename or unset it.")
    passthrough = {}
    for name, value in from_file.items():
        if name in knobs:
            continue
        if name.startswith("VLLM_"):
            _check_vllm_name(name, knobs)
        elif not _is_foreign(name) or _closest(name, knobs, CLOSE_IN_ENVIRONMENT):
            names = COMPOSE_NAMES if name.startswith(COMPOSE_PREFIX) else knobs
            guess = ALIASES.get(name) or _closest(name.upper(), names, CLOSE_IN_FILE)
            hint = f"Did you mean {guess}?" if guess else "See .env.example for the knobs."
            raise UsageError(f"{name} in .env is not a knob", do=hint)
        passthrough[name] = value.strip()
    return passthrough


def _is_foreign(name: str) -> bool:
    return name in FOREIGN_NAMES | COMPOSE_NAMES or name.startswith(FOREIGN_PREFIXES)


def _closest(name: str, knobs: frozenset[str], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name, sorted(knobs), n=1, cutoff=cutoff)), None)


def _check_vllm_name(name: str, knobs: frozenset[str]) -> None:
    known = _vllm_variables()
    if known is None or name in known:
        return
    guess = ALIASES.get(name) or _closest(name, knobs | known, CLOSE_IN_FILE)
    hint = f"Did you mean {guess}?" if guess else "Remove it."
    raise UsageError(f"{name} in .env is read neither by us nor by the installed vLLM", do=hint)


def _vllm_variables() -> frozenset[str] | None:
    """Names that the installed vLLM reads, from the text of its envs.py (importing it would pull in torch)."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "envs.py"
    return frozenset(re.findall(r'"(VLLM_[A-Z0-9_]+)"', source.read_text())) if source.exists() else None
