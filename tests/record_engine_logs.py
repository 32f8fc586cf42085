"""Record engine logs on a card for tests/data/engine_logs.json: python -m tests.record_engine_logs OUT.json [GPU_NAME]

Not a test. Starts vLLM once for each setting on a model whose cache has the real shape and whose weights are a few MB
(cache geometry depends on heads and layers only), reads block size and pool from its log, and writes the entries.
Four starts run at a time; all of them take about two minutes on an H200.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qwen_nvfp4_serve.planner.feedback import EngineFacts, read_engine_log
from qwen_nvfp4_serve.synthetic import ARCHITECTURES, CheckpointSpec
from qwen_nvfp4_serve.synthetic.config import model_config
from qwen_nvfp4_serve.units import GIB

POOL_GIB, CONTEXT = 4, 65_536
SHAPES = {"qwen3.5-35b-a3b": "35b-a3b", "qwen3.5-27b": "27b"}
SMALL = {"hidden": 512, "vocab": 512, "intermediate": 512, "experts": 16, "expert_intermediate": 128}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"model": "qwen3.5-35b-a3b", "gdn_prefill": "triton"},
    {"model": "qwen3.5-35b-a3b", "gdn_prefill": "triton", "prefix_caching": False},
    {"model": "qwen3.5-35b-a3b", "gdn_prefill": "triton", "state_dtype": "bfloat16"},
    {"model": "qwen3.5-35b-a3b", "gdn_prefill": "triton", "kv_cache_dtype": "bfloat16"},
    {"model": "qwen3.5-35b-a3b", "gdn_prefill": "triton", "speculative_tokens": 2, "prefix_caching": False},
    {"model": "qwen3.5-35b-a3b", "gdn_prefill": "flashinfer"},
    {"model": "qwen3.5-35b-a3b", "gdn_prefill": "flashinfer", "prefix_caching": False},
    {"model": "qwen3.5-35b-a3b", "gdn_prefill": "flashinfer", "speculative_tokens": 3},
    {"model": "qwen3.5-27b", "gdn_prefill": "triton"},
    {"model": "qwen3.5-27b", "gdn_prefill": "flashinfer"},
    {"model": "qwen3.5-27b", "gdn_prefill": "flashinfer", "speculative_tokens": 1},
    {"model": "qwen3.5-27b", "gdn_prefill": "flashinfer", "state_dtype": "bfloat16"},
)
START = """
import json, os, sys
from vllm import LLM
LLM(**json.loads(sys.argv[1]))
sys.stderr.flush()
os._exit(0)
"""


def options(setting: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of vllm.LLM for a setting."""
    drafts = setting.get("speculative_tokens", 0)
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "language_model_only": True,
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": 0.05,  # what must be free at the start: others may have the rest of the card
        "kv_cache_memory_bytes": POOL_GIB * GIB,
        "kv_cache_dtype": setting.get("kv_cache_dtype", "fp8"),
        "enable_prefix_caching": setting.get("prefix_caching", True),
        "gdn_prefill_backend": setting["gdn_prefill"],
        "mamba_ssm_cache_dtype": setting.get("state_dtype", "float32"),
        "speculative_config": {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
    }


def write_folder(folder: Path, model: str) -> None:
    """config.json with the cache geometry of a catalogue model and little else."""
    real = ARCHITECTURES[SHAPES[model]]
    small = {name: value for name, value in SMALL.items() if getattr(real, name)}
    spec = CheckpointSpec(architecture=dataclasses.replace(real, **small), style="bf16")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(spec)))


def record(setting: dict[str, Any], root: Path) -> tuple[EngineFacts, str]:
    """What one start logged, and the log itself. A start that fails after it planned its cache still counts."""
    folder = root / setting["model"]
    command = [sys.executable, "-c", START, json.dumps(options(setting, folder))]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    log = done.stdout + done.stderr
    return read_engine_log(log.splitlines()), log


def main() -> None:
    """Record every setting and write the entries; a start without a pool line is printed with the end of its log."""
    out, gpu = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "h200"
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for model in SHAPES:
            write_folder(root / model, model)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda setting: record(setting, root), SETTINGS))
    entries = []
    for setting, (facts, log) in zip(SETTINGS, results, strict=True):
        print(setting, facts, flush=True)
        if facts.pool_tokens is None or facts.block_size_tokens is None:
            print(log[-2000:], flush=True)
            continue
        given = {**setting, "gpu": gpu, "kv_pool_gib": POOL_GIB, "context": CONTEXT, "seqs": 4}
        expect = {"block_size_tokens": facts.block_size_tokens, "pool_tokens": facts.pool_tokens}
        entries.append({"about": f"measured: {gpu}, vLLM 0.33.0, dummy weights", "given": given, "expect": expect})
    out.write_text(json.dumps(entries, indent=2))


if __name__ == "__main__":
    main()
