"""Questions that a checkpoint answers exactly and with a margin, kept as `known_answers.json`."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from training import model as reference_model
from training import tasks, tokenizer
from training.chat import Conversation, openai_messages, segments
from training.config import CHUNK
from training.dialogs import lookup
from training.mixture import SHORT
from training.model import ReferenceModel, Rows, rotary
from training.structured import asked_tools, chained_tools, tools
from training.tokenizer import FastEncoder

# Log-probability between the right token and the next best: enough to survive other kernels' rounding.
MARGIN = 1.0
PER_TASK = 4
# Where engines cut a prompt: at blocks of the prefix cache (384 tokens on a CPU), else where a chunk is full.
BOUNDARIES = (384, 512, 768, 1024)
TRIES = 60


@dataclass(frozen=True, slots=True)
class Judged:
    """How a model does on one conversation: right everywhere, and its smallest margin."""

    right: bool
    margin: float


def tokens_of(encoder: FastEncoder, conversation: Conversation) -> tuple[list[int], int]:
    """The whole conversation, and where its last answer starts."""
    pieces = segments(conversation)
    last = max(index for index, (_, trained) in enumerate(pieces[:-1]) if not trained)
    ids: list[int] = []
    start = 0
    for index, (text, _) in enumerate(pieces[:-1]):
        ids += encoder(text)
        start = len(ids) if index == last else start
    return ids, start


@torch.no_grad()
def judge(model: ReferenceModel, encoder: FastEncoder, conversation: Conversation) -> Judged:
    """Whether greedy decoding gives the last turn exactly, by checking every next token after its true start."""
    ids, start = tokens_of(encoder, conversation)
    tokens = torch.tensor([ids + [0] * (-len(ids) % CHUNK)])
    cos, sin = rotary(tokens.shape[1], tokens.device, torch.float32)
    hidden, _ = model.trunk(Rows(tokens, torch.zeros_like(tokens), cos, sin))
    return _margins(model.lm_head(hidden[0, start - 1 : len(ids) - 1]).log_softmax(-1), ids[start:])


def _margins(logs: Tensor, wanted: list[int]) -> Judged:
    target = torch.tensor(wanted)[:, None]
    own = logs.gather(1, target)[:, 0]
    other = logs.scatter(1, target, float("-inf")).amax(-1)
    return Judged(bool((own > other).all()), float((own - other).min()))


def several_calls(rng: Random, think: bool) -> Conversation:
    """A held-out conversation that ends in two or three calls in one turn."""
    while True:
        conversation = tools(rng, "eval", think)
        if len(conversation.turns[-1].calls) > 1:
            return replace(conversation, task="several tools")


def second_call(rng: Random, think: bool) -> Conversation:
    """A held-out conversation that ends in a call after the result of another."""
    while True:
        conversation = chained_tools(rng, "eval", think)
        second = [index for index, turn in enumerate(conversation.turns) if turn.calls][1]
        if (conversation.turns[second].think is not None) == think:
            return replace(conversation, task="second call", turns=conversation.turns[: second + 1])


def candidates(seed: int, count: int) -> list[Conversation]:
    """Held-out conversations of all tasks, thinking or not, short notes and needles among them."""
    rng = Random(seed)
    made = []
    for _ in range(count):
        for think in (False, True):
            made += [maker(rng, "eval", think) for _, maker in SHORT.values()]
            made += [several_calls(rng, think), second_call(rng, think), asked_tools(rng, "eval", think)]
            made.append(lookup(rng, "eval", think, keys=16, tokens=200, questions=1))
            made.append(lookup(rng, "eval", think, keys=64, tokens=1500, questions=1))
    return made


@contextlib.contextmanager
def state_lost_every(tokens: int) -> Iterator[None]:
    """Recurrent state is lost at every multiple of `tokens`, as between chunks of prefill."""
    whole = reference_model.gated_delta_rule

    def forgetful(**parts: Any) -> Tensor:
        length = parts["document"].shape[1]
        return whole(**parts | {"document": parts["document"] + torch.arange(length) // tokens})

    reference_model.gated_delta_rule = forgetful
    try:
        yield
    finally:
        reference_model.gated_delta_rule = whole


def list_after_notes(rng: Random, think: bool, boundary: int) -> Conversation:
    """A look-up in notes, then a list to copy, reverse or sort that lies about `boundary` tokens into the prompt."""
    notes = lookup(rng, "eval", False, keys=12, tokens=rng.randrange(boundary - 200, boundary), questions=1)
    maker = rng.choice((tasks.copy_items, tasks.reverse_items, tasks.sort_items))
    turns = (*notes.turns, *maker(rng, "eval", think).turns)
    return without_old_thinking(Conversation(task=f"across {boundary}", turns=turns))


def across_boundaries(model: ReferenceModel, encoder: FastEncoder, seed: int) -> list[dict[str, Any]]:
    """For each boundary an answer that is right, with a margin, and wrong when state is lost at the boundary."""
    rng, records = Random(seed), []
    for index, boundary in enumerate(BOUNDARIES):
        for _ in range(TRIES):
            conversation = list_after_notes(rng, bool(index % 2), boundary)
            if tokens_of(encoder, conversation)[1] <= boundary:
                continue
            judged = judge(model, encoder, conversation)
            if not judged.right or judged.margin < MARGIN:
                continue
            with state_lost_every(boundary):
                lost = judge(model, encoder, conversation)
            if not lost.right and lost.margin < -MARGIN:
                records.append(as_record(f"across-{boundary}", conversation))
                break
    return records


def as_record(identifier: str, conversation: Conversation) -> dict[str, Any]:
    """One entry: OpenAI messages up to the last turn, tools, whether to think, and the exact answer."""
    messages = openai_messages(conversation)
    answer = messages.pop()
    for message in messages:
        message.pop("reasoning_content", None)
    expect: dict[str, Any] = {"content": answer["content"]}
    if conversation.turns[-1].calls:
        expect["tool_calls"] = [
            {"name": call.name, "arguments": call.arguments} for call in conversation.turns[-1].calls
        ]
    if conversation.turns[-1].think is not None:
        expect["reasoning"] = conversation.turns[-1].think
    record = {"id": identifier, "task": conversation.task, "messages": messages, "expect": expect}
    if conversation.tools:
        record["tools"] = list(conversation.tools)
    return record | {"enable_thinking": conversation.turns[-1].think is not None}


def without_old_thinking(conversation: Conversation) -> Conversation:
    """The conversation as a client sends it: thinking of earlier turns dropped."""
    kept = tuple(replace(turn, think=None) for turn in conversation.turns[:-1])
    return replace(conversation, turns=(*kept, conversation.turns[-1]))


def choose(model: ReferenceModel, seed: int, rounds: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Known answers, and how many of all candidates were right, as "right of asked" by task and thinking mode.

    The records are of conversations answered rightly with a margin, at most `PER_TASK` a task.
    """
    encoder = FastEncoder(tokenizer.load())
    taken: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    records = []
    for conversation in map(without_old_thinking, candidates(seed, rounds)):
        mode = "think" if conversation.turns[-1].think is not None else "direct"
        kind = f"{conversation.task}-{mode}"
        judged = judge(model, encoder, conversation)
        asked[kind] += 1
        right[kind] += judged.right
        if judged.right and judged.margin >= MARGIN and taken[kind] < PER_TASK // 2:
            taken[kind] += 1
            records.append(as_record(f"{kind}-{taken[kind]}", conversation))
    records += across_boundaries(model, encoder, seed)
    return records, {kind: f"{right[kind]} of {asked[kind]}" for kind in sorted(asked)}


def conversation_of(record: dict[str, Any]) -> Conversation:
    """The conversation of a record, for judging it again."""
    from training.chat import Call, Turn

    turns = []
    for message in record["messages"]:
        calls = tuple(
            Call(call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        )
        turns.append(Turn(role=message["role"], content=message["content"], calls=calls))
    expect = record["expect"]
    calls = tuple(Call(call["name"], call["arguments"]) for call in expect.get("tool_calls", ()))
    turns.append(Turn(role="assistant", content=expect["content"], think=expect.get("reasoning"), calls=calls))
    return Conversation(task=record["task"], turns=tuple(turns), tools=tuple(record.get("tools", ())))


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """Write the records, one a line, so that a change shows as one line."""
    lines = ",\n".join(json.dumps(record) for record in records)
    path.write_text(f"[\n{lines}\n]\n")
