"""Runs as a script: loads each checkpoint folder named on the command line in one process, one after another, with the
settings a CPU server has, and prints a JSON line {folder: [[token ids, log-probabilities] for each prompt]}.

One process imports vLLM once, so a checkpoint costs two seconds instead of a server start.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

PROMPTS = ("Hello, my name is", "The capital of France is", "def f(x):\n    return")
TOKENS = 32
MARK = "NUMERICS "


def greedy(folder: str, block_size: int) -> list[Any]:
    """Greedy tokens and their log-probabilities, prompt by prompt: equal batch shapes for equal results."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(
        model=folder,
        enforce_eager=True,
        language_model_only=True,
        kv_cache_dtype="fp8",
        enable_prefix_caching=True,
        block_size=block_size,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=64 << 20,
        generation_config="vllm",
        distributed_executor_backend="uni",
        seed=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    results = []
    for prompt in PROMPTS:
        output = engine.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        chosen = zip(output.token_ids, output.logprobs, strict=True)
        results.append([list(output.token_ids), [entry[token].logprob for token, entry in chosen]])
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return results


def log_from_the_start() -> None:
    """vLLM sets logging up only after its plugins ran in this process; servers' workers do so before."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())


if __name__ == "__main__":
    log_from_the_start()
    print(MARK + json.dumps({folder: greedy(folder, block_size=288) for folder in sys.argv[1:]}))
