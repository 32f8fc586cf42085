"""The chat template: the family's format line by line, prefixes that stay, and text that cannot become a token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tests.parser_scripts import CASES

from qwen_nvfp4_serve.chat_template import JOINER, neutralised, render
from qwen_nvfp4_serve.synthetic.tokenizer import SPECIAL_TOKENS, tokenizer_json

Message = dict[str, Any]
THINKS, DIRECT = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def message(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


USER = message("user", "a")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER], turn("user", "a")),
        ([message("system", "s"), USER], turn("system", "s") + turn("user", "a")),
        ([message("user", "  a\n")], turn("user", "a")),
        ([USER, message("assistant", "b"), message("user", "c")],
         turn("user", "a") + turn("assistant", "<think>\n\n</think>\n\nb") + turn("user", "c")),
        ([USER, message("assistant", "b", reasoning="r"), message("user", "c")],
         turn("user", "a") + turn("assistant", "<think>\nr\n</think>\n\nb") + turn("user", "c")),
        ([USER, message("system", "s"), message("developer", "d"), message("user", "c")],
         turn("user", "a") + turn("system", "s") + turn("system", "d") + turn("user", "c")),
        ([message("developer", "d"), USER], turn("system", "d") + turn("user", "a")),
        ([message("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], turn("user", "ab")),
        ([message("user", None)], turn("user", "")),
        ([message("user", [])], turn("user", "")),
    ],
)  # fmt: skip
def test_render_plain_conversation_is_the_familys_format(messages: list[Message], text: str) -> None:
    assert render(messages) == text + THINKS
    assert render(messages, enable_thinking=True) == text + THINKS
    assert render(messages, enable_thinking=False) == text + DIRECT
    assert render(messages, add_generation_prompt=False) == text


def test_render_tool_turns_are_the_familys_format() -> None:
    messages = [
        USER,
        message("assistant", "b", reasoning="r", tool_calls=[call("f", {"x": "two\nlines", "n": 5})]),
        message("tool", "1", tool_call_id="1"),
        message("assistant", None, tool_calls=[call("f", {}), call("g", {"o": {"k": [True, None, "雪"]}})]),
        message("tool", "2"),
        message("tool", [{"type": "text", "text": "3"}]),
        message("assistant", "done"),
    ]
    first = "<tool_call>\n<function=f>\n<parameter=x>\ntwo\nlines\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
    second = "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=o>\n"
    assert render(messages, add_generation_prompt=False) == (
        turn("user", "a")
        + turn("assistant", f"<think>\nr\n</think>\n\nb\n\n{first}</function>\n</tool_call>")
        + turn("user", "<tool_response>\n1\n</tool_response>")
        + turn(
            "assistant",
            f'<think>\n\n</think>\n\n{second}{{"k": [true, null, "雪"]}}\n</parameter>\n</function>\n</tool_call>',
        )
        + turn("user", "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>")
        + turn("assistant", "<think>\n\n</think>\n\ndone")
    )


@pytest.mark.parametrize(
    ("messages", "after_tools"),
    [([message("system", "s"), USER], "\n\ns"), ([USER], ""), ([message("developer", " d "), USER], "\n\nd"),
     ([message("system", ""), USER], "")],
)  # fmt: skip
def test_render_tools_stand_before_the_first_system_text(messages: list[Message], after_tools: str) -> None:
    text = render(messages, tools=[TOOL, TOOL])
    listed = json.dumps(TOOL)
    assert text.startswith(
        f"<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n{listed}\n{listed}\n"
        "</tools>\n\n"
    )
    assert text.endswith(f"</IMPORTANT>{after_tools}<|im_end|>\n" + turn("user", "a") + THINKS)
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("case", CASES["conversations"], ids=lambda case: case["id"])
def test_render_case_keeps_the_order(case: dict[str, Any]) -> None:
    text = render(case["messages"])
    places = [text.index(f"{word}<|im_end|>") for word in case["order"]]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "part",
    [{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_image", "image_url": "x"}],
)
def test_render_image_part_becomes_the_placeholder(part: Message) -> None:
    text = render([message("user", [{"type": "text", "text": "see "}, part, {"type": "text", "text": " there"}])])
    assert text.startswith(turn("user", "see <|vision_start|><|image_pad|><|vision_end|> there"))


def test_render_video_part_becomes_the_placeholder() -> None:
    assert "<|vision_start|><|video_pad|><|vision_end|>" in render([message("user", [{"type": "video"}])])


ROUNDS = [
    message("user", "u1"),
    message("assistant", "", reasoning="r1", tool_calls=[call("f", {"a": "x"}), call("f", {"a": "y"})]),
    message("tool", "t1"),
    message("tool", "t2"),
    message("assistant", "a2", reasoning="r2"),
    message("user", "u2"),
    message("assistant", "a3"),
    message("system", "s"),
    message("user", "u3"),
    message("assistant", "a4", reasoning="r4", tool_calls=[call("f", {})]),
    message("tool", "t3"),
]


@pytest.mark.parametrize("keep", ["all", "none"])
def test_render_each_prompt_is_the_beginning_of_the_next(keep: str) -> None:
    ends = [index for index, one in enumerate(ROUNDS) if one["role"] == "assistant"] + [len(ROUNDS)]
    prompts = [render(ROUNDS[:end], tools=[TOOL], keep_thinking=keep) for end in ends]
    for shorter, longer in itertools.pairwise(prompts):
        assert longer.startswith(shorter)


def test_render_kept_thinking_continues_what_the_model_wrote() -> None:
    prompt = render([USER])
    written = "r\n</think>\n\nb\n\n<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    said = message("assistant", "b", reasoning="r", tool_calls=[call("f", {"a": "x"})])
    assert render([USER, said, message("tool", "t")]).startswith(f"{prompt}{written}<|im_end|>\n")


def test_render_answer_without_thinking_continues_what_the_model_wrote() -> None:
    prompt = render([USER], enable_thinking=False)
    longer = render([USER, message("assistant", "b"), message("user", "c")], enable_thinking=False)
    assert longer.startswith(f"{prompt}b<|im_end|>\n")


def thinking_shown(**variables: Any) -> list[str]:
    text = render(ROUNDS, **variables)
    return [name for name in ("r1", "r2", "r4") if f"<think>\n{name}\n</think>" in text]


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, ["r1", "r2", "r4"]), ({"keep_thinking": "all"}, ["r1", "r2", "r4"]), ({"keep_thinking": "turn"}, ["r4"]),
        ({"keep_thinking": "none"}, []), ({"preserve_thinking": True}, ["r1", "r2", "r4"]),
        ({"preserve_thinking": False}, ["r4"]), ({"keep_thinking": "nonsense"}, ["r1", "r2", "r4"]),
        ({"keep_thinking": "none", "preserve_thinking": True}, ["r1", "r2", "r4"]),
        ({"keep_thinking": "all", "preserve_thinking": False}, ["r4"]),
        ({"preserve_thinking": "no"}, ["r1", "r2", "r4"]),
    ],
)  # fmt: skip
def test_render_earlier_thinking_is_kept_as_asked(variables: dict[str, Any], shown: list[str]) -> None:
    assert thinking_shown(**variables) == shown


def test_render_turn_mode_leaves_earlier_answers_bare() -> None:
    messages = [USER, message("assistant", "b", reasoning="r"), message("user", "c")]
    assert turn("assistant", "b") in render(messages, keep_thinking="turn")


@pytest.mark.parametrize("content", ["<think>\nr\n</think>\n\nb", "r\n</think>\n\nb", "<think>r</think>b"])
def test_render_thinking_inside_content_is_taken_apart(content: str) -> None:
    text = render([USER, message("assistant", content), message("user", "c")])
    assert turn("assistant", "<think>\nr\n</think>\n\nb") in text


def test_render_answer_that_mentions_the_tag_stays_one() -> None:
    text = render([USER, message("assistant", "the `</think>` tag"), message("user", "c")])
    assert turn("assistant", f"<think>\n\n</think>\n\nthe `<{JOINER}/think>` tag") in text


@pytest.mark.parametrize("role", ["critic", "ipython", "<|im_end|>", "System"])
def test_render_unknown_role_is_refused_with_the_roles_there_are(role: str) -> None:
    with pytest.raises(TemplateError, match="expected system, developer, user, assistant or tool"):
        render([message(role, "a")])


# Shapes that the API lets through, each in each role.
CONTENTS = (
    None, "", "a", [], [{"type": "text", "text": "a"}], [{"type": "text"}], ["a", "b"], {"type": "text", "text": "a"},
    {"k": 1}, [{"type": "refusal", "refusal": "no"}], [{"type": "tool_reference", "tool_name": "f"}], 5, True,
    [{"type": "input_audio", "input_audio": {"data": ""}}], [None], [[1]],
)  # fmt: skip
CALLS = (
    None, [], [call("f", {})], [call("f", None)], [call("f", "")], [call("f", '{"a": 1}')], [call("f", "broken {")],
    [call("f", {"a": None, "b": [], "c": {}, "d": 1.5, "": ""})], [{"name": "f", "arguments": {"a": 1}}],
    [{"type": "function", "function": {"name": "f"}}],
)  # fmt: skip


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: json.dumps(content)[:30])
def test_render_any_shape_of_content_in_any_role_is_accepted(role: str, content: Any) -> None:
    for tools in (None, [], [TOOL], [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        text = render([message(role, content), message(role, content), USER], tools=tools)
        assert text.endswith(turn("user", "a") + THINKS)


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: json.dumps(calls)[:40])
@pytest.mark.parametrize("reasoning", [None, "", "r", 5])
def test_render_any_shape_of_calls_is_accepted(calls: Any, reasoning: Any) -> None:
    said = message("assistant", None, tool_calls=calls, reasoning=reasoning, reasoning_content=reasoning)
    text = render([USER, said, {"role": "assistant"}, message("tool", "t")])
    assert text.count("<function=f>") == len(calls or [])


def test_render_no_messages_is_the_generation_prompt() -> None:
    assert render([]) == THINKS


# What a client writes in each place, none of which may become a special token.
SPECIAL = (*SPECIAL_TOKENS, "<|audio_start|>", "<tts_pad>", "<|made_up|>")
HOSTILE = st.lists(
    st.sampled_from(
        (*SPECIAL, "<", "|>", "<|", "|im_end", "im_start", ">", "think", "/think", "</", "tool_call", "\n")
    ),
    min_size=1,
    max_size=8,
).map("".join)


def conversation(texts: Sequence[str]) -> tuple[list[Message], list[dict[str, Any]]]:
    system, user, part, other, reasoning, answer, name, key, value, inner, result, described = texts
    messages = [
        message("system", system),
        message("user", user),
        message("user", [{"type": "text", "text": part}, {"type": "text", "text": other}, {"type": "image"}]),
        message("assistant", answer, reasoning=reasoning, tool_calls=[call(name, {key: value, "o": {inner: [inner]}})]),
        message("tool", result),
        message("developer", system),
        message("user", user),
    ]
    return messages, [{"type": "function", "function": {"name": name, "description": described, "parameters": {}}}]


@pytest.fixture(scope="module")
def specials_of() -> Any:
    """The special tokens of a text, in order, as the family's tokenizer finds them."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(512)))

    def specials(text: str) -> list[str]:
        return [token for token in tokenizer.encode(text).tokens if token in SPECIAL_TOKENS]

    return specials


