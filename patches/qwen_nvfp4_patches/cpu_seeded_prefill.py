"""A request with a seed survives a prompt that is read in several chunks on CPU.

After a chunk that does not finish the prompt, vLLM sets the request's random generator back by moving its offset. Only
CUDA generators have one: on CPU the worker fails, and with it the engine.
"""

from __future__ import annotations

from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch, Platform

PARAMETERS = ("self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens")


def rewinding(original: Any) -> Any:
    """CPUModelRunner._bookkeeping_sync that sets such generators back to their seed, and hides them from vLLM's way.

    A request that has tokens already, read again after it was pushed out, keeps its generator as it is.
    """

    def _bookkeeping_sync(self: Any, *values: Any, **named: Any) -> Any:
        batch = self.input_batch
        unfinished = {int(i) for i in self.discard_request_mask.np[: batch.num_reqs].nonzero()[0]}
        everyone = batch.generators
        for index in unfinished & everyone.keys():
            if not self.requests[batch.req_ids[index]].output_token_ids:
                everyone[index].manual_seed(everyone[index].initial_seed())
        batch.generators = {index: one for index, one in everyone.items() if index not in unfinished}
        try:
            return original(self, *values, **named)
        finally:
            batch.generators = everyone

    return _bookkeeping_sync


def _needed() -> Need:
    import torch

    try:
        torch.Generator().get_offset()
    except RuntimeError:
        return Need(True, "a CPU generator has no offset, and vLLM moves it")
    return Need(False, "CPU generators have an offset")


def _apply() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    seams.replace_function(CPUModelRunner, "_bookkeeping_sync", rewinding, PARAMETERS)


PATCH = Patch(
    name="cpu-seeded-prefill",
    platform=Platform.CPU,
    changes="CPUModelRunner._bookkeeping_sync sets the generators of unfinished prompts back to their seed",
    why="a request with `seed` whose prompt is longer than a chunk kills the engine on CPU",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/worker/gpu_model_runner.py",
    remove_when="vLLM sets the generators of unfinished prompts back on CPU",
    needed=_needed,
    apply=_apply,
)
