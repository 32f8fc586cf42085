"""The engine bench measures real engines of vLLM's CPU backend, their core in a process of its own or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest
from tests.processes import descendants, left_of

from qwen_nvfp4_serve.bench.engine import EngineRun, EngineSpec, dump_spec, read_engine
from qwen_nvfp4_serve.shims import python_path

EMBEDDED = Path(str(resources.files("qwen_nvfp4_serve"))) / "data" / "reference" / "moe"
LAYERS = 8
STREAMS = 4
# Writes down the tokens of every request of each step, in whichever process the steps are.
STEPS = """
import json
from qwen_nvfp4_serve.bench.engine_inside import Inside
class Counting(Inside):
    def bench_filled(self):
        execute = self.execute_model
        def counted(step):
            with open("steps", "a") as file:
                file.write(json.dumps(list(step.num_scheduled_tokens.values())) + "\\n")
            return execute(step)
        self.execute_model = counted
        return super().bench_filled()
"""
SPEC = EngineSpec(
    model_folder=str(EMBEDDED),
    configurations={
        "eager": {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": STREAMS,
            "block_size": 288,
            "kv_cache_memory_bytes": 64 << 20,
            "worker_extension_cls": "steps.Counting",
        }
    },
    streams=(1, STREAMS),
    prompt=16,
    short=2,
    long=66,  # far beyond what other work adds to the short ones
    prefills=(64,),
    depths=(64,),
    rounds=2,
    profile_tokens=64,  # a burst of other work in the short profile must not outweigh the steps between the two
    profile_streams=(1, STREAMS),
)
START_S = 240
ENDS_S = 5.0  # multiprocessing's resource tracker ends a moment after the last process

pytestmark = [pytest.mark.server, pytest.mark.alone, pytest.mark.timeout(600)]


def run(folder: Path, **variables: str) -> tuple[EngineRun, set[int], str]:
    """The run, the processes that there were beside the bench's while the engine was up, and the output."""
    environment = os.environ | {
        "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")),
        "VLLM_PLUGINS": "qwen_nvfp4",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",  # threads that wait for each other on a busy machine take many times longer
        **variables,
    }
    (folder / "steps.py").write_text(STEPS)
    (folder / "spec.json").write_bytes(dump_spec(SPEC))
    words = [sys.executable, "-m", "qwen_nvfp4_serve.bench.engine_worker", "spec.json", "engine.json", "gate"]
    with (folder / "log").open("wb") as log:
        bench = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while not (folder / "gate.ready").exists() and bench.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        beside = descendants(bench.pid)
        (folder / "gate.go").touch()
        code = bench.wait(START_S)
    finally:
        bench.kill()
    output = (folder / "log").read_text(errors="replace")
    assert code == 0, output[-4000:]
    (found,) = read_engine(folder / "engine.json").runs
    return found, beside, output


@pytest.mark.parametrize(
    ("variables", "apart"), [({}, True), ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, False)], ids=["apart", "inside"]
)
def test_engine_is_measured_wherever_its_core_runs(tmp_path: Path, variables: dict[str, str], apart: bool) -> None:
    found, beside, output = run(tmp_path, **variables)
    assert found.core_process is apart
    assert ("EngineCore" in output) is apart  # vLLM's prefix of what another process logs
    assert beside or not apart
    assert not left_of(beside, ENDS_S)
    assert "vLLM's own dummy weights" not in output
    assert "memory not known" not in output
    assert found.decode[1].median > 0
    assert found.prefill[64].median > 0
    assert found.depths[64].decode > 0
    for kernels in (found.kernels, found.kernels_at[STREAMS]):  # a step of several streams calls them once, too
        experts = next(kernel for kernel in kernels if kernel.name == "_C::cpu_fused_moe")
        assert experts.calls == LAYERS
        assert experts.us > 0
    steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    together = [step for step in steps if len(step) > 1]
    answers = [SPEC.short] + [SPEC.short, SPEC.long] * SPEC.rounds + [SPEC.short, SPEC.short + SPEC.profile_tokens]
    prefill, decode = [SPEC.prompt] * STREAMS, [1] * STREAMS
    assert together == [step for tokens in answers for step in [prefill, *[decode] * (tokens - 1)]]
    assert found.prefill_steps == {f"decode {STREAMS}": (1,) * 2 * SPEC.rounds, f"profile {STREAMS}": (1, 1)}