@pytest.mark.parametrize("keep", ["all", "turn", "none"])
@given(texts=st.lists(HOSTILE, min_size=12, max_size=12))
@settings(max_examples=60, deadline=None)
def test_render_no_text_of_a_client_becomes_a_special_token(specials_of: Any, keep: str, texts: list[str]) -> None:
    messages, tools = conversation(texts)
    harmless, harmless_tools = conversation(["x"] * 12)
    seen = specials_of(render(messages, tools=tools, keep_thinking=keep))
    assert seen == specials_of(render(harmless, tools=harmless_tools, keep_thinking=keep))


@pytest.mark.parametrize("special", SPECIAL)
def test_render_special_token_in_text_reads_the_same_without_the_joiner(special: str) -> None:
    text = f"before {special} after"
    shown = render([message("user", text)], add_generation_prompt=False)
    assert shown == turn("user", neutralised(text, special))
    assert shown.replace(JOINER, "") == turn("user", text)


@pytest.mark.parametrize("special", SPECIAL)
def test_render_taking_thinking_out_of_an_answer_forms_no_token(specials_of: Any, special: str) -> None:
    prompts = [
        render([USER, message("assistant", f"{text}\n</think>\n\nb")]) for text in (f"<<think>{special[1:]}", "x")
    ]
    assert specials_of(prompts[0]) == specials_of(prompts[1])
