"""Tool calls and reasoning of Qwen3.5, whole or streamed, come from one reading of the output.

Stock vLLM reads an output twice (reasoning, then tools), streams and whole differently. Its streamed arguments are cut
JSON when a tag was left out, and the text after a tag that prose mentions is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch
from qwen_nvfp4_patches.processes import serves_http
from qwen_nvfp4_patches.qwen3_cursor import CALL_TAGS, THINK_TAGS, Event, Kind
from qwen_nvfp4_patches.qwen3_markup import Reader

COMPOSE = (
    "tool_parser_name", "reasoning_parser_name", "enable_auto_tools", "model_name", "is_harmony", "tool_strict_level",
    "tokenizer",
)  # fmt: skip
PARSE_DELTA = ("self", "delta_text", "delta_token_ids", "request", "prompt_token_ids", "finished")
FINALIZE = ("self", "message", "parser")
PARSE = ("self", "model_output", "request", "enable_auto_tools", "model_output_token_ids")


def parameters_by_name(tools: Sequence[Any] | None) -> dict[str, object]:
    """The parameter schema of each function in a request's tools, chat or responses style."""
    found: dict[str, object] = {}
    for tool in tools or ():
        function = getattr(tool, "function", tool)
        name = getattr(function, "name", None)
        if isinstance(name, str):
            found[name] = getattr(function, "parameters", None)
    return found


