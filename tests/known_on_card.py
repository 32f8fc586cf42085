"""Ask a reference model its known answers through vLLM on a card: python -m tests.known_on_card OUT.json [LLM_OPTIONS]

Not a test. All at once and some one by one, greedy, token by token as trained; QWEN_NVFP4_BACKEND decides whose
kernels.
LLM_OPTIONS: keyword arguments of vllm.LLM as JSON; `which`: moe (the default) or dense; `plain`: with the delta net's
projections in BF16.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.plain_projections import with_plain_projections
from training.known_answers import conversation_of, tokens_of
from training.tokenizer import REFERENCE_DIR, FastEncoder, load

from qwen_nvfp4_serve.bench.engine_worker import end_core
from qwen_nvfp4_serve.bench.orphans import bind_children

ONE_BY_ONE_OF = 6  # every sixth question is asked alone too
OPTIONS: dict[str, Any] = {
    "language_model_only": True,
    "kv_cache_dtype": "fp8",
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "gdn_prefill_backend": "triton",
    "kernel_config": {"enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False},
}


def main() -> None:
    """Asks, and writes {asked, wrong, wrong_alone, options, plain, backend}."""
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    folder = REFERENCE_DIR / options.pop("which", "moe")
    plain = options.pop("plain", False)
    records = json.loads((folder / "known_answers.json").read_text())
    encoder = FastEncoder(load())
    cases = [tokens_of(encoder, conversation_of(record)) for record in records]
    if plain:
        folder = with_plain_projections(folder, Path(tempfile.mkdtemp()) / "model")
    bind_children()
    vllm = import_module("vllm")
    engine = vllm.LLM(model=str(folder), **{**OPTIONS, **options})

    def wrong(indices: list[int]) -> list[str]:
        prompts = [{"prompt_token_ids": cases[i][0][: cases[i][1]]} for i in indices]
        wanted = [cases[i][0][cases[i][1] :] for i in indices]
        sampling = [vllm.SamplingParams(temperature=0, max_tokens=len(one) + 4, detokenize=False) for one in wanted]
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        given = [list(answer.outputs[0].token_ids)[: len(one)] for answer, one in zip(answers, wanted, strict=True)]
        return [records[i]["id"] for i, seen, one in zip(indices, given, wanted, strict=True) if seen != one]

    everything = list(range(len(records)))
    result = {
        "asked": len(records),
        "wrong": wrong(everything),
        "wrong_alone": [name for i in everything[::ONE_BY_ONE_OF] for name in wrong([i])],
        "options": options,
        "plain": plain,
        "backend": os.environ.get("QWEN_NVFP4_BACKEND"),
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    print(json.dumps(result), flush=True)
    end_core(engine)
    os._exit(0)  # vLLM's own end takes long


if __name__ == "__main__":
    main()
