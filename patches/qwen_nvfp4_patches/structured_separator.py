"""The blank line between thinking and a structured answer.

The family writes `</think>`, a blank line, then its answer. vLLM's grammars begin right at `</think>`, where a regex, a
choice or a number knows no blank line: the answer then begins where the model never learned to begin one, and comes out
wrong although its thinking was right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch

if TYPE_CHECKING:
    import torch

PARAMETERS = ("self", "request")
SEPARATOR = "\n\n"


class AfterSeparator:
    """A grammar whose first token is `separator`; from there on `inner`.

    Tokens that come first without it go to `inner`: a call that ended the thinking itself. Stands for vLLM's
    StructuredOutputGrammar, whose other attributes are those of `inner`.
    """

    def __init__(self, inner: Any, separator: int) -> None:
        self._inner = inner
        self._separator = separator
        self._taken: list[bool] = []  # of each accepted token: whether it was the separator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _is_separator(self, tokens: list[int]) -> bool:
        return not self._taken and tokens[:1] == [self._separator]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """As vLLM's: False when a token does not fit."""
        if self._is_separator(tokens):
            self._taken, tokens = [True], tokens[1:]
        if not tokens:
            return True
        accepted = self._inner.accept_tokens(request_id, tokens)
        if accepted:
            self._taken += [False] * len(tokens)
        return bool(accepted)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """As vLLM's: the longest beginning that fits; nothing changes."""
        first = tokens[:1] if self._is_separator(tokens) else []
        return first + list(self._inner.validate_tokens(tokens[len(first) :]))

    def rollback(self, num_tokens: int) -> None:
        """As vLLM's: forgets the last tokens."""
        if num_tokens <= 0:
            return
        kept, gone = self._taken[:-num_tokens], self._taken[-num_tokens:]
        inside = gone.count(False)
        if inside:
            self._inner.rollback(inside)
        self._taken = kept

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """As vLLM's: one bit a token, 32 to a word, set where the token may come next."""
        if self._taken:
            self._inner.fill_bitmask(bitmask, batch_index)
            return
        word, bit = divmod(self._separator, 32)
        bitmask[batch_index].fill_(0)
        bitmask[batch_index, word] = 1 << bit if bit < 31 else -(1 << 31)

    def is_terminated(self) -> bool:
        """As vLLM's."""
        return bool(self._taken) and bool(self._inner.is_terminated())

    def reset(self) -> None:
        """As vLLM's."""
        self._inner.reset()
        self._taken = []


def after_separator(manager: Any, request: Any, grammar: Any) -> Any:
    """`grammar`, preceded by the separator where it begins at the end of the family's thinking."""
    from vllm.parser.engine.registered_adapters import Qwen3ParserReasoningAdapter

    if manager.enable_in_reasoning or not isinstance(manager._get_reasoner(request), Qwen3ParserReasoningAdapter):
        return grammar
    if request.structured_output_request.reasoning_ended:
        return grammar
    tokens = manager.tokenizer.encode(SEPARATOR, add_special_tokens=False)
    return AfterSeparator(grammar, tokens[0]) if len(tokens) == 1 else grammar


def separating(original: Any) -> Any:
    """_create_grammar whose grammar begins where the family's answers begin."""

    def _create_grammar(self: Any, request: Any) -> Any:
        return after_separator(self, request, original(self, request))

    return _create_grammar


def _needed() -> Need:
    return Need(True, "vLLM's grammars begin right at `</think>`, where the family writes a blank line")


def _apply() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    seams.replace_function(StructuredOutputManager, "_create_grammar", separating, PARAMETERS)


PATCH = Patch(
    name="structured-separator",
    platform=None,
    changes="StructuredOutputManager._create_grammar lets a grammar begin with the blank line that follows thinking",
    why="a regex, a choice or a number after thinking begins where the model never learned to begin, and is wrong",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/structured_output/__init__.py",
    remove_when="tests/e2e/test_structured.py passes with this patch taken out",
    needed=_needed,
    apply=_apply,
)
