"""Runs engine configurations one after another in this process: `python -m …bench.engine_worker SPEC.json OUT.json`.

With a third argument, GATE, each engine waits before it is measured: it makes GATE.ready and goes on once GATE.go is
there. So engines can start side by side, which takes minutes of compiling, and be measured one at a time.

A process of its own, because it becomes the engine. vLLM is loaded by name: nothing else in this package imports it.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from qwen_nvfp4_serve.bench import dummy_weights
from qwen_nvfp4_serve.bench.engine import (
    DepthRates,
    EngineResult,
    EngineRun,
    EngineSpec,
    Kernel,
    decode_rates,
    dump_engine,
    dump_spec,
    read_engine,
    read_spec,
)
from qwen_nvfp4_serve.bench.files import write_whole
from qwen_nvfp4_serve.bench.machine import query_cards
from qwen_nvfp4_serve.bench.statistics import spread

MODULE = "qwen_nvfp4_serve.bench.engine_worker"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that the profiler sees the kernels
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its first-use compile took about 100 s on an H200
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
DEFAULTS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 16_384,
    "kv_cache_dtype": "fp8",
    "max_num_seqs": 8,
    "language_model_only": True,
    "enable_prefix_caching": False,
    "distributed_executor_backend": "uni",
    "disable_log_stats": False,  # the time stamps of each answer
}
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # what a start leaves for the next
MAX_KERNELS = 80
LOOK_EVERY_S = 0.1


def main() -> None:
    """Entry point."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    spec, out = read_spec(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if not dummy_weights.install():
        print("vLLM's own dummy weights: tokens elect the same experts", flush=True)
    gate = sys.argv[3] if len(sys.argv) > 3 else None
    with tempfile.TemporaryDirectory() as caches:
        if spec.restarts:
            os.environ.update({name: f"{caches}/{name.lower()}" for name in CACHES})
        runs = tuple(measure(spec, label, options, gate) for label, options in spec.configurations.items())
        if spec.restarts:  # what a configuration leaves in the caches is there for those after it
            runs = (replace(runs[0], cold=True), *runs[1:])
            runs = tuple(replace(run, restart_s=restart_seconds(spec, run.label, Path(caches))) for run in runs)
    versions = {name: str(import_module(name).__version__) for name in ("vllm", "torch")}
    write_whole(out, dump_engine(EngineResult(spec=spec, cards=query_cards(), runs=runs, **versions)))


def restart_seconds(spec: EngineSpec, label: str, folder: Path) -> tuple[float, ...]:
    """How long each new process takes to have the engine of `label` up; it answers once and ends."""
    bare = replace(
        spec,
        configurations={label: spec.configurations[label]},
        streams=(),
        prefills=(),
        depths=(),
        profile_tokens=0,
        restarts=0,
    )
    spec_file, result_file = folder / "spec.json", folder / "result.json"
    spec_file.write_bytes(dump_spec(bare))
    found = []
    for _ in range(spec.restarts):
        subprocess.run([sys.executable, "-m", MODULE, str(spec_file), str(result_file)], check=True)
        found.append(read_engine(result_file).runs[0].load_s)
        print(f"{label}: started again in {found[-1]:.0f} s", flush=True)
    return tuple(found)


def wait_at(gate: str) -> None:
    """Says that an engine is up, and waits until it may be measured."""
    Path(f"{gate}.ready").touch()
    while not Path(f"{gate}.go").exists():
        time.sleep(LOOK_EVERY_S)


