"""Reading one tool call of Qwen3.5: the function's name, its values, and where it ends."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from qwen_nvfp4_patches.qwen3_arguments import is_text, parse_json, properties_of, types_of, value_of
from qwen_nvfp4_patches.qwen3_cursor import (
    CALL,
    CALL_END,
    CALL_TAGS,
    FUNCTION,
    FUNCTION_END,
    JOINER,
    OPENS_CALL,
    PARAMETER,
    PARAMETER_END,
    THINK_END,
    THINK_TAGS,
    Cursor,
    Kind,
    Starved,
)  # fmt: skip

_BEFORE_QUOTED = (" ", "`", '"', "'")
_FOLLOWS = {
    PARAMETER_END: CALL_TAGS,
    FUNCTION_END: (FUNCTION_END, CALL_END, *OPENS_CALL),
    CALL_END: (FUNCTION_END, CALL_END, *OPENS_CALL),
}


class Value:
    """The argument that is being read."""

    def __init__(self, key: str, types: frozenset[str], *, streams: bool, compact: bool) -> None:
        self.key, self.types, self.streams, self.compact = key, types, streams, compact
        self.pieces: list[str] = []
        self.tail = ""  # the last characters of the value, emitted or not
        self.opened = False  # its key and quote were emitted
        self.nest = self.wraps = 0  # open in what the value quotes: functions, `<tool_call>`s around them
        self.unsure: tuple[int, str] | None = None  # (pieces, tail) where a tag was passed that may yet end the value

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self.tail = (self.tail + text)[-len(CALL) - 2 :]

    @property
    def at_line_start(self) -> bool:
        return not self.tail or self.tail[-1] == "\n" or self.tail.rstrip().endswith(CALL)


class CallReader(Cursor):
    """The part of a reader between `<function=NAME>` and the end of the call.

    Subclasses say what surrounds calls: `_call_begins` and `_call_ended` are told of each, `_read_text`
    goes on after it, and `_pass` skips.
    """

    def __init__(self, *, tools: Mapping[str, object] | None, dropped: Collection[str]) -> None:
        super().__init__()
        self._tools = tools
        self._dropped = tuple(dropped)
        self._name = ""
        self._seen: set[str] = set()
        self._junk: list[str] = []  # what stands in the function outside its values
        self._value: Value | None = None
        self._plain = False  # the second reading of a value that never closed: calls quoted in it are calls

    def _call_begins(self) -> None:
        raise NotImplementedError

    def _call_ended(self) -> None:
        raise NotImplementedError

    def _read_text(self) -> None:
        raise NotImplementedError

    def _pass(self, end: int) -> None:
        raise NotImplementedError

    def _begin_call(self, name: str, after: int) -> None:
        self._call_begins()
        self._calls += 1
        self._emit(Kind.CALL, name)
        self._name, self._seen, self._junk = name, set(), []
        self._pass(after)
        self._step = self._read_between

    def _end_call(self) -> None:
        if not self._seen:
            body = parse_json("".join(self._junk).strip())
            self._emit(Kind.ARGUMENTS, json.dumps(body, ensure_ascii=False) if isinstance(body, dict) else "{}")
        else:
            self._emit(Kind.ARGUMENTS, "}")
        self._plain = False
        self._call_ended()
        self._step = self._read_tail

    def _read_json_call(self, start: int) -> bool:
        """A call written as `{"name": …, "arguments": {…}}`, up to the `</tool_call>` that completes the JSON."""
        end = self._buffer.find(CALL_END, start)
        while end >= 0:
            if self._say_json_call(self._buffer[start:end], end + len(CALL_END)):
                return True
            end = self._buffer.find(CALL_END, end + 1)
        if not self._final:
            raise Starved
        return self._say_json_call(self._buffer[start:], len(self._buffer))

    def _say_json_call(self, text: str, end: int) -> bool:
        body = parse_json(text.strip())
        name = body.get("name") if isinstance(body, dict) else None
        if not isinstance(body, dict) or not isinstance(name, str) or not name:
            return False
        arguments = body.get("arguments", body.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        self._begin_call(name, end)
        self._junk = [json.dumps(arguments if isinstance(arguments, dict) else {}, ensure_ascii=False)]
        self._end_call()
        self._step = self._read_text
        return True

    def _read_tail(self) -> None:
        """After `</function>`: the `</tool_call>` that goes with it."""
        start = self._after_space(self._at)
        if self._tag_at(start, (CALL_END,)):
            self._pass(start + len(CALL_END))
        self._step = self._read_text

    def _read_between(self) -> None:
        """Inside a function, outside its values."""
        start = self._buffer.find("<", self._at)
        if start != self._at:
            end = len(self._buffer) if start < 0 else start
            self._junk.append(self._buffer[self._at : end])
            self._at = end
            return
        tag = self._tag_at(start, (*CALL_TAGS, *THINK_TAGS, *self._dropped))
        end = start + len(tag)
        if tag == PARAMETER:
            self._begin_value(end)
        elif tag == FUNCTION_END:
            self._pass(end)
            self._end_call()
        elif tag in (CALL, CALL_END, FUNCTION):
            self._end_call()
        elif tag:
            self._pass(end)
        elif self._is_cut_tag(self._at, CALL_TAGS):
            self._at = len(self._buffer)
        else:
            self._junk.append("<")
            self._at += 1

    def _begin_value(self, at: int) -> None:
        key, after, mark = self._name_at(at)
        compact = self._char_at(after) != "\n"
        self._pass(after if compact else after + 1)
        if not key or not mark:
            return
        parameters = self._tools.get(self._name) if self._tools else None
        types = types_of(properties_of(parameters).get(key), parameters)
        self._value = Value(key, types, streams=is_text(types), compact=compact)
        self._step = self._read_value

    def _read_value(self) -> None:
        value = self._open_value
        start = self._buffer.find("<", self._at)
        if start != self._at:
            end = len(self._buffer) if start < 0 else start
            value.add(self._buffer[self._at : end])
            self._at = end
            self._stream()
            return
        tag = self._tag_at(start, CALL_TAGS)
        ends = bool(tag) and self._ends_value(tag, start + len(tag))
        if ends and value.unsure is not None and not self._is_proper_end(tag, start + len(tag)):
            self._read_again()
        elif ends:
            self._close_value()
            if tag == PARAMETER_END:
                self._pass(start + len(tag))
            elif tag in (CALL, CALL_END, FUNCTION, FUNCTION_END):
                self._step = self._read_between
        elif tag:
            value.add(tag)
            self._at += len(tag)
            self._stream()
        elif self._is_cut_tag(self._at, CALL_TAGS):
            self._at = len(self._buffer)
        else:
            self._at += 2 if self._char_at(start + 1) == JOINER else 1
            value.add("<")

    @property
    def _open_value(self) -> Value:
        if self._value is None:
            raise RuntimeError("no argument is open")
        return self._value

    def _ends_value(self, tag: str, end: int) -> bool:
        """Whether `tag`, which ends at `end`, ends the value. Where only what never came could tell, notes it."""
        value = self._open_value
        if value.nest:
            if tag == FUNCTION_END:
                value.nest -= 1
            elif tag == FUNCTION and value.at_line_start:
                value.nest += 1
            return False
        if tag == CALL_END and value.wraps:
            value.wraps -= 1
            return False
        if tag not in OPENS_CALL and self._is_structure(tag, end):
            return True
        if tag == PARAMETER:
            return False
        if tag in OPENS_CALL:
            is_call = tag == FUNCTION or bool(self._tag_at(self._after_space(end), (FUNCTION,)))
            if not is_call or not value.at_line_start:
                return False
        if not self._plain:
            value.unsure = value.unsure or (len(value.pieces), value.tail)
            value.nest += tag == FUNCTION
            value.wraps += tag == CALL
        return self._plain

    def _is_structure(self, tag: str, end: int) -> bool:
        """Whether a tag at the level of the value is alone on its line, or followed by what follows such a tag."""
        value = self._open_value
        mentioned = value.tail[-1:] in _BEFORE_QUOTED and self._char_at(end) not in ("", "\n")
        inline = not value.at_line_start and (mentioned or not value.compact)
        if tag == PARAMETER:
            return not inline and self._name_at(end)[2] != "\n"
        if not inline and (value.compact or self._char_at(end) == "\n"):
            return True
        at = self._after_space(end)
        if not self._char_at(at) or self._is_cut_tag(at, CALL_TAGS, 1):
            return True
        return bool(self._tag_at(at, (*_FOLLOWS[tag], THINK_END, *self._dropped)))

    def _is_proper_end(self, tag: str, end: int) -> bool:
        return tag == PARAMETER_END and bool(self._tag_at(self._after_space(end), (PARAMETER, FUNCTION_END)))

    def _open(self) -> None:
        """Emits the key of the value."""
        value = self._open_value
        lead = ", " if self._seen else "{"
        self._seen.add(value.key)
        self._emit(Kind.ARGUMENTS, f"{lead}{json.dumps(value.key, ensure_ascii=False)}: ")
        value.opened = True

    def _stream(self) -> None:
        """Passes on what is certain of a value that is a string; its last newline may belong to the markup."""
        value = self._open_value
        if not value.streams or value.unsure is not None or (value.key in self._seen and not value.opened):
            return
        text = "".join(value.pieces)
        kept = text.removesuffix("\n")
        value.pieces = [text[len(kept) :]] if kept != text else []
        if not value.opened:
            self._open()
            self._emit(Kind.ARGUMENTS, '"')
        self._emit(Kind.ARGUMENTS, json.dumps(kept, ensure_ascii=False)[1:-1])

    def _close_value(self) -> None:
        value = self._open_value
        text = "".join(value.pieces).removesuffix("\n")
        if value.opened:
            self._emit(Kind.ARGUMENTS, json.dumps(text, ensure_ascii=False)[1:])
        elif value.key not in self._seen:
            self._open()
            self._emit(Kind.ARGUMENTS, json.dumps(value_of(text, value.types), ensure_ascii=False))
        self._value = None
        self._step = self._read_between

    def _close_open(self) -> bool:
        """At the end of the output: closes what is open. True if there is text to read again."""
        value = self._value
        if value is not None and value.unsure is not None:
            self._read_again()
            return True
        if value is not None:
            self._close_value()
        if self._step == self._read_between:
            self._end_call()
        return False

    def _read_again(self) -> None:
        """The value was not closed, so what it seemed to quote was the call going on: reads that from there as such."""
        value = self._open_value
        pieces, tail = value.unsure or (len(value.pieces), value.tail)
        self._buffer, self._at = "".join(value.pieces[pieces:]) + self._buffer[self._at :], 0
        value.pieces, value.tail = value.pieces[:pieces], tail
        value.unsure, value.nest, value.wraps, self._plain = None, 0, 0, True
