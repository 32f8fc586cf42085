"""Which of vLLM's processes this is."""

from __future__ import annotations

import multiprocessing

# Engine cores and workers are children of the API server, and where there are several API servers, so are those.
API_SERVER_NAME = "ApiServer"
# vLLM 0.32 and 0.33, v1/executor/multiproc_executor.py.
WORKER_NAME = "VllmWorker"


def serves_http() -> bool:
    """True in a process that answers HTTP requests."""
    child = multiprocessing.parent_process() is not None
    return not child or multiprocessing.current_process().name.startswith(API_SERVER_NAME)


def is_worker() -> bool:
    """True in a worker that an engine core started, which applies what that has applied."""
    return multiprocessing.current_process().name.startswith(WORKER_NAME)
