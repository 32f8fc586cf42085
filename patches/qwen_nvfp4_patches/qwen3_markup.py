"""Qwen3.5 output, read as it comes: reasoning, content and tool calls out of `<think>` and `<tool_call>` markup.

The same text gives the same result however it is cut, because a tag is judged by the text around it and never by where
a piece ends: where that text has not come yet, the reader waits for it.

    <think>…</think> content <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>

What a tag means:
* `<tool_call>` opens a call if `<function=` or a JSON object comes next, in thinking as well as in content.
* Elsewhere, a tag within a line of prose is prose and stays. Any other stray tag is dropped.
* `</parameter>` ends a value if structure follows. A call quoted inside a value belongs to the value.
* A call whose tags were not all closed ends where the next one begins, or with the output, and its JSON is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from qwen_nvfp4_patches.qwen3_calls import CallReader
from qwen_nvfp4_patches.qwen3_cursor import (
    CALL,
    CALL_END,
    CALL_TAGS,
    FUNCTION,
    FUNCTION_END,
    JOINER,
    OPENS_CALL,
    PARAMETER,
    THINK,
    THINK_END,
    THINK_TAGS,
    Event,
    Kind,
    Starved,
)  # fmt: skip

_QUOTES = {"`": "`", '"': '"', "'": "'", "(": ")", "[": "]", "*": "*", "“": "”", "‘": "’", "«": "»"}


class Reader(CallReader):
    """Reads one output. thinking: it begins inside `<think>`. tools: `parameters` by function name, None to leave tool
    markup alone. dropped: special tokens that are no part of any text. literal: content is data under a grammar, and a
    tag in it is data too, unless `tools` are given and it begins with `<tool_call>`.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Mapping[str, object] | None,
        dropped: Collection[str] = (),
        literal: bool = False,
    ) -> None:
        super().__init__(tools=tools, dropped=dropped)
        self._tags = (*THINK_TAGS, *(CALL_TAGS if tools is not None else ()), *self._dropped)
        self._step = self._read_text
        self._literal = literal
        self._reasoning = thinking
        self._before, self._line, self._kept = "\n", False, False
        self._fresh = True  # nothing but space since the beginning, the end of thinking or a call
        self._marked = thinking  # markup was read: the newlines that belong to it are no content
        self._gap, self._frozen, self._said = "", False, False  # space held back in content; content was emitted
        self._thought, self._thought_gap = False, ""

    def feed(self, text: str) -> list[Event]:
        """What `text` adds, as far as it is certain."""
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        return self._run(final=False)

    def finish(self) -> list[Event]:
        """What is left at the end of the output."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Event]:
        self._final = final
        try:
            while self._at < len(self._buffer) or (final and self._close_open()):
                self._step()
        except Starved:
            pass
        if final:
            self._end_thought()
            if not self._calls and not self._frozen and (self._said or not self._marked):
                self._emit(Kind.CONTENT, self._gap)
            self._gap = ""
        return self._take_events()

    def _read_text(self) -> None:
        if self._literal and not self._reasoning and not self._gives_calls():
            self._say(self._buffer[self._at :])
            self._at = len(self._buffer)
            return
        start = self._buffer.find("<", self._at)
        if start != self._at:
            end = len(self._buffer) if start < 0 else start
            self._say(self._buffer[self._at : end])
            self._at = end
            return
        tag = self._tag_at(start, self._tags)
        if tag:
            self._read_tag(tag)
        elif self._is_cut_tag(self._at, self._tags):
            self._at = len(self._buffer)
        else:
            self._at += 2 if self._char_at(start + 1) == JOINER else 1
            self._say("<")

    def _gives_calls(self) -> bool:
        """Whether what a grammar shaped is calls and not an answer: its beginning says so."""
        if self._tools is not None and not self._said:
            self._literal = not self._tag_at(self._after_space(self._at), (CALL,))
        return not self._literal

    def _read_tag(self, tag: str) -> None:
        end = self._at + len(tag)
        if tag == THINK_END and self._reasoning:
            self._end_thought()
            self._pass(end)
            self._fresh, self._marked = True, True
        elif tag == THINK and self._fresh and not (self._reasoning and self._thought):
            self._begin_thought(end)
        elif tag in OPENS_CALL and self._opens_call(tag, end):
            pass
        elif self._is_prose(tag, end):
            self._say(tag)
            self._at, self._kept = end, True
        else:
            self._pass(self._name_at(end)[1] if tag in (FUNCTION, PARAMETER) else end)
            self._break_content()

    def _pass(self, end: int) -> None:
        """Goes on at `end`, leaving out what was there."""
        self._at, self._before, self._kept = end, ">", False

    def _is_prose(self, tag: str, end: int) -> bool:
        """Whether the tag stands in a line as a word does: `use the <think> tag`."""
        after = self._char_at(end)
        if after == "<":
            closing = {THINK: THINK_END, CALL: CALL_END}.get(tag)
            follows = closing is not None and self._before != " " and bool(self._tag_at(end, (closing,)))
        else:
            follows = after not in ("", "\n", "\r", "{") and (tag in (FUNCTION, PARAMETER) or not after.isalnum())
        if self._before in _QUOTES and after not in ("<", _QUOTES[self._before]) and tag not in (FUNCTION, PARAMETER):
            return False
        return follows and (self._before in _QUOTES or self._kept or (self._before == " " and self._line))

    def _opens_call(self, tag: str, end: int) -> bool:
        """Begins a call at the tag, if it is one."""
        start = self._after_space(end) if tag == CALL else self._at
        if tag == CALL and self._char_at(start) == "{":
            return self._read_json_call(start)
        if tag == CALL and self._tag_at(start, (FUNCTION,)) == "":
            return False
        name, after, mark = self._name_at(start + len(FUNCTION))
        if not name or not mark:
            return False
        if tag == FUNCTION:
            follows = self._tag_at(self._after_space(after), (PARAMETER, FUNCTION_END))
            if not follows:
                return False
        self._begin_call(name, after)
        return True

    def _say(self, text: str) -> None:
        body = text.rstrip()
        self._line = bool(text.rpartition("\n")[2].strip()) or (self._line and "\n" not in text)
        self._before, self._kept = text[-1], False
        self._fresh = self._fresh and not body
        if self._reasoning:
            self._think(text)
        else:
            self._speak(text, body)

    def _speak(self, text: str, body: str) -> None:
        if not body:
            if not self._frozen:
                self._gap += text
            return
        if self._frozen:
            text = text.lstrip()
            self._frozen = False
        elif not self._said and self._marked:
            stripped = (self._gap + text).lstrip("\r\n")
            self._gap, text = "", stripped
        kept = text.rstrip()
        self._emit(Kind.CONTENT, self._gap + kept)
        self._gap, self._said = text[len(kept) :], True

    def _think(self, text: str) -> None:
        text = self._thought_gap + text
        kept = text.rstrip()
        if not kept:
            self._thought_gap = text
            return
        self._emit(Kind.REASONING, kept)
        self._thought, self._thought_gap = True, text[len(kept) :]

    def _begin_thought(self, end: int) -> None:
        if self._char_at(end) == "\n":
            end += 1
        self._pass(end)
        self._reasoning, self._marked = True, True
        self._thought_gap = "\n" if self._thought else ""

    def _end_thought(self) -> None:
        if self._reasoning and self._thought:
            self._emit(Kind.REASONING, self._thought_gap.removesuffix("\n"))
        self._reasoning, self._thought_gap = False, ""

    def _call_begins(self) -> None:
        self._end_thought()
        self._break_content()

    def _break_content(self) -> None:
        """Markup stands here: of the space before and after it, only one side is content."""
        self._marked = True
        self._frozen = bool(self._gap) and self._said
        if not self._said:
            self._gap = ""

    def _call_ended(self) -> None:
        self._fresh = True
