"""Conversations and their text: the same rules as `chat_template.jinja`, with the trained parts marked."""

import json
from dataclasses import dataclass, field
from typing import Any

EMPTY_THINK = "<think>\n\n</think>\n\n"
OPEN_THINK = "<think>\n"


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call: the function's name and its arguments, in the order of the tool's parameters."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message. `think` is None when the assistant answers without thinking."""

    role: str
    content: str = ""
    think: str | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A generated example: every assistant turn in it is an exact expected answer."""

    task: str
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    depth: float | None = None
    tags: tuple[str, ...] = field(default=())


def argument_text(value: Any) -> str:
    """Text of an argument inside `<parameter=…>`: strings as they are, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def call_text(call: Call) -> str:
    """The family's XML form of one tool call."""
    lines = [f"<tool_call>\n<function={call.name}>\n"]
    lines += [f"<parameter={key}>\n{argument_text(value)}\n</parameter>\n" for key, value in call.arguments.items()]
    return "".join(lines) + "</function>\n</tool_call>"


def tool_text(tool: dict[str, Any]) -> str:
    """One line that describes an OpenAI tool to the model: `- name(arg: type, …) description`."""
    function = tool["function"]
    properties = function.get("parameters", {}).get("properties", {})
    arguments = ", ".join(f"{key}: {value.get('type', 'string')}" for key, value in properties.items())
    line = f"- {function['name']}({arguments})"
    return f"{line} {function['description']}" if function.get("description") else line


def _system_text(content: str, tools: tuple[dict[str, Any], ...]) -> str:
    if not tools:
        return content
    listed = "# Tools\n" + "\n".join(tool_text(tool) for tool in tools)
    return f"{content}\n\n{listed}" if content else listed


def _assistant_text(turn: Turn) -> str:
    calls = "\n".join(call_text(call) for call in turn.calls)
    return f"{turn.content}\n\n{calls}" if turn.content and calls else turn.content + calls


def segments(conversation: Conversation) -> list[tuple[str, bool]]:
    """Text pieces of a whole conversation, each with True where the model must write it.

    Joined, the pieces are exactly what the chat template renders for the same messages with each assistant turn's
    thinking kept.
    """
    turns = conversation.turns
    pieces: list[tuple[str, bool]] = []
    system = turns[0].content if turns[0].role == "system" else ""
    if system or conversation.tools:
        pieces.append((f"<|im_start|>system\n{_system_text(system, conversation.tools)}<|im_end|>\n", False))
    rest = turns[1:] if turns[0].role == "system" else turns
    for index, turn in enumerate(rest):
        if turn.role == "assistant":
            pieces += _assistant_segments(turn)
        elif turn.role == "tool":
            first = index == 0 or rest[index - 1].role != "tool"
            last = index + 1 == len(rest) or rest[index + 1].role != "tool"
            opening = "<|im_start|>user" if first else ""
            closing = "<|im_end|>\n" if last else ""
            pieces.append((f"{opening}\n<tool_response>\n{turn.content}\n</tool_response>{closing}", False))
        else:
            pieces.append((f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n", False))
    return pieces


def _assistant_segments(turn: Turn) -> list[tuple[str, bool]]:
    answer = _assistant_text(turn) + "<|im_end|>"
    if turn.think is None:
        return [(f"<|im_start|>assistant\n{EMPTY_THINK}", False), (answer, True), ("\n", False)]
    opened = f"<|im_start|>assistant\n{OPEN_THINK}"
    return [(opened, False), (f"{turn.think}\n</think>\n\n", True), (answer, True), ("\n", False)]


def openai_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The same conversation as OpenAI chat messages, thinking under `reasoning_content`."""
    messages: list[dict[str, Any]] = []
    calls = 0
    pending: list[str] = []
    for turn in conversation.turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.think is not None:
            message["reasoning_content"] = turn.think
        if turn.calls:
            pending = [f"call_{calls + index}" for index in range(len(turn.calls))]
            calls += len(turn.calls)
            message["tool_calls"] = [
                {
                    "id": identifier,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for identifier, call in zip(pending, turn.calls, strict=True)
            ]
        if turn.role == "tool":
            message["tool_call_id"] = pending.pop(0) if pending else "call_0"
        messages.append(message)
    return messages