class OneReading:
    """The two methods by which vLLM's servers ask a parser, for a subclass of DelegatingParser; one object a choice."""

    _reader: Reader | None = None
    _prompt: Sequence[int] | None = None

    def set_prompt_token_ids(self: Any, prompt_token_ids: Sequence[int]) -> None:
        """What the model was given: it says whether the output begins inside `<think>`."""
        super().set_prompt_token_ids(prompt_token_ids)  # type: ignore[misc]
        self._prompt = prompt_token_ids

    def parse(
        self: Any,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[Any] | None]:
        """(reasoning, content, calls) of a whole output."""
        if self._is_json_call(request):
            return super().parse(  # type: ignore[misc, no-any-return]
                model_output, request, enable_auto_tools, model_output_token_ids
            )
        from vllm.entrypoints.generate.base.protocol import FunctionCall
        from vllm.renderers.chat_utils import make_tool_call_id

        reader = self._make_reader(request)
        texts = {Kind.REASONING: "", Kind.CONTENT: ""}
        calls: dict[int, list[str]] = {}
        for kind, text, index in [*reader.feed(model_output), *reader.finish()]:
            if index >= 0:
                calls.setdefault(index, []).append(text)
            else:
                texts[kind] += text
        shown = [
            FunctionCall(id=make_tool_call_id(), name=parts[0], arguments="".join(parts[1:]))
            for parts in calls.values()
            if request.tool_choice != "none"
        ]
        return texts[Kind.REASONING] or None, texts[Kind.CONTENT] or None, shown or None

    def parse_delta(
        self: Any,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        """The next piece of a stream as a DeltaMessage; None if it adds nothing yet."""
        if self._is_json_call(request):
            return super().parse_delta(  # type: ignore[misc]
                delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
            )
        if self._reader is None:
            if prompt_token_ids is not None:
                self.set_prompt_token_ids(prompt_token_ids)
            self._reader = self._make_reader(request)
        events = self._reader.feed(delta_text)
        if finished:
            events += self._reader.finish()
        return delta_of(events, reasoning=request.include_reasoning, calls=request.tool_choice != "none")

    def _is_json_call(self: Any, request: Any) -> bool:
        """With strict tool calling switched off, a forced call is constrained to plain JSON, which vLLM reads well."""
        forced = bool(request.tool_choice) and request.tool_choice not in ("auto", "none")
        tool_parser = self._tool_parser
        return forced and tool_parser is not None and tool_parser.supports_required_and_named

    def _apply_structural_tag(self: Any, request: Any) -> Any:
        """Under `auto`, a response format shapes the answer and leaves calls possible, as it does at OpenAI."""
        from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

        if request.tools and request.tool_choice == "auto" and request.extract_structured_outputs() is not None:
            level = self.tool_strict_level  # None in vLLM 0.33 where the server does not say
            self.tool_strict_level = max(ToolStrictLevel.AUTO if level is None else level, ToolStrictLevel.FUNCTION)
        return super()._apply_structural_tag(request)  # type: ignore[misc]

    def _make_reader(self: Any, request: Any) -> Reader:
        tools = parameters_by_name(request.tools) if self._tool_parser is not None and request.tools else None
        engine = self._reasoning_parser._parser_engine
        thinking = engine.thinking_enabled
        if self._prompt is not None:
            thinking = not self.is_reasoning_end(list(self._prompt))
        literal = is_answer_or_call(request)
        if (tools is None or request.tool_choice == "none") and is_constrained(request):
            tools, literal = None, True
        return Reader(thinking=thinking, tools=tools, dropped=dropped_tokens(self.model_tokenizer), literal=literal)


def is_constrained(request: Any) -> bool:
    """Whether the request's own schema, regex, choice or grammar shapes the content."""
    chat_format = getattr(request, "response_format", None)
    text_format = getattr(getattr(request, "text", None), "format", None)
    kinds = {getattr(asked, "type", "text") for asked in (chat_format, text_format) if asked is not None}
    return bool(kinds - {"text"}) or getattr(request, "structured_outputs", None) is not None


def is_answer_or_call(request: Any) -> bool:
    """Whether the grammar that vLLM made of the tools and the response format admits calls, or else the format."""
    tag = getattr(getattr(request, "structured_outputs", None), "structural_tag", None)
    if not request.tools or request.tool_choice != "auto" or not isinstance(tag, str):
        return False
    made = json.loads(tag).get("format")
    return isinstance(made, dict) and made.get("type") == "or"


def dropped_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The special tokens that a detokenizer may leave in the text, without the tags that the reader knows."""
    return tuple(token for token in tokenizer.all_special_tokens if token not in (*THINK_TAGS, *CALL_TAGS))


def delta_of(events: list[Event], *, reasoning: bool, calls: bool) -> Any:
    """The events as one DeltaMessage, or None. reasoning, calls: whether these are shown."""
    from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
    from vllm.renderers.chat_utils import make_tool_call_id

    fields: dict[str, Any] = {}
    found: dict[int, Any] = {}
    for kind, text, index in events:
        if kind is Kind.CONTENT:
            fields["content"] = fields.get("content", "") + text
        elif kind is Kind.REASONING and reasoning:
            fields["reasoning"] = fields.get("reasoning", "") + text
        elif kind is Kind.CALL and calls:
            function = DeltaFunctionCall(name=text, arguments="")
            found[index] = DeltaToolCall(index=index, id=make_tool_call_id(), type="function", function=function)
        elif kind is Kind.ARGUMENTS and calls:
            call = found.setdefault(index, DeltaToolCall(index=index, function=DeltaFunctionCall(arguments="")))
            call.function.arguments += text
    if found:
        fields["tool_calls"] = list(found.values())
    return with_both_names(DeltaMessage(**fields)) if fields else None


def with_both_names(message: Any) -> Any:
    """`message` with its thinking under `reasoning_content` too, where many clients look for it."""
    if message.reasoning is not None:
        message.reasoning_content = message.reasoning
    return message


def finalizing(original: Any) -> Any:
    """OpenAIServingChat._finalize_response_message that gives whole answers both names of their thinking, and null for
    content where there is none beside calls.
    """

    def _finalize_response_message(self: Any, message: Any, *, parser: Any) -> Any:
        message = original(self, message, parser=parser)
        if not isinstance(parser, OneReading):
            return message
        if message.tool_calls and not message.content:
            message.content = None
        return with_both_names(message)

    return _finalize_response_message


def composing(original: Any) -> Any:
    """ParserManager._compose_parser that gives the family's pair of parsers one reading of the output."""

    def compose(**names: Any) -> Any:
        from vllm.parser.engine.registered_adapters import Qwen3ParserReasoningAdapter, Qwen3ParserToolAdapter

        parser = original(**names)
        if parser is None or parser.reasoning_parser_cls is not Qwen3ParserReasoningAdapter:
            return parser
        tool_parser = parser.tool_parser_cls
        if tool_parser is not None and not issubclass(tool_parser, Qwen3ParserToolAdapter):
            return parser
        return type("Qwen3OneReadingParser", (OneReading, parser), {})

    return compose


def _needed() -> Need:
    if not serves_http():
        return Need(False, "this process serves no HTTP")
    from vllm.parser import qwen3

    if "cut" in qwen3._qwen3_arg_converter("<parameter=key>cut", False):
        return Need(False, "vLLM keeps an argument whose tag is not closed")
    return Need(True, "vLLM loses arguments, calls and text around tags that are not closed or only mentioned")


def _apply() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.parser.parser_manager import ParserManager

    seams.require_parameters(DelegatingParser.parse_delta, *PARSE_DELTA)
    seams.require_parameters(DelegatingParser.parse, *PARSE)
    seams.replace_function(ParserManager, "_compose_parser", composing, COMPOSE)
    seams.replace_function(OpenAIServingChat, "_finalize_response_message", finalizing, FINALIZE)


PATCH = Patch(
    name="qwen3-output",
    platform=None,
    changes="ParserManager._compose_parser gives the qwen3 and qwen3_coder parsers one reading of the output, and "
    "calls beside a response format; _finalize_response_message the name `reasoning_content` beside `reasoning`",
    why="an argument that is not closed is cut JSON when streamed, lost when not; text after a mentioned tag is lost; "
    "with a response format no tool can be called",
    upstream="https://github.com/vllm-project/vllm/issues/39056",
    remove_when="tests/contracts/test_parsers.py passes with this patch taken out",
    needed=_needed,
    apply=_apply,
)
