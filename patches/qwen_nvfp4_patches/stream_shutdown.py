"""Open streams end when the server is told to stop: with an error and `[DONE]`, instead of waiting for ever.

On SIGTERM vLLM ends its engine and then waits for all connections to close. A stream whose request was not finished in
time hears nothing from the engine any more, so its connection stays open and the server with it.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch

# Engine cores and workers are children of the API server, and where there are several API servers, so are those.
API_SERVER_NAME = "ApiServer"


def ending_streams(original: Any) -> Any:
    """AsyncLLM.shutdown that afterwards tells every waiting request that its engine is gone.

    vLLM calls it from a worker thread, and the requests wait on the event loop, so they are told there.
    """

    def shutdown(self: Any, timeout: float | None = None) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        waiting = getattr(self, "output_handler", None)
        try:
            original(self, timeout=timeout)
        finally:
            loop = waiting.get_loop() if waiting is not None else None
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self.output_processor.propagate_error, EngineDeadError())

    return shutdown


def _needed() -> Need:
    child = multiprocessing.parent_process() is not None
    if child and not multiprocessing.current_process().name.startswith(API_SERVER_NAME):
        return Need(False, "this process serves no HTTP")
    return Need(True, "open streams keep vLLM from stopping")


def _apply() -> None:
    from vllm.v1.engine import async_llm
    from vllm.v1.engine.output_processor import OutputProcessor

    seams.require_parameters(OutputProcessor.propagate_error, "self", "e")
    seams.replace_function(async_llm.AsyncLLM, "shutdown", ending_streams, ("self", "timeout"))


PATCH = Patch(
    name="stream-shutdown",
    platform=None,
    changes="AsyncLLM.shutdown tells the requests that still wait that the engine is gone",
    why="with a stream open, SIGTERM ends the engine and leaves the API server waiting for ever, and the client too",
    upstream="https://github.com/vllm-project/vllm/issues/48966",
    remove_when="vLLM ends open streams when it stops",
    needed=_needed,
    apply=_apply,
)
