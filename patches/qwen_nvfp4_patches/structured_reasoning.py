"""Where thinking ends for a structured output: at `</think>`, if the prompt opened it, and nowhere else.

Stock vLLM looks for the end in three ways that lose the answer. With `include_reasoning: false` it constrains the
thinking itself. A prompt of /v1/completions, which opens no thinking, counts as thinking that never ends, so nothing is
constrained. And a `<tool_call>` within thinking counts as its end even where the grammar knows no calls: 500.
"""

from __future__ import annotations

from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch
from qwen_nvfp4_patches.qwen3_cursor import CALL
from qwen_nvfp4_patches.qwen3_parser import OneReading

RESOLVE = ("self", "parser", "prompt_token_ids")
GET_REASONER = ("self", "request")


def resolving(original: Any) -> Any:
    """ChatCompletionRequest.resolve_reasoning_ended that looks at the prompt even where reasoning is not shown."""

    def resolve_reasoning_ended(self: Any, parser: Any, prompt_token_ids: list[int]) -> bool | None:
        if isinstance(parser, OneReading):
            return bool(parser.is_reasoning_end(prompt_token_ids))  # type: ignore[attr-defined]
        return original(self, parser, prompt_token_ids)  # type: ignore[no-any-return]

    return resolve_reasoning_ended


def opens_thinking(token_ids: list[int], start: int | None, end: int | None) -> bool:
    """Whether a `<think>` in the prompt is not closed."""
    last = next((token for token in reversed(token_ids) if token in (start, end)), None)
    return last is not None and last == start


def getting_reasoner(original: Any) -> Any:
    """StructuredOutputManager._get_reasoner for the family: none where the prompt opened no thinking, and one that
    takes a call for the end of thinking only under a grammar with calls in it.
    """

    def _get_reasoner(self: Any, request: Any) -> Any:
        from vllm.parser.engine.registered_adapters import Qwen3ParserReasoningAdapter

        reasoner = original(self, request)
        if not isinstance(reasoner, Qwen3ParserReasoningAdapter):
            return reasoner
        asked = request.structured_output_request
        engine = reasoner._parser_engine
        end = engine._reasoning_end_token_id
        if asked.reasoning_ended is None:
            prompt = list(request.prompt_token_ids or ())
            asked.reasoning_ended = not opens_thinking(prompt, engine._reasoning_start_token_id, end)
        if asked.reasoning_ended:
            return None
        if end is not None and CALL not in (asked.params.structural_tag or ""):
            engine._reasoning_end_token_ids = frozenset((end,))
        return reasoner

    return _get_reasoner


def _needed() -> Need:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "include_reasoning": False}
    if not ChatCompletionRequest.model_validate(body).resolve_reasoning_ended(None, []):
        return Need(False, "vLLM asks the prompt whether thinking is open")
    return Need(True, "vLLM misjudges where thinking ends and loses the structured output after it")


def _apply() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.v1.structured_output import StructuredOutputManager

    seams.replace_function(ChatCompletionRequest, "resolve_reasoning_ended", resolving, RESOLVE)
    seams.replace_function(StructuredOutputManager, "_get_reasoner", getting_reasoner, GET_REASONER)


PATCH = Patch(
    name="structured-reasoning",
    platform=None,
    changes="ChatCompletionRequest.resolve_reasoning_ended and StructuredOutputManager._get_reasoner end thinking at "
    "`</think>` only, or at a call that the grammar allows, and only where the prompt opened it",
    why="structured outputs come back empty with include_reasoning=false, unconstrained from /v1/completions, and as "
    "500 when thinking mentions `<tool_call>`",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/structured_output/__init__.py",
    remove_when="tests/e2e/test_structured.py passes with this patch taken out",
    needed=_needed,
    apply=_apply,
)