def measure(spec: EngineSpec, label: str, overrides: dict[str, Any], gate: str | None = None) -> EngineRun:
    """Builds one engine, measures it and takes it down again."""
    options = DEFAULTS | {"model": spec.model_folder} | overrides
    began_s = time.perf_counter()
    engine = import_module("vllm").LLM(**options)
    load_s = time.perf_counter() - began_s
    if gate is not None:
        wait_at(gate)
    timer = Timer(engine, spec)
    timer.seconds(spec.short, 1)
    decode = {}
    for streams in spec.streams:
        timer.seconds(spec.short, streams)
        pairs = [(timer.seconds(spec.short, streams), timer.seconds(spec.long, streams)) for _ in range(spec.rounds)]
        decode[streams] = decode_rates(spec, streams, [short for short, _ in pairs], [long for _, long in pairs])
        print(f"{label}: decode {streams} streams {decode[streams].median:.1f} tokens/s", flush=True)
    prefill = {}
    for tokens in spec.prefills:
        timer.seconds(1, 1, tokens)
        found = spread(tokens / timer.seconds(1, 1, tokens) for _ in range(spec.rounds))
        if found is not None:
            prefill[tokens] = found
    depths = {}
    for depth in spec.depths:
        depths[depth] = timer.behind(depth)
        print(f"{label}: decode behind {depth} tokens {depths[depth].decode:.1f} tokens/s", flush=True)
    run = EngineRun(
        label=label,
        options={name: str(value) for name, value in options.items()},
        load_s=load_s,
        decode=decode,
        prefill=prefill,
        depths=depths,
        used_bytes=_used_bytes(),
        kernels=timer.kernels(spec.profile_tokens) if spec.profile_tokens else (),
        model_bytes=_model_bytes(engine),
        reserved_bytes=_reserved_bytes(),
        side_by_side=gate is not None,
    )
    _take_down(engine)
    return run


class Timer:
    """Times whole answers; each prompt is new, so that no cache answers."""

    def __init__(self, engine: Any, spec: EngineSpec):
        self.engine, self.spec, self.sent = engine, spec, 0

    def seconds(self, tokens: int, streams: int, prompt: int | None = None) -> float:
        """How long `streams` answers of `tokens` take together."""
        prompts = self.prompts(streams, prompt or self.spec.prompt)
        start_s = time.perf_counter()
        self._answers(prompts, tokens)
        return time.perf_counter() - start_s

    def behind(self, depth: int) -> DepthRates:
        """Rates of one answer behind `depth` tokens, by the engine's time stamps."""
        (answer,) = self._answers(self.prompts(1, depth), self.spec.long)
        stamps = answer.metrics
        return DepthRates(
            prefill=depth / (stamps.first_token_ts - stamps.scheduled_ts),
            decode=(self.spec.long - 1) / (stamps.last_token_ts - stamps.first_token_ts),
        )

    def prompts(self, streams: int, tokens: int) -> list[dict[str, list[int]]]:
        """New ones, of tokens that any vocabulary has."""
        prompts = []
        for _ in range(streams):
            self.sent += 1
            draw = Random(self.sent)  # a row that repeats would elect the same experts again and again
            prompts.append({"prompt_token_ids": [draw.randrange(5, 245) for _ in range(tokens)]})
        return prompts

    def _answers(self, prompts: list[dict[str, list[int]]], tokens: int) -> Any:
        sampling = import_module("vllm").SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        return self.engine.generate(prompts, sampling, use_tqdm=False)

    def kernels(self, tokens: int) -> tuple[Kernel, ...]:
        """The dearest kernels of a decode step (operators on a CPU), per token."""
        torch = import_module("torch")
        profiler, cuda = import_module("torch.profiler"), torch.cuda.is_available()
        activity = profiler.ProfilerActivity.CUDA if cuda else profiler.ProfilerActivity.CPU
        with profiler.profile(activities=[activity]) as trace:
            self.seconds(tokens, 1)
        field = "self_device_time_total" if cuda else "self_cpu_time_total"
        rows = sorted(trace.key_averages(), key=lambda row: -getattr(row, field))
        return tuple(
            Kernel(name=str(row.key)[:160], us=getattr(row, field) / tokens, calls=row.count / tokens)
            for row in rows[:MAX_KERNELS]
            if getattr(row, field) > 0
        )


def _used_bytes() -> int | None:
    cuda = import_module("torch").cuda
    if not cuda.is_available():
        return None
    free, total = cuda.mem_get_info()
    return int(total - free)


def _reserved_bytes() -> int | None:
    cuda = import_module("torch").cuda
    return int(cuda.memory_reserved()) if cuda.is_available() else None


def _model_bytes(engine: Any) -> int | None:
    """What vLLM logs as "Model loading took"; None where it does not say: what was measured is not lost for it."""
    try:
        (found,) = engine.collective_rpc(_counted_bytes)
    except Exception as error:
        print(f"memory of the model not known: {error}", flush=True)
        return None
    return None if found is None else int(found)


def _counted_bytes(worker: Any) -> int | None:
    found: int | None = getattr(worker.model_runner, "model_memory_usage", None)
    return found


def _take_down(engine: Any) -> None:
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    import_module("vllm.distributed").cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
