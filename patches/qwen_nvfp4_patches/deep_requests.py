"""A request that nests JSON deeper than Python reads is the client's mistake: 400, not 500.

The `arguments` of an earlier tool call are JSON inside a string, which vLLM parses without minding the depth.
"""

from __future__ import annotations

from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch
from qwen_nvfp4_patches.processes import serves_http

PARAMETERS = ("message", "err_type", "status_code", "param")
SENTENCE = "The request nests JSON too deeply to be read: keep tool arguments and schemas to some hundred levels."


def blaming_the_client(original: Any) -> Any:
    """create_error_response that reports a RecursionError as a bad request."""

    def create_error_response(message: Any, *values: Any, **named: Any) -> Any:
        return original(ValueError(SENTENCE) if isinstance(message, RecursionError) else message, *values, **named)

    return create_error_response


def _needed() -> Need:
    if not serves_http():
        return Need(False, "this process serves no HTTP")
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    if create_error_response(RecursionError("probe")).error.code < 500:
        return Need(False, "vLLM answers 400 itself")
    return Need(True, "vLLM answers 500 to a request that nests JSON too deeply")


def _apply() -> None:
    from vllm.entrypoints.serve.exception_handling import error_response

    seams.replace_function(error_response, "create_error_response", blaming_the_client, PARAMETERS)


PATCH = Patch(
    name="deep-requests",
    platform=None,
    changes="create_error_response answers 400 where reading a request exceeded Python's recursion limit",
    why="tool arguments of a thousand nested brackets are answered with 500 and a message of the interpreter",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/renderers/chat_utils/chat_message.py",
    remove_when="vLLM answers 4xx to them",
    needed=_needed,
    apply=_apply,
)
