"""Each structured output is compiled by the backend that its request was checked with.

vLLM chooses one for each request (xgrammar; llguidance or outlines for schemas that xgrammar cannot express), and then
compiles with whichever the engine used first. The schema is then enforced in part only, or fails to compile: 500. From
0.33 on, requests for another one are refused.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch

REQUEST = ("self", "request")
KEPT = "_qwen_nvfp4_backends"


def _name(request: Any) -> str:
    return str(request.sampling_params.structured_outputs._backend)


def initialising(original: Any) -> Any:
    """grammar_init that finds, or lets vLLM make, the backend named in the request."""

    def grammar_init(self: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        kept = vars(self).setdefault(KEPT, {})
        name = _name(request)
        self.backend_name = name if name in kept else None  # by it vLLM 0.33 refuses a second kind: 400
        if name in kept:
            original(self, request)
            return
        before, in_threads = self.backend, self._use_async_grammar_compilation
        # The first of a kind is compiled here and now: a thread could find the backend of the next request.
        self.backend, self._use_async_grammar_compilation = None, False
        try:
            original(self, request)
            kept[name] = self.backend
        finally:
            self._use_async_grammar_compilation = in_threads
            self.backend = before or self.backend

    return grammar_init


def creating(original: Any) -> Any:
    """_create_grammar with the backend of the request."""

    def _create_grammar(self: Any, request: Any) -> Any:
        backend = vars(self).get(KEPT, {}).get(_name(request))
        if backend is None:  # the first of its kind, just made
            return original(self, request)
        view = copy.copy(self)
        view.backend = backend
        return original(view, request)

    return _create_grammar


def _needed() -> Need:
    from vllm.v1.structured_output import StructuredOutputManager

    if "self.backend is None" not in inspect.getsource(seams.stock_of(StructuredOutputManager.grammar_init)):
        return Need(False, "vLLM keeps a backend for each kind of request")
    return Need(True, "vLLM compiles every grammar with the backend of the first")


def _apply() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    seams.replace_function(StructuredOutputManager, "grammar_init", initialising, REQUEST)
    seams.replace_function(StructuredOutputManager, "_create_grammar", creating, REQUEST)


PATCH = Patch(
    name="structured-backends",
    platform=None,
    changes="StructuredOutputManager.grammar_init and _create_grammar keep one backend of each kind, and compile with "
    "the one that the request was checked with",
    why="after the first structured output, schemas that need another backend are enforced in part (multipleOf, "
    "uniqueItems, allOf) or end as 500",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/structured_output/__init__.py",
    remove_when="vLLM's engine keeps more than one structured output backend, and "
    "tests/e2e/test_structured.py passes with this patch taken out",
    needed=_needed,
    apply=_apply,
)
