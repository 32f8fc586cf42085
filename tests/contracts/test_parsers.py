"""The parsers of the installed vLLM with our patch: every case, cut anywhere, gives the same whole and streamed."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts.parser_driver import NAMES, Driver, by_characters
from tests.parser_scripts import CASES, TOOLS, Script, expected, markup_in, parsed, scripts

from qwen_nvfp4_patches import qwen3_parser

OUTPUTS = pytest.mark.parametrize("case", CASES["outputs"], ids=lambda case: case["id"])
CALL = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def ours(any_vllm: None) -> Driver:
    return Driver(patched=True)


@pytest.fixture(scope="module")
def stock(any_vllm: None) -> Driver:
    return Driver(patched=False)


@OUTPUTS
def test_case_whole_gives_what_is_expected(ours: Driver, case: dict[str, Any]) -> None:
    assert parsed(ours.whole(case["text"], thinking=case["thinking"])) == expected(case)


@OUTPUTS
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100_000])
def test_case_streamed_in_characters_or_tokens_gives_what_is_expected(
    ours: Driver, case: dict[str, Any], size: int
) -> None:
    text, thinking = case["text"], case["thinking"]
    tokens = ours.by_tokens(text, range(0, len(text), size))
    assert parsed(ours.streamed(by_characters(text, size), thinking=thinking)) == expected(case)
    assert parsed(ours.streamed(tokens, thinking=thinking)) == expected(case)


@given(st.sampled_from(CASES["outputs"]), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_case_cut_at_any_tokens_gives_what_is_expected(ours: Driver, case: dict[str, Any], rng: Random) -> None:
    pieces = ours.in_bundles(case["text"], rng)
    assert parsed(ours.streamed(pieces, thinking=case["thinking"])) == expected(case)


def check(ours: Driver, script: Script, rng: Random) -> None:
    whole = ours.whole(script.text, thinking=script.thinking)
    parsed(whole)
    assert ours.streamed(ours.in_bundles(script.text, rng), thinking=script.thinking) == whole, script
    assert not (script.clean and markup_in(whole)), (script, whole)


def test_random_outputs_streamed_equal_whole_without_markup(ours: Driver) -> None:
    rng = Random(4)
    for script in scripts(300, seed=5):
        check(ours, script, rng)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_random_outputs_streamed_equal_whole_without_markup(ours: Driver) -> None:
    rng = Random(6)
    for script in scripts(10_000, seed=7):
        check(ours, script, rng)


# Stock vLLM at these cases; when this fails, vLLM has changed: read it, and see whether the patch can go.
STOCK_FAULTS = (
    "empty-think-thinking-off", "text-after-call", "parameter-not-closed", "cut-in-a-value", "prose-mentions-call",
    "value-quotes-a-call", "json-form", "nothing-closed-then-a-call",
)  # fmt: skip


@pytest.mark.parametrize("name", STOCK_FAULTS)
def test_stock_vllm_still_gets_the_case_wrong(stock: Driver, name: str) -> None:
    case = next(case for case in CASES["outputs"] if case["id"] == name)
    pieces = stock.by_tokens(case["text"], range(len(case["text"])))
    right = []
    for result in (
        stock.whole(case["text"], thinking=case["thinking"]),
        stock.streamed(pieces, thinking=case["thinking"]),
    ):
        try:
            right.append(parsed(result) == expected(case))
        except json.JSONDecodeError:
            right.append(False)
    assert right != [True, True]


def both(ours: Driver, text: str, request: Any, *, thinking: bool = True) -> Any:
    """The result, after checking that whole and streamed agree."""
    whole = ours.whole(text, request, thinking=thinking)
    assert ours.streamed(ours.by_tokens(text, range(len(text))), request, thinking=thinking) == whole
    return whole


TEXT = f"why\n</think>\n\nfirst\n\n{CALL}\nlast"
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_tool_choice_that_allows_calls_gives_them(ours: Driver, choice: Any) -> None:
    result = both(ours, TEXT, ours.request(tool_choice=choice))
    assert result == ("why", "first\n\nlast", (("f", '{"a": "x"}'),))


def test_tool_choice_none_gives_no_calls_and_no_markup(ours: Driver) -> None:
    assert both(ours, TEXT, ours.request(tool_choice="none")) == ("why", "first\n\nlast", ())


def test_request_without_tools_keeps_the_text_that_looks_like_a_call(ours: Driver) -> None:
    assert both(ours, f"why\n</think>\n\n{CALL}", ours.request(tools=None)) == ("why", CALL, ())


@pytest.mark.parametrize("asked", [{"tools": None}, {"tool_choice": "none"}])
def test_constrained_content_is_left_alone(ours: Driver, asked: dict[str, Any]) -> None:
    request = ours.request(response_format={"type": "json_object"}, **asked)
    text = '{"html": "a</think>b <tool_call>\\n"}'
    assert both(ours, f"why\n</think>\n\n{text}", request) == ("why", text, ())
    assert both(ours, text, request, thinking=False) == ("", text, ())


def test_reasoning_that_is_not_wanted_is_not_sent(ours: Driver) -> None:
    request = ours.request(include_reasoning=False)
    assert ours.streamed(ours.by_tokens(TEXT, range(len(TEXT))), request)[0] == ""


def test_thinking_is_sent_under_both_names(ours: Driver) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponseStreamChoice, ChatMessage

    for delta in ours.deltas(ours.by_tokens(TEXT, range(len(TEXT)))):
        sent = ChatCompletionResponseStreamChoice(index=0, delta=delta).model_dump(exclude_unset=True)["delta"]
        assert sent.get("reasoning") == sent.get("reasoning_content")
        assert ("reasoning" in sent) == ("reasoning_content" in sent)
    parser, _ = ours._parser(ours.request(), True)
    finalize = qwen3_parser.finalizing(lambda *values, **_: values[1])
    message = finalize(None, ChatMessage(role="assistant", reasoning="r"), parser=parser)
    assert message.model_dump()["reasoning_content"] == "r"
    assert "reasoning_content" not in finalize(None, ChatMessage(role="assistant"), parser=parser).model_dump()
    assert (
        "reasoning_content"
        not in finalize(None, ChatMessage(role="assistant", reasoning="r"), parser=None).model_dump()
    )


def test_prompt_that_closes_thinking_begins_with_content(ours: Driver) -> None:
    request = ours.request()
    parser, _ = ours._parser(request, True)
    parser.set_prompt_token_ids(ours.encode("<|im_start|>assistant\n<think>\nr\n</think>\n\nHel"))
    assert parser.parse("lo", request, enable_auto_tools=True)[:2] == (None, "lo")


def test_stream_names_each_call_once_and_then_only_adds_arguments(ours: Driver) -> None:
    text = f"</think>\n\n{CALL}\n{CALL}"
    calls = [call for delta in ours.deltas(ours.by_tokens(text, range(len(text)))) for call in delta.tool_calls]
    first = [call for call in calls if call.id is not None]
    assert [(call.index, call.type, call.function.name) for call in first] == [
        (0, "function", "f"),
        (1, "function", "f"),
    ]
    assert len({call.id for call in first}) == 2
    assert all(call.type is None and call.function.name is None for call in calls if call.id is None)
    assert all(isinstance(call.function.arguments, str) for call in calls)


def test_stream_sends_a_string_as_it_comes(ours: Driver) -> None:
    text = (
        f"</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\n{'word ' * 50}\n</parameter>\n</function>\n</tool_call>"
    )
    assert sum(1 for _ in ours.deltas(ours.by_tokens(text, range(0, len(text), 8)))) > 20


def test_empty_stream_and_empty_output_give_nothing(ours: Driver) -> None:
    assert ours.streamed([("", [])]) == ours.whole("") == ("", "", ())


def test_other_pairs_of_parsers_are_left_alone(any_vllm: None) -> None:
    from vllm.parser.parser_manager import ParserManager

    bound = ParserManager._compose_parser
    compose = qwen3_parser.composing(getattr(bound, "_qwen_nvfp4_original", bound))
    for names in ({"tool_parser_name": "hermes"}, {"reasoning_parser_name": "deepseek_r1"}):
        assert not issubclass(compose(**(NAMES | names)), qwen3_parser.OneReading)
    assert issubclass(compose(**(NAMES | {"tool_parser_name": None})), qwen3_parser.OneReading)
    assert compose(**(NAMES | {"tool_parser_name": None, "reasoning_parser_name": None})) is None


def test_what_the_patch_takes_for_granted_is_there(any_vllm: None, ours: Driver) -> None:
    import inspect

    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.parser.parser_manager import ParserManager

    bound = ParserManager._compose_parser
    original = getattr(bound, "_qwen_nvfp4_original", bound)
    finalize = OpenAIServingChat._finalize_response_message
    finalize = getattr(finalize, "_qwen_nvfp4_original", finalize)
    assert tuple(inspect.signature(finalize).parameters) == qwen3_parser.FINALIZE
    assert tuple(inspect.signature(original).parameters) == qwen3_parser.COMPOSE
    assert tuple(inspect.signature(DelegatingParser.parse).parameters) == qwen3_parser.PARSE
    assert tuple(inspect.signature(DelegatingParser.parse_delta).parameters) == qwen3_parser.PARSE_DELTA
    assert isinstance(ours.tokenizer.all_special_tokens, list)


def test_need_is_no_more_where_vllm_keeps_an_open_argument(any_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.parser import qwen3

    assert qwen3_parser._needed().needed
    monkeypatch.setattr(qwen3, "_qwen3_arg_converter", lambda *_: json.dumps({"key": "cut"}))
    assert not qwen3_parser._needed().needed


def test_template_is_one_that_vllm_fills_in_parts_and_in_order(any_vllm: None) -> None:
    from vllm.renderers import hf

    from qwen_nvfp4_serve.chat_template import TEMPLATE_PATH, render

    source = TEMPLATE_PATH.read_text()
    assert hf._detect_content_format(source, default="string") == "openai"
    assert hf._detect_developer_role_support(source)
    assert {"enable_thinking", "preserve_thinking", "keep_thinking"} <= hf._resolve_chat_template_kwargs(source)
    from transformers.utils.chat_template_utils import _compile_jinja_template

    messages = [{"role": "user", "content": "é <think>"}, {"role": "tool", "content": [{"type": "text", "text": "t"}]}]
    tools = [tool for tool in TOOLS if "parameters" in tool["function"]]
    shown = {"messages": messages, "tools": tools, "add_generation_prompt": True}
    assert _compile_jinja_template(source).render(**shown) == render(messages, tools=tools)
