"""Runs engine configurations one after another: `python -m …bench.engine_worker SPEC.json OUT.json`.

All in this process but those that name their NVFP4 kernels, which are each a process's from its start.

With a third argument, GATE, each engine waits before it is measured: it makes GATE.ready and goes on once GATE.go is
there. So engines can start side by side, which takes minutes of compiling, and be measured one at a time.

A process of its own, because it becomes the engine. As in a server the engine's core has a process of its own again;
VLLM_ENABLE_V1_MULTIPROCESSING=0 puts it in here. What is asked of it (`engine_inside`) works in both, and here no card
is touched: that would take memory of it and keep the core from being forked. vLLM is loaded by name: nothing else in
this package imports it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from qwen_nvfp4_serve.bench.clocks import ClockWatch, watched_clocks
from qwen_nvfp4_serve.bench.engine import (
    BACKEND,
    EngineResult,
    EngineRun,
    EngineSpec,
    decode_rates,
    dump_engine,
    dump_spec,
    read_engine,
    read_spec,
)
from qwen_nvfp4_serve.bench.engine_timer import Timer
from qwen_nvfp4_serve.bench.files import write_whole
from qwen_nvfp4_serve.bench.machine import query_cards
from qwen_nvfp4_serve.bench.orphans import bind_children, die_with_parent, needing_children
from qwen_nvfp4_serve.bench.statistics import spread
from qwen_nvfp4_serve.errors import QwenNvfp4Error

MODULE = "qwen_nvfp4_serve.bench.engine_worker"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # as the server runs: in one process the step waits for the requests' Python
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
    "worker_extension_cls": "qwen_nvfp4_serve.bench.engine_inside.Inside",
}
BACKEND_VARIABLE = "QWEN_NVFP4_BACKEND"
SCRATCH = "QWEN_NVFP4_BENCH_SCRATCH"  # a folder for what this process may leave, removed by who started it
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # what a start leaves for the next
LOOK_EVERY_S = 0.1
CORE_END_S = 10.0  # vLLM itself gives its core 5 s to end


def main() -> None:
    """Entry point."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    bind_children()
    spec, out = read_spec(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    gate = sys.argv[3] if len(sys.argv) > 3 else None
    with tempfile.TemporaryDirectory(dir=os.environ.pop(SCRATCH, None)) as caches:
        if spec.restarts:
            os.environ.update({name: f"{caches}/{name.lower()}" for name in CACHES})
        runs = tuple(run_of(spec, label, Path(caches), gate) for label in spec.configurations)
        if spec.restarts:  # what a configuration leaves in the caches is there for those after it
            runs = (replace(runs[0], cold=True), *runs[1:])
            runs = tuple(replace(run, restart_s=restart_seconds(spec, run.label, Path(caches))) for run in runs)
    versions = {name: str(import_module(name).__version__) for name in ("vllm", "torch")}
    write_whole(out, dump_engine(EngineResult(spec=spec, cards=query_cards(), runs=runs, **versions)))


def run_of(spec: EngineSpec, label: str, folder: Path, gate: str | None) -> EngineRun:
    """The run of `label`, measured here, or in a process of its own where it names its NVFP4 kernels."""
    options = spec.configurations[label]
    if BACKEND in options:
        return in_new_process(spec, label, folder, gate)
    return measure(spec, label, options, gate)


def in_new_process(spec: EngineSpec, label: str, folder: Path, gate: str | None = None) -> EngineRun:
    """The run of `label` in a process of its own, which finds its NVFP4 kernels named from its start. folder: for the
    files of both."""
    options = dict(spec.configurations[label])
    backend = options.pop(BACKEND, None)
    spec_file, result_file = folder / "spec.json", folder / "result.json"
    spec_file.write_bytes(dump_spec(replace(spec, configurations={label: options}, restarts=0)))
    words = [sys.executable, "-m", MODULE, str(spec_file), str(result_file), *([gate] if gate else [])]
    environment = os.environ | {SCRATCH: str(folder)} | ({BACKEND_VARIABLE: backend} if backend else {})
    code = subprocess.run(words, env=environment, check=False, preexec_fn=die_with_parent).returncode
    if code != 0:
        raise QwenNvfp4Error(f"the engine of {label}", seen=f"exit code {code}", do="Its output is above.")
    (run,) = read_engine(result_file).runs
    return replace(run, options=run.options | {BACKEND: backend}) if backend else run


def restart_seconds(spec: EngineSpec, label: str, folder: Path) -> tuple[float, ...]:
    """How long each new process takes to have the engine of `label` up; it answers once and ends."""
    nothing: tuple[int, ...] = ()
    bare = replace(spec, streams=nothing, prefills=nothing, depths=nothing, profile_tokens=0)
    found = []
    for _ in range(spec.restarts):
        found.append(in_new_process(bare, label, folder).load_s)
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
    engine = None
    try:
        began_s = time.perf_counter()
        engine = start(options)
        load_s = time.perf_counter() - began_s
        with needing_children():
            if options["load_format"] == "dummy" and not weights_are_ours(engine):
                print("vLLM's own dummy weights: tokens elect the same experts", flush=True)
            if gate is not None:
                wait_at(gate)
            bare = EngineRun(
                label=label,
                options={name: str(value) for name, value in options.items()},
                load_s=load_s,
                decode={},
                prefill={},
                depths={},
                used_bytes=None,
                kernels=(),
                side_by_side=gate is not None,
                core_process=has_core_process(engine),
            )
            run = measured(engine, spec, bare)
    finally:
        end_core(engine)
    if not run.core_process:  # what a core of its own leaves has gone with it
        del engine
        gc.collect()
        import_module("vllm.distributed").cleanup_dist_env_and_memory()
    return run


def start(options: dict[str, Any]) -> Any:
    """The engine, up. Meanwhile Ctrl-C ends this process as it stands: vLLM 0.32 takes no notice of it, and waits for
    minutes for a core that it has ended."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return import_module("vllm").LLM(**options)
    finally:
        signal.signal(signal.SIGINT, before)


def measured(engine: Any, spec: EngineSpec, run: EngineRun) -> EngineRun:
    """The run with everything that an engine tells that is up."""
    timer = Timer(engine, spec)
    timer.seconds(spec.short, 1)
    with watched_clocks() as watch:  # over before a profile, which slows steps
        run = replace(timed(timer, run, watch), clocks=watch.found)
    model_bytes, used_bytes, reserved_bytes = memory(engine)  # before a profiler takes its own
    kernels = {
        count: timer.kernels(spec.profile_tokens, count) for count in spec.profile_streams if spec.profile_tokens
    }
    return replace(
        run,
        kernels=kernels.pop(1, ()),
        kernels_at=kernels,
        kernels_apart=True,
        prefill_steps=timer.prefill_steps,
        model_bytes=model_bytes,
        used_bytes=used_bytes,
        reserved_bytes=reserved_bytes,
        graph_us=graphs(engine, spec.streams),
    )


def timed(timer: Timer, run: EngineRun, watch: ClockWatch) -> EngineRun:
    """The run with every rate of the spec; the watch knows which of them is taken."""
    spec = timer.spec
    decode = {}
    for streams in spec.streams:
        timer.seconds(spec.short, streams)
        with watch.during(f"decode {streams}"):
            pairs = [
                [timer.seconds(tokens, streams, name=f"decode {streams}") for tokens in (spec.short, spec.long)]
                for _ in range(spec.rounds)
            ]
        decode[streams] = decode_rates(spec, streams, [short for short, _ in pairs], [long for _, long in pairs])
        print(f"{run.label}: decode {streams} streams {decode[streams].median:.1f} tokens/s", flush=True)
    prefill = {}
    for tokens in spec.prefills:
        timer.seconds(1, 1, tokens)
        with watch.during(f"prefill {tokens}"):
            found = spread(tokens / timer.seconds(1, 1, tokens) for _ in range(spec.rounds))
        if found is not None:
            prefill[tokens] = found
    depths = {}
    for depth in spec.depths:
        with watch.during(f"behind {depth}"):
            depths[depth] = timer.behind(depth)
        print(f"{run.label}: decode behind {depth} tokens {depths[depth].decode:.1f} tokens/s", flush=True)
    return replace(run, decode=decode, prefill=prefill, depths=depths)


def has_core_process(engine: Any) -> bool:
    """False if vLLM keeps the engine's core in this process, as an attribute of its client."""
    return not hasattr(engine.llm_engine.engine_core, "engine_core")


def weights_are_ours(engine: Any) -> bool:
    """True if the model was filled by `dummy_weights`, in whichever process."""
    return all(engine.collective_rpc("bench_filled"))


def memory(engine: Any) -> tuple[int | None, int | None, int | None]:
    """Bytes of the model, of the card in use, and that the engine holds. None where vLLM does not say: what was
    measured is not lost for it."""
    try:
        ((model, used, reserved),) = engine.collective_rpc("bench_memory")
    except Exception as error:
        print(f"memory not known: {error}", flush=True)
        return None, None, None
    return model, used, reserved


def graphs(engine: Any, streams: Sequence[int]) -> dict[int, float]:
    """Microseconds of a replay of each of these streams' decode graphs; none where vLLM's have changed."""
    try:
        (found,) = engine.collective_rpc("bench_graphs", args=(list(streams),))
    except Exception as error:
        print(f"decode graphs not timed: {error}", flush=True)
        return {}
    return {int(tokens): float(us) for tokens, us in found}


def end_core(engine: Any | None) -> None:
    """Ends an engine, also one that failed on its way up: a core that is left holds its card."""
    try:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
    finally:
        for child in multiprocessing.active_children():
            child.join(CORE_END_S)
            if child.is_alive():
                child.kill()
                child.join()


def cause(error: Exception) -> str:
    """The last line that says something: pydantic ends with an address."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("For further information visit")]
    return f"{type(error).__name__}: {telling[-1]}" if telling else type(error).__name__


def run() -> int:
    """The exit code of `main`; what failed is said in a sentence, below the traceback of what is not of ours."""
    try:
        main()
    except QwenNvfp4Error as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        print(f"error: {QwenNvfp4Error('engine bench', seen=cause(error))}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
elif __name__ == "__mp_main__":  # a core, or a worker of it, that is spawned: vLLM does so on a CPU
    die_with_parent()
