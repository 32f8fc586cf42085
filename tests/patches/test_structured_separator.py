"""A grammar after thinking begins with the blank line that the family writes there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qwen_nvfp4_patches import structured_backends
from qwen_nvfp4_patches.structured_separator import AfterSeparator, separating
from qwen_nvfp4_serve import shims


class Digits:
    """A grammar of the tokens in `allowed`, in that order."""

    def __init__(self, *allowed: int) -> None:
        self.allowed, self.read = allowed, 0

    def accept_tokens(self, _: str, tokens: list[int]) -> bool:
        fits = tuple(tokens) == self.allowed[self.read : self.read + len(tokens)]
        self.read += len(tokens) * fits
        return fits

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        left = self.allowed[self.read :]
        return [token for at, token in enumerate(tokens) if tuple(tokens[: at + 1]) == left[: at + 1]]

    def rollback(self, num_tokens: int) -> None:
        self.read -= num_tokens

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        bitmask[batch_index].fill_(-1)

    def is_terminated(self) -> bool:
        return self.read == len(self.allowed)

    def reset(self) -> None:
        self.read = 0


def test_grammar_after_the_separator_begins_with_it_and_with_nothing_else() -> None:
    torch = pytest.importorskip("torch")
    for separator in (5, 31, 32, 63):
        grammar = AfterSeparator(Digits(7, 8), separator)
        mask = torch.full((2, 2), -1, dtype=torch.int32)
        grammar.fill_bitmask(mask, 1)
        bits = [word >> bit & 1 for word in mask[1].tolist() for bit in range(32)]
        assert [token for token, bit in enumerate(bits) if bit] == [separator]
        assert mask[0].tolist() == [-1, -1]
        assert grammar.validate_tokens([separator, 7, 9]) == [separator, 7]
        assert grammar.accept_tokens("r", [separator])
        assert not grammar.is_terminated()
        grammar.fill_bitmask(mask, 0)
        assert mask[0].tolist() == [-1, -1]
        assert grammar.validate_tokens([separator]) == []
        assert grammar.accept_tokens("r", [7, 8])
        assert grammar.is_terminated()


@pytest.mark.parametrize("taken", [[], [5], [5, 7], [5, 7, 8]])
def test_grammar_after_the_separator_is_rolled_back_to_where_it_was(taken: list[int]) -> None:
    inner = Digits(7, 8)
    grammar = AfterSeparator(inner, 5)
    assert all(grammar.accept_tokens("r", [token]) for token in taken)
    rest = [5, 7, 8][len(taken) :]
    assert grammar.accept_tokens("r", rest)
    grammar.rollback(len(rest))
    assert inner.read == max(len(taken) - 1, 0)
    assert grammar.validate_tokens([5, 7, 8]) == ([5, 7, 8] if not taken else [])
    assert grammar.accept_tokens("r", rest)
    grammar.reset()
    assert grammar.accept_tokens("r", [5, 7, 8])


def test_grammar_after_the_separator_takes_a_call_that_ended_the_thinking() -> None:
    inner = Digits(7, 8)
    grammar = AfterSeparator(inner, 5)
    assert grammar.accept_tokens("r", [7])
    assert grammar.validate_tokens([8]) == [8]
    grammar.rollback(1)
    assert inner.read == 0
    assert grammar.validate_tokens([5, 7]) == [5, 7]


class Manager:
    """What the patches take for granted of vLLM's StructuredOutputManager."""

    enable_in_reasoning = False
    backend = "the first's"

    def __init__(self, reasoner: Any) -> None:
        self.reasoner = reasoner
        self.tokenizer = SimpleNamespace(encode=lambda text, **_: {"\n\n": [5]}[text])
        vars(self)[structured_backends.KEPT] = {"guidance": "the request's"}

    def _get_reasoner(self, _: Any) -> Any:
        return self.reasoner

    def _create_grammar(self, _: Any) -> str:
        return f"a grammar of {self.backend}"


def request_of(*, reasoning_ended: bool | None = False) -> Any:
    return SimpleNamespace(
        structured_output_request=SimpleNamespace(reasoning_ended=reasoning_ended),
        sampling_params=SimpleNamespace(structured_outputs=SimpleNamespace(_backend="guidance")),
    )


@pytest.fixture
def reasoner() -> Any:
    """Stands for the family's, of which only the class is asked."""
    shims.install()
    adapters = pytest.importorskip("vllm.parser.engine.registered_adapters", reason="vLLM is not installed")
    return object.__new__(adapters.Qwen3ParserReasoningAdapter)


@pytest.mark.parametrize(
    "makers",
    [(structured_backends.creating, separating), (separating, structured_backends.creating)],
    ids=["separator outside", "backends outside"],
)
def test_separator_and_backend_of_the_request_in_either_order(reasoner: Any, makers: Any) -> None:
    create = makers[1](makers[0](Manager._create_grammar))
    grammar = create(Manager(reasoner), request_of())
    assert isinstance(grammar, AfterSeparator)
    assert (grammar._inner, grammar._separator) == ("a grammar of the request's", 5)


def test_separator_is_for_the_familys_open_thinking_only(reasoner: Any) -> None:
    create, plain = separating(Manager._create_grammar), "a grammar of the first's"
    assert create(Manager(reasoner), request_of(reasoning_ended=True)) == plain
    assert create(Manager(None), request_of()) == plain
    within = Manager(reasoner)
    within.enable_in_reasoning = True
    assert create(within, request_of()) == plain
