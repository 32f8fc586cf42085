"""A vLLM of known speed, for the engine bench's worker and command."""

from __future__ import annotations

import os
from pathlib import Path

# 200 tokens/s a stream whatever their number, prompts for nothing; the second configuration twice as fast. A step is
# two calls of a kernel that takes 50 us and one more for each stream, and five more where prompts are in it. Several
# streams begin in one step if they were there before it, else in one or more.
STAND_IN = {
    "vllm/__init__.py": """
import importlib
import multiprocessing
import os
import time
from torch import profiler
__version__ = "0.0.stand-in"
class SamplingParams:
    def __init__(self, max_tokens, **_): self.max_tokens = max_tokens
class Answer:
    def __init__(self, tokens, seconds, step):
        self.metrics, self.scheduled_ts = self, float(step)
        self.first_token_ts = step + tokens / 1000
        self.last_token_ts = self.first_token_ts + seconds
class Core:
    engine_core = None  # in this process
    def shutdown(self): pass
class Client:  # of a core in another process, whose answers come through a queue
    def __init__(self):
        fork = multiprocessing.get_context("fork")
        self.answers, self.core = fork.Queue(), fork.Process(target=time.sleep, args=(600,), daemon=True)
        self.core.start()
    def shutdown(self): self.core.kill()
class LLM:
    def __init__(self, model, worker_extension_cls, fast=False, deaf=False, apart=False, late=False, **more):
        self.silent, wrong = more.get("silent", False), more.get("wrong")
        if wrong: raise ValueError(wrong)
        while deaf:  # to Ctrl-C, as vLLM is while it waits for its core
            open("deaf", "w").close()
            try: time.sleep(60)
            except KeyboardInterrupt: pass
        fast = fast or os.environ.get("QWEN_NVFP4_BACKEND") == "hybrid"
        self.rate, self.llm_engine = (400.0 if fast else 200.0), self
        if "VLLM_CACHE_ROOT" in os.environ and not os.path.exists(os.environ["VLLM_CACHE_ROOT"]):
            os.mkdir(os.environ["VLLM_CACHE_ROOT"])
            time.sleep(1.0)  # compiles
        self.engine_core = Client() if apart else Core()
        module, name = worker_extension_cls.rsplit(".", 1)
        self.worker = type("Worker", (getattr(importlib.import_module(module), name),), {"model_runner": self})()
        if more.get("graphs"): self.worker.bench_graphs = lambda tokens: [(one, 1000.0 * one) for one in tokens]
        if more.get("graphs") is False: self.worker.bench_graphs = None  # a vLLM that cannot be asked
        self.model_memory_usage = 3 << 30
        self.late, self.asleep, self.runs = late, False, 0
    def collective_rpc(self, method, args=()):
        return [getattr(self.worker, method)(*args)]
    def sleep(self, level, mode):
        assert (level, mode) == (0, "keep")  # any other forgets something
        self.asleep = True
    def wake_up(self, tags):
        assert tags == ["scheduling"]
        self.asleep = False
        return True
    def enqueue(self, prompts, sampling, use_tqdm):
        self.queued, self.runs = (prompts, sampling), self.runs + 1
        self.steps = 1 if self.asleep and not self.late else self.runs % len(prompts) + 1
    def generate(self, prompts, sampling, use_tqdm):
        self.enqueue(prompts, sampling, use_tqdm)
        return self.wait_for_completion(use_tqdm)
    def wait_for_completion(self, use_tqdm):
        assert not self.asleep
        prompts, sampling = self.queued
        if os.path.exists("ask-core"):
            with open("core", "w") as file: file.write(str(self.engine_core.core.pid))
            os.rename("core", "asked")
            self.engine_core.answers.get()
        time.sleep(sampling.max_tokens / self.rate)
        profiler.calls += 5 * self.steps + 2 * sampling.max_tokens
        profiler.us += 1000 * self.steps + (50 + len(prompts)) * 2 * sampling.max_tokens
        seconds = sampling.max_tokens / self.rate
        answers = [
            Answer(len(prompt["prompt_token_ids"]), seconds, min(place, self.steps - 1))
            for place, prompt in enumerate(prompts)
        ]
        for answer in answers:
            if self.silent: answer.metrics = None
        return answers
""",
    "vllm/distributed.py": "def cleanup_dist_env_and_memory(): pass\n",
    "torch/__init__.py": "__version__ = '0'\nclass cuda:\n    is_available = staticmethod(lambda: False)\n",
    "torch/profiler.py": """
calls, us = 0, 0.0
class ProfilerActivity: CPU = "cpu"
class Row:
    def __init__(self, key, count, us): self.key, self.count, self.self_cpu_time_total = key, count, us
class profile:
    def __init__(self, activities): pass
    def __enter__(self): self.calls, self.us = calls, us
    def __exit__(self, *_): self.calls, self.us = calls - self.calls, us - self.us
    def key_averages(self):
        half = (self.calls + 1) // 2  # a name in two kinds of events
        return [Row("marlin_gemm", half, self.us), Row("marlin_gemm", self.calls - half, 1.0), Row("prefill", 1, 9.0)]
""",
}


def before_all(folder: Path) -> str:
    """PYTHONPATH with a folder first."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def install_stand_in(folder: Path, **more: str) -> None:
    """Its modules, and further files."""
    for name, code in (STAND_IN | more).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
