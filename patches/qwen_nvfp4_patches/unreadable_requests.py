"""A request that cannot be read is the client's mistake: 400, not 500.

vLLM's own checks of a request fail on values of another type with whatever Python raises, and the `arguments` of an
earlier tool call are JSON inside a string, which vLLM parses without minding the depth.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch
from qwen_nvfp4_patches.processes import serves_http

PARAMETERS = ("message", "err_type", "status_code", "param")
REGISTER = ("app",)
# What Python raises for a value of another type or depth, beside the ValueError and TypeError that vLLM expects.
KINDS = (AttributeError, LookupError, AssertionError, RecursionError)
TOO_DEEP = "The request nests JSON too deeply to be read: keep tool arguments and schemas to some hundred levels."
ODD_SHAPE = "The request cannot be read: a field has a value of another type than the API's. Python says: {}"
# Where FastAPI turns the body into the endpoint's arguments; the endpoint itself runs elsewhere.
READS_BODY = ("fastapi", "dependencies", "utils.py")


def was_reading(error: BaseException) -> bool:
    """Whether `error` came up while the request was read, before its endpoint ran."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).parts[-3:] == READS_BODY for frame in frames)


def blaming_the_client(original: Any) -> Any:
    """create_error_response that reports what came up in reading a request as a bad request."""

    def create_error_response(message: Any, *values: Any, **named: Any) -> Any:
        if isinstance(message, RecursionError):
            message = ValueError(TOO_DEEP)
        elif isinstance(message, KINDS):
            if was_reading(message):
                message = ValueError(ODD_SHAPE.format(message))
            else:
                logging.getLogger("vllm.qwen_nvfp4_patches").error("a request failed", exc_info=message)
        return original(message, *values, **named)

    return create_error_response


def registering(original: Any) -> Any:
    """init_exception_handler that handles KINDS too: left to the last resort, each ends the client's connection."""

    def init_exception_handler(app: Any) -> None:
        from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler

        original(app)
        for kind in KINDS:
            app.exception_handler(kind)(exception_handler)

    return init_exception_handler


def _needed() -> Need:
    if not serves_http():
        return Need(False, "this process serves no HTTP")
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    if create_error_response(RecursionError("probe")).error.code < 500:
        return Need(False, "vLLM answers 400 itself")
    return Need(True, "vLLM answers 500 to a request that it cannot read")


def _apply() -> None:
    from vllm.entrypoints.serve.exception_handling import error_response, register

    seams.replace_function(register, "init_exception_handler", registering, REGISTER)
    seams.replace_function(error_response, "create_error_response", blaming_the_client, PARAMETERS)


PATCH = Patch(
    name="unreadable-requests",
    platform=None,
    changes="init_exception_handler and create_error_response answer 400 where reading a request exceeded Python's "
    "recursion limit or failed on a value of another type",
    why="tool arguments of a thousand nested brackets, or a string for `structured_outputs`, are answered with 500 and "
    "a message of the interpreter",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/renderers/chat_utils/chat_message.py",
    remove_when="vLLM answers 4xx to them",
    needed=_needed,
    apply=_apply,
)
