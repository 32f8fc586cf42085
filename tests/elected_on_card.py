"""How many experts the streams of the engine bench elect: python -m tests.elected_on_card MODEL_FOLDER OUT.json

Not a test. Dummy weights and prompts as the bench has them, eager, on vLLM's own router: a call whose elections are
recorded is left to it by our kernels too, and both elect from the same logits: one count holds for stock and ours.
Nothing is timed, so the engine's core stays in this process: vLLM is imported once, and no core can end alone.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from qwen_nvfp4_serve.bench.engine import EngineSpec
from qwen_nvfp4_serve.bench.engine_timer import Timer
from qwen_nvfp4_serve.bench.engine_worker import DEFAULTS, ENVIRONMENT, weights_are_ours
from qwen_nvfp4_serve.bench.orphans import bind_children
from qwen_nvfp4_serve.kernels.admission.card_report import ENGINE, LABELS

STREAMS, PROMPT, ANSWER = 8, 128, 48
CONTEXT, POOL_BYTES = 4096, 1 << 30
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main() -> None:
    """Writes {streams, distinct: {mean, low, high}, layers, steps}."""
    bind_children()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(IN_ONE_PROCESS)
    numpy, vllm = import_module("numpy"), import_module("vllm")
    options: dict[str, Any] = {
        **DEFAULTS,
        **ENGINE,
        **LABELS["stock"][1],
        "model": sys.argv[1],
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": CONTEXT,  # what it runs before it is up; a block of the cache holds 2,096
        "enforce_eager": True,
        "enable_return_routed_experts": True,
        "enable_prefix_caching": True,  # what records them asks for it
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": POOL_BYTES,
        "skip_tokenizer_init": True,
    }
    engine = vllm.LLM(**options)
    if not weights_are_ours(engine):
        raise RuntimeError("vLLM's own dummy weights: every token elects the same experts")
    prompts = Timer(engine, EngineSpec(model_folder=sys.argv[1], configurations={})).prompts(STREAMS, PROMPT)
    sampling = vllm.SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0, detokenize=False)
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    elected = [numpy.asarray(answer.outputs[0].routed_experts) for answer in answers]  # [positions, layers, top_k]
    last = min(one.shape[0] for one in elected)
    positions, layers = range(last - ANSWER + 2, last), elected[0].shape[1]
    counts = [len(numpy.unique([one[p, layer] for one in elected])) for p in positions for layer in range(layers)]
    distinct = {"mean": sum(counts) / len(counts), "low": min(counts), "high": max(counts)}
    found = {"streams": STREAMS, "distinct": distinct, "layers": layers, "steps": len(positions)}
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1))
    print(json.dumps(found), flush=True)


def run() -> int:
    """The exit code of `main`; what failed is shown."""
    try:
        main()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # vLLM's own end takes long, and need not come
