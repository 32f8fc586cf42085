"""vLLM's parsers driven as its servers drive them, without an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from tests.parser_scripts import TOOLS, Result, cuts

from qwen_nvfp4_patches.qwen3_parser import composing
from qwen_nvfp4_serve.chat_template import render
from qwen_nvfp4_serve.synthetic.tokenizer import tokenizer_json

Piece = tuple[str, list[int]]
NAMES = {
    "tool_parser_name": "qwen3_coder",
    "reasoning_parser_name": "qwen3",
    "enable_auto_tools": True,
    "model_name": None,
    "is_harmony": False,
    "tool_strict_level": "auto",
    "tokenizer": None,
}


class Driver:
    """One parser class of the installed vLLM, with our patch or without, and a tokenizer of the family."""

    def __init__(self, *, patched: bool) -> None:
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast
        from vllm.parser.parser_manager import ParserManager

        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer_json(512))),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            additional_special_tokens=["<|im_start|>"],
        )
        bound = ParserManager._compose_parser
        stock = getattr(bound, "_qwen_nvfp4_original", bound)
        self.parser_class = (composing(stock) if patched else stock)(**NAMES)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def request(self, *, tools: Sequence[Any] | None = TOOLS, **fields: Any) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked = {"tools": list(tools), "tool_choice": fields.pop("tool_choice", "auto")} if tools else {}
        return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], **asked, **fields)

    def _parser(self, request: Any, thinking: bool) -> tuple[Any, list[int]]:
        kwargs = {} if thinking else {"enable_thinking": False}
        prompt = self.encode(render([{"role": "user", "content": "x"}], **kwargs))
        return self.parser_class(self.tokenizer, request.tools, chat_template_kwargs=kwargs), prompt

    def whole(self, text: str, request: Any | None = None, *, thinking: bool = True) -> Result:
        """The result of a request that is not streamed."""
        request = request or self.request()
        parser, prompt = self._parser(request, thinking)
        parser.set_prompt_token_ids(prompt)
        ids = self.encode(text)
        reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
        assert parser.count_reasoning_tokens(ids) >= 0
        return reasoning or "", content or "", tuple((call.name, call.arguments) for call in calls or ())

    def deltas(self, pieces: Sequence[Piece], request: Any | None = None, *, thinking: bool = True) -> Iterator[Any]:
        """The messages of a stream, one for each piece that adds something."""
        request = request or self.request()
        parser, prompt = self._parser(request, thinking)
        for index, (text, ids) in enumerate(pieces):
            last = index == len(pieces) - 1
            delta = parser.parse_delta(text, ids, request, prompt, finished=last)
            if delta is not None:
                yield delta

    def streamed(self, pieces: Sequence[Piece], request: Any | None = None, *, thinking: bool = True) -> Result:
        """What a client that adds up a stream has at its end."""
        reasoning, content = "", ""
        calls: dict[int, list[str]] = {}
        for delta in self.deltas(pieces, request, thinking=thinking):
            reasoning += delta.reasoning or ""
            content += delta.content or ""
            for call in delta.tool_calls or ():
                if call.id is not None:
                    assert call.index not in calls
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments or ""
        assert list(calls) == list(range(len(calls)))
        return reasoning, content, tuple((name, arguments) for name, arguments in calls.values())

    def by_tokens(self, text: str, places: Sequence[int]) -> list[Piece]:
        """Pieces cut at token places, with text as an incremental detokenizer gives it: never half a character."""
        ids = self.encode(text)
        places = [place for place in dict.fromkeys(places) if 0 < place < len(ids)] + [len(ids)]
        pieces: list[Piece] = []
        start = done = 0
        for end in places:
            so_far = self.tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
            held = so_far.endswith("\ufffd") and end < len(ids)
            pieces.append(("" if held else so_far[done:], ids[start:end]))
            start, done = end, done if held else len(so_far)
        return pieces

    def in_bundles(self, text: str, rng: Random) -> list[Piece]:
        """Pieces of some tokens each, as speculative decoding delivers them."""
        return self.by_tokens(text, cuts(rng, len(self.encode(text))))


def by_characters(text: str, size: int) -> list[Piece]:
    """Pieces of `size` characters without token ids, which cut through tags."""
    return [(text[at : at + size], []) for at in range(0, len(text), size)] or [("", [])]
