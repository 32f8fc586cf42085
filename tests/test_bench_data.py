"""Samples, statistics and the result file: exact on made data, and nothing passes that is not a whole result."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.bench_results import made_result
from tokenizers import Tokenizer

import qwen_nvfp4_serve
from qwen_nvfp4_serve.bench.machine import CARD_FIELDS, describe_machine, parse_cards
from qwen_nvfp4_serve.bench.prompts import LEAD, WORDS, Prompt, Vocabulary, learn_vocabulary
from qwen_nvfp4_serve.bench.published import figure, published
from qwen_nvfp4_serve.bench.result import dump_result, read_result, result_schema, write_result
from qwen_nvfp4_serve.bench.samples import Arrival, Event, Exchange, arrivals, parse, read_exchange
from qwen_nvfp4_serve.bench.server import cache_labels, kernel_lines, ready_seconds, version_of
from qwen_nvfp4_serve.bench.statistics import peak, spread
from qwen_nvfp4_serve.bench.workload import Workload, cases, check_workload
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.gpus import match_gpu
from qwen_nvfp4_serve.synthetic.tokenizer import tokenizer_json

_REFERENCE = Path(qwen_nvfp4_serve.__file__).parent / "data" / "reference" / "tokenizer.json"
_TOKENIZERS = {
    "reference": lambda: Tokenizer.from_file(str(_REFERENCE)),
    "generated": lambda: Tokenizer.from_str(json.dumps(tokenizer_json(1024))),
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3}

KEYS = ("choices", "usage", "error", "text", "delta", "content", "prompt_tokens", "completion_tokens", "cached_tokens")


def exchange(*events: tuple[float, object]) -> Exchange:
    lines = [
        (at_s, event if isinstance(event, bytes) else f"data: {json.dumps(event)}".encode()) for at_s, event in events
    ]
    return Exchange(start_s=1.0, end_s=9.0, lines=tuple(lines))


def text(words: str = "x") -> dict[str, Any]:
    return {"choices": [{"text": words}]}


def test_read_exchange_counts_usage_not_chunks() -> None:
    seen = exchange((2.0, text()), (3.0, text()), (3.0, {"choices": [], "usage": USAGE}), (3.1, b"data: [DONE]"))
    sample, found = read_exchange(seen, 1.0)
    assert (sample.failure, sample.completion_tokens, sample.chunks) == (None, 3, 2)
    assert (sample.first_token_s, sample.last_token_s, sample.first_tokens) == (1.0, 2.0, 1.5)
    assert sum(one.tokens for one in found) == 3


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # drawing is slow where other work takes the machine
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=5) | st.binary(max_size=20), max_size=6))
def test_read_exchange_never_raises_whatever_a_server_sends(events: list[Any]) -> None:
    lines = ((2.0, one if isinstance(one, dict) else b"data: " + one) for one in events)
    sample, found = read_exchange(exchange(*lines), 1.0)
    assert (sample.failure is None) or not found
    assert all(one.tokens >= 0 for one in found)


def test_parse_comments_blank_lines_and_carriage_returns_are_no_fault() -> None:
    seen = exchange(
        (2.0, b": ping"), (2.0, b"\r"), (2.1, b'data:{"choices":[{"text":"a"}]}\r'), (3.0, b"data:[DONE]\r")
    )
    stream = parse(seen)
    assert stream.failure is None
    assert [event.has_text for event in stream.events] == [True]


def test_arrivals_running_count_keeps_bundles_and_ignores_text() -> None:
    events = [Event(1.0, 0, False), Event(2.0, 4, True), Event(3.0, 4, True), Event(4.0, 5, False)]
    assert arrivals(events, 5) == (Arrival(2.0, 4), Arrival(4.0, 1))


def test_arrivals_one_event_without_a_count_makes_shares_equal() -> None:
    events = [Event(1.0, 2, True), Event(2.0, None, True)]
    assert arrivals(events, 6) == (Arrival(1.0, 3.0), Arrival(2.0, 3.0))


@pytest.mark.parametrize("counts", [(3, 2, 1), (2, 1, 3), (2, 4, 9)], ids=["falling", "in between", "beyond usage"])
def test_arrivals_running_count_that_cannot_be_is_not_believed(counts: tuple[int, ...]) -> None:
    events = [Event(float(at), so_far, True) for at, so_far in enumerate(counts)]
    assert arrivals(events, 3) == (Arrival(0.0, 1.0), Arrival(1.0, 1.0), Arrival(2.0, 1.0))


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 9)), min_size=2))
def test_peak_is_never_below_the_mean_rate_of_a_second_or_more(found: list[tuple[float, int]]) -> None:
    ordered = [Arrival(at_s, tokens) for at_s, tokens in sorted(found)]
    lasted_s = ordered[-1].at_s - ordered[0].at_s
    seen = peak(ordered)
    if lasted_s == 0:
        assert seen is None
    elif lasted_s >= 1:
        assert seen is not None
        assert seen >= (sum(one.tokens for one in ordered) / (lasted_s + 1)) * 0.999


def test_peak_of_a_short_answer_is_its_rate_after_the_first_arrival() -> None:
    assert peak([Arrival(0.0, 4), Arrival(0.25, 4), Arrival(0.5, 4)]) == pytest.approx(16.0)


def test_peak_of_many_short_answers_together_has_no_limit() -> None:
    together = [Arrival(at / 100, 200.0) for at in range(11)]  # 200 streams of 100 tokens/s
    assert peak(together) == pytest.approx(20_000)


def test_spread_of_nothing_is_none_and_of_one_has_no_width() -> None:
    assert spread([]) is None
    one = spread([3.0])
    assert one is not None
    assert (one.median, one.std, one.low, one.high) == (3.0, 0.0, 3.0, 3.0)


def test_measure_rates_are_those_of_the_samples() -> None:
    result = made_result(100.0)
    alone, four = result.cases[0].metrics, result.cases[1].metrics
    assert alone.decode_total is not None
    assert four.decode_total is not None
    assert alone.prefill_total is not None
    assert alone.ttft_ms is not None
    assert alone.decode_total.median == pytest.approx(100.0)
    assert four.decode_total.median == pytest.approx(400.0)
    assert alone.prefill_total.median == pytest.approx(2048 / 0.1)
    assert alone.ttft_ms.median == pytest.approx(100.0)


@pytest.mark.parametrize("depth", [0, 500])
@pytest.mark.parametrize("tokens", [16, 100, 1001])
@pytest.mark.parametrize("dearest", [1, 5])
def test_vocabulary_prompt_costs_what_was_asked(depth: int, tokens: int, dearest: int) -> None:
    costs = {word: 1 + index % dearest for index, word in enumerate(WORDS)}
    vocabulary = Vocabulary(costs=costs, overhead=4, overhead_with_context=7)
    prompt = vocabulary.prompt(depth, tokens, seed="s", fresh="f")
    words = [word for word in prompt.text().split() if word != LEAD]
    assert sum(costs[word] for word in words) == depth + tokens - (7 if depth else 4)


@pytest.mark.parametrize("costs", [(2, 5, 8), (5, 6, 7), (4, 9)])
def test_vocabulary_without_a_word_of_one_token_still_costs_what_was_asked(costs: tuple[int, ...]) -> None:
    priced = {word: costs[index % len(costs)] for index, word in enumerate(WORDS)}
    vocabulary = Vocabulary(costs=priced, overhead=4, overhead_with_context=7)
    for seed in range(100):
        prompt = vocabulary.prompt(0, 128, seed=f"{seed}", fresh=f"{seed} fresh")
        assert sum(priced[word] for word in prompt.text().split() if word != LEAD) == 124


def test_vocabulary_of_even_costs_comes_nearest_below() -> None:
    vocabulary = Vocabulary(costs={"a": 4, "b": 6}, overhead=0, overhead_with_context=0)
    assert sum({"a": 4, "b": 6}[word] for word in vocabulary.words(Random(1), 101).split()) == 100


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", ["reference", "generated"])
def test_vocabulary_of_a_real_tokenizer_gives_prompts_of_the_asked_length(kind: str, chat: bool) -> None:
    tokenizer = _TOKENIZERS[kind]()

    def tokens(prompt: Prompt) -> int:
        if not chat:
            return len(tokenizer.encode(prompt.text()).ids)
        turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in prompt.messages())
        return len(tokenizer.encode(turns + "<|im_start|>assistant\n").ids)

    async def count(prompt: Prompt) -> int:
        return tokens(prompt)

    vocabulary = asyncio.run(learn_vocabulary(count))
    for seed in range(60):
        for depth, length in ((0, 128), (256, 128), (101, 67)):
            assert tokens(vocabulary.prompt(depth, length, seed=f"{seed}", fresh=f"{seed} fresh")) == depth + length


def test_words_are_different_and_enough() -> None:
    assert len(set(WORDS)) == len(WORDS) == 128


async def _count_badly(prompt: Prompt) -> int:
    return 7


def test_learn_vocabulary_of_a_server_that_always_says_seven_is_refused() -> None:
    with pytest.raises(QwenNvfp4Error, match="prompt lengths cannot be calibrated"):
        asyncio.run(learn_vocabulary(_count_badly))


def test_vocabulary_equal_seeds_give_equal_words_after_the_fresh_ones() -> None:
    vocabulary = Vocabulary(costs=dict.fromkeys(WORDS, 1), overhead=0, overhead_with_context=0)
    one, other = (vocabulary.prompt(0, 64, seed="s", fresh=fresh).text().split() for fresh in ("a", "b"))
    assert one[1:9] != other[1:9]
    assert one[9:] == other[9:]
    assert vocabulary.words(Random(1), 5) == vocabulary.words(Random(1), 5)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"depths": (0, 0)}, "--depth"),
        ({"prompts": (8,)}, "--prompt"),
        ({"generates": (1,)}, "--generate"),
        ({"concurrencies": (0,)}, "--concurrency"),
        ({"runs": 0}, "--runs"),
        ({"ttft_limit_ms": 0.0}, "--ttft-ms"),
        ({"ttft_limit_ms": float("nan")}, "--ttft-ms"),
        ({"tpot_limit_ms": float("inf")}, "--tpot-ms"),
        ({"timeout_s": float("inf")}, "--timeout-s"),  # JSON has no word for it: the result could not be read again
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": -0.5}, "--temperature"),
        ({"depths": (900,), "prompts": (100,), "generates": (32,)}, "1032 tokens"),
        ({"cached_context": True, "prompts": (100,)}, "--cached-context"),
    ],
)
def test_check_workload_wrong_value_names_the_option(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        check_workload(Workload(**({"prompts": (100,)} | changes)), 1000)


def test_cases_are_every_combination_in_llama_benchy_order() -> None:
    workload = Workload(depths=(0, 1), prompts=(16,), generates=(2, 3), concurrencies=(1, 2))
    assert [case.whole for case in cases(workload)][:5] == [
        "pp16 tg2 (c1)",
        "pp16 tg2 (c2)",
        "pp16 tg3 (c1)",
        "pp16 tg3 (c2)",
        "pp16 tg2 @ d1 (c1)",
    ]


def test_result_written_and_read_is_the_same_and_valid_by_its_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    result = made_result()
    write_result(tmp_path / "new" / "result.json", result)
    assert read_result(tmp_path / "new") == result
    jsonschema.validate(json.loads(dump_result(result)), result_schema())


def test_write_result_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_result(tmp_path / "result.json", made_result())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "unknown field", "other format", "word for number"])
def test_read_result_damaged_says_where(tmp_path: Path, damage: str) -> None:
    value = json.loads(dump_result(made_result()))
    if damage == "unknown field":
        value["cases"][0]["speed"] = 1
    elif damage == "other format":
        value["format"] = "qwen-nvfp4-bench/9"
    elif damage == "word for number":
        value["seconds"] = "12"
    content = json.dumps(value)
    file = tmp_path / "result.json"
    file.write_text(content[:-20] if damage == "cut" else content)
    with pytest.raises(UsageError, match=r"result .*result\.json: seen "):
        read_result(file)


def test_read_result_missing_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_result(tmp_path / "none.json")


def test_parse_cards_unknown_values_are_none_and_short_lines_skipped() -> None:
    values = dict.fromkeys(CARD_FIELDS, "[N/A]") | {"name": "NVIDIA H200", "clocks.sm": "1980", "power.limit": "700.00"}
    (card,) = parse_cards(", ".join(values.values()) + "\nno devices\n")
    assert (card.name, card.sm_clock_mhz, card.power_limit_w) == ("NVIDIA H200", 1980.0, 700.0)
    assert (card.driver, card.memory_mib) == (None, None)


def test_describe_machine_remote_server_says_nothing_of_cards_here() -> None:
    cards = parse_cards(", ".join(["NVIDIA H200"] * len(CARD_FIELDS)))
    machine = describe_machine(remote=True, card_name=None, before=cards, after=cards)
    assert (machine.card_name, machine.cards_before, machine.packages) == (None, None, {})
    assert describe_machine(remote=False, card_name=None, before=cards, after=cards).card_name == "NVIDIA H200"
    assert describe_machine(remote=False, card_name=None, before=None, after=None).cards_before is None


def test_published_seeds_are_there_and_cards_are_in_the_table() -> None:
    assert figure("seed_35b.decode_4k") == 196
    assert figure("seed_35b.decode_256k") == 156
    assert figure("seed_27b_cutlass.prefill") == 13_700
    for entry in published():
        assert match_gpu(entry.card) is not None, entry.card
        assert len({one.name for one in entry.figures}) == len(entry.figures)


@pytest.mark.parametrize("name", ["seed_35b", "seed_35b.decode_8k", "nobody.decode"])
def test_published_unknown_figure_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        figure(name)


def test_kernel_lines_keep_each_choice_once_without_its_prefix() -> None:
    log = (
        "(EngineCore pid=7) INFO 11-30 10:00:00 [cpu.py:104] Using MarlinKernel for NVFP4 GEMM\n"
        "(Worker pid=9) INFO 11-30 10:00:01 [cpu.py:104] Using MarlinKernel for NVFP4 GEMM\n"
        "INFO 11-30 10:00:02 [api_server.py:1] Started server process\n"
        "(EngineCore pid=7) INFO 11-30 10:00:00 [registry.py:92] Patch qwen3-output: not needed (no HTTP here)\n"
    )
    assert kernel_lines(log) == ("Using MarlinKernel for NVFP4 GEMM",)


def test_ready_seconds_are_those_of_the_stage_line() -> None:
    assert ready_seconds("[qwen-nvfp4   0.1s] load: x\n[qwen-nvfp4  61.4s] READY: http://…\n") == 61.4
    assert ready_seconds("INFO READY\n") is None


@pytest.mark.parametrize("said", [b"[" * 100_000, b"\xff", b"null", b'{"version": 9}', b""])
def test_version_that_is_none_is_unknown(said: bytes) -> None:
    assert version_of(said.decode(errors="replace")) is None


@pytest.mark.parametrize("count", [True, -1, 10**400, "7", 1.5, None])
def test_usage_that_counts_nothing_is_no_usage(count: object) -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": count}
    sample, found = read_exchange(exchange((2.0, text() | {"usage": usage}), (2.1, b"data: [DONE]")), 1.0)
    assert sample.failure is not None
    assert (sample.failure.kind, found) == ("no usage", ())


def test_cache_labels_absent_metric_is_none() -> None:
    assert cache_labels("vllm:other 1\n") is None
    assert cache_labels('vllm:cache_config_info{a="1",b="x\\"y"} 1.0\n') == {"a": "1", "b": 'x\\"y'}
