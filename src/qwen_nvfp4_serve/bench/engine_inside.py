"""What the engine bench asks of a worker, in whichever process vLLM has put it; its calls answer with plain values.

vLLM alone imports this (`worker_extension_cls`), in the worker's process and before the model is loaded, forked or
spawned. Importing it makes dummy weights ours there.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from qwen_nvfp4_serve.bench import dummy_weights
from qwen_nvfp4_serve.bench.decode_graphs import replay_us
from qwen_nvfp4_serve.bench.kernel_times import apart_on_card


class Inside:
    """Becomes a base of vLLM's worker class: `collective_rpc` calls these by name."""

    bench_trace: Any = None

    def bench_filled(self) -> int:
        """How many parameters our dummy weights have filled in this process."""
        return dummy_weights.filled()

    def bench_memory(self) -> tuple[int | None, int | None, int | None]:
        """Bytes: what vLLM logs as "Model loading took"; of the card in use; what this process's allocator holds. None
        where it is not known."""
        found = getattr(getattr(self, "model_runner", None), "model_memory_usage", None)
        model = None if found is None else int(found)
        cuda = import_module("torch").cuda
        if not cuda.is_available():
            return model, None, None
        free, total = cuda.mem_get_info()
        return model, int(total - free), int(cuda.memory_reserved())

    def bench_graphs(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """Pairs of `decode_graphs.replay_us`. Nothing is asked of the engine after that."""
        return list(replay_us(getattr(self, "model_runner", None), tokens).items())

    def bench_profile_start(self) -> None:
        """Profiles kernels (operators on a CPU) from here on."""
        profiler, cuda = import_module("torch.profiler"), import_module("torch").cuda.is_available()
        activity = profiler.ProfilerActivity.CUDA if cuda else profiler.ProfilerActivity.CPU
        self.bench_trace = profiler.profile(activities=[activity])
        self.bench_trace.__enter__()

    def bench_profile_stop(self) -> list[tuple[str, float, int]]:
        """Each kernel since then: its name, microseconds that were its own in all (`kernel_times`), calls."""
        trace, self.bench_trace = self.bench_trace, None
        trace.__exit__(None, None, None)
        if import_module("torch").cuda.is_available():
            rows = apart_on_card(trace)
        else:
            rows = [(str(row.key), float(row.self_cpu_time_total), int(row.count)) for row in trace.key_averages()]
        return [row for row in rows if row[1] > 0]


dummy_weights.install()
