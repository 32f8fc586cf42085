"""The generated tasks: right answers, clean splits, and text that the chat template renders."""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
jinja2 = pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("torch")

from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402
from training import tasks, tokenizer  # noqa: E402
from training.chat import Conversation, openai_messages, segments  # noqa: E402
from training.evaluate import prepare  # noqa: E402
from training.mixture import SHORT, evaluation_examples, training_example  # noqa: E402
from training.packing import Packer, encode  # noqa: E402
from training.tokenizer import FastEncoder  # noqa: E402


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    return tokenizer.load()


def drawn(count: int, seed: int = 1) -> Iterator[Conversation]:
    rng = Random(seed)
    return (training_example(rng, 0.1) for _ in range(count))


@functools.cache
def template() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = (tokenizer.REFERENCE_DIR / "chat_template.jinja").read_text()
    return environment.from_string(text)


def rendered(messages: list[dict[str, Any]], tools: Any, **settings: Any) -> str:
    return template().render(messages=messages, tools=tools, **settings)


def parsed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def test_chat_template_generated_conversations_equal_training_text() -> None:
    for example in drawn(400):
        text = "".join(piece for piece, _ in segments(example))
        assert rendered(parsed(openai_messages(example)), list(example.tools) or None) == text


@pytest.mark.parametrize(("thinking", "ending"), [(True, "<think>\n"), (False, "<think>\n\n</think>\n\n")])
def test_chat_template_generation_prompt_opens_or_closes_thinking(thinking: bool, ending: str) -> None:
    text = rendered([{"role": "user", "content": "hi"}], None, add_generation_prompt=True, enable_thinking=thinking)
    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{ending}"


def test_fast_encoder_generated_text_equals_tokenizer(vocabulary: Any) -> None:
    encoder = FastEncoder(vocabulary)
    for example in drawn(300, seed=2):
        ids, _ = encode(encoder, example)
        whole = "".join(piece for piece, _ in segments(example))
        assert ids == vocabulary.encode(whole, add_special_tokens=False).ids


def test_tokenizer_bytes_and_special_tokens_survive_a_round_trip(vocabulary: Any) -> None:
    text = '<|im_start|>user\nGrüße, 世界! {"a": 12}\t<tool_call></think><|im_end|>'
    assert vocabulary.decode(vocabulary.encode(text).ids, skip_special_tokens=False) == text
    for token in (*tokenizer.SPECIAL_TOKENS, *tokenizer.PLAIN_ADDED_TOKENS):
        assert len(vocabulary.encode(token).ids) == 1


def test_templates_have_both_splits_and_show_every_phrase_in_training() -> None:
    evaluation_examples(3, 5)
    for _ in drawn(2000, seed=3):
        pass
    for name, early in tasks._EARLY_SLOTS.items():
        later = tuple(size + 1 for size in early)
        split = tasks._template_split(name, later)
        assert split["eval"]
        assert not set(split["eval"]) & set(split["train"])
        for slot, size in enumerate(later):
            assert {picks[slot] for picks in split["train"]} == set(range(size))


def test_values_of_eval_examples_are_held_out_of_training() -> None:
    rng = Random(4)
    seen = {"train": set[str](), "eval": set[str]()}
    for split, answers in seen.items():
        for _ in range(400):
            text = tasks.sort_items(rng, split, False).turns[0].content
            items = [item for item in text.split() if item.isdigit()]
            if items:
                assert tasks.held_out("items", items) == (split == "eval")
                answers.add(text)
    assert not seen["train"] & seen["eval"]


def answer_of(example: Conversation) -> str:
    return example.turns[-1].content


def test_arithmetic_answers_and_working_are_right() -> None:
    rng = Random(5)
    for _ in range(500):
        example = tasks.arithmetic(rng, "train", True)
        question = example.turns[0].content.replace("plus", "+").replace("minus", "-").replace("times", "*")
        digits = "".join(char for char in question if char in "0123456789+-*")
        assert eval(digits) == int(answer_of(example))
        for line in (example.turns[-1].think or "").splitlines():
            left, _, right = line.partition("=")
            assert not right or eval(left) == int(right)


def test_list_answers_are_right() -> None:
    rng = Random(6)
    for _ in range(300):
        text = tasks.reverse_items(rng, "train", False)
        assert answer_of(text).split() == text.turns[0].content.split(": ")[-1].split()[::-1]
        text = tasks.copy_items(rng, "train", False)
        assert text.turns[0].content.endswith(answer_of(text))
        text = tasks.sort_items(rng, "train", False)
        assert sorted(answer_of(text).split()) == sorted(text.turns[0].content.split(": ")[-1].split())
        text = tasks.count_items(rng, "train", False)
        head, _, items = text.turns[0].content.partition(": ")
        assert int(answer_of(text)) == max(items.split().count(word) for word in head.split())


def test_packer_every_document_once_and_whole(vocabulary: Any) -> None:
    encoder, packer = FastEncoder(vocabulary), Packer(4, 512)
    sent, got = [], []
    batches = []
    for example in drawn(200, seed=7):
        ids, target = encode(encoder, example)
        if len(ids) <= 512:
            sent.append(tuple(ids))
            made = packer.add(ids, target)
            batches += [made[0]] if made else []
    while packer.pending:
        batches.append(packer.rest()[0])
    for batch in batches:
        for tokens, document in zip(batch.tokens, batch.document, strict=True):
            each = [tuple(tokens[document == index].tolist()) for index in range(document.max() + 1)]
            got += [found for found in each if any(found)]
    assert sorted(got) == sorted(sent)


def test_targets_cover_exactly_the_assistants_words(vocabulary: Any) -> None:
    for example in drawn(100, seed=8):
        ids, target = encode(FastEncoder(vocabulary), example)
        kept = [token for token, weight in zip(ids, target, strict=True) if weight]
        wanted = "".join(piece for piece, trained in segments(example) if trained)
        assert vocabulary.decode(kept, skip_special_tokens=False) == wanted


def test_evaluation_has_every_task_in_both_modes_and_three_needle_lengths() -> None:
    scored = prepare(8, 4, 4096)
    names = {name for labels in scored.labels for row in labels for name in row}
    assert {f"{task}/{mode}" for task in SHORT for mode in ("think", "direct") if task != "arithmetic"} <= names
    assert {name.split("/")[1] for name in names if name.startswith("needle")} >= {"1024", "2048", "4096"} - {"1024"}
