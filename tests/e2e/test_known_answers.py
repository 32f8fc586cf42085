"""Every known answer through a real server, exact: one by one and many at once, streamed and whole, with prompts in
several chunks, with prefixes from the cache, with drafts of the MTP layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.e2e.serving import Served, serve

from qwen_nvfp4_serve.reference import EMBEDDED, FOLDER, Given, KnownAnswer, read_answers
from qwen_nvfp4_serve.smoke import Server, ask, ask_streamed, connect

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
ANSWERS = read_answers(EMBEDDED)
AT_ONCE = 16
CHUNK = 512
LONG_CHARS = 3000  # of a question that takes several chunks
BLOCK = 384  # tokens of the cache's block that the plan gives the embedded model with an FP8 cache
LEAST_ACCEPTANCE = 0.6
Asker = Callable[[Server, KnownAnswer], Given]


def wrong(server: Server, answers: Iterable[KnownAnswer], asker: Asker, at_once: int) -> list[str]:
    """What differs, a sentence for each answer that is not exact."""

    def differs(answer: KnownAnswer) -> str | None:
        seen = asker(server, answer)
        return None if seen == answer.expected else f"{answer.id}: {seen.shown()}, expected {answer.expected.shown()}"

    with ThreadPoolExecutor(at_once) as pool:
        return [text for text in pool.map(differs, answers) if text]


def counter(served: Served, name: str) -> float:
    """The sum of a metric over its labels."""
    text = httpx.get(served.url.removesuffix("/v1") + "/metrics", timeout=30).text
    rows = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    assert rows, f"no metric {name}"
    return sum(map(float, rows))


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("chunked"), MAX_NUM_BATCHED_TOKENS=str(CHUNK)) as served:
        yield served


def test_known_answers_one_by_one_streamed_in_chunks_are_exact(chunked: Served) -> None:
    assert wrong(connect(chunked.url, None), ANSWERS, ask_streamed, 1) == []
    assert f"Chunked prefill is enabled with max_num_batched_tokens={CHUNK}" in chunked.log
    assert sum(answer.chars > LONG_CHARS for answer in ANSWERS) >= 4


def test_known_answers_sixteen_at_once_are_exact(chunked: Served) -> None:
    assert wrong(connect(chunked.url, None), ANSWERS, ask, AT_ONCE) == []


def test_known_answers_from_the_prefix_cache_are_exact(chunked: Served) -> None:
    server = connect(chunked.url, None)
    long = [answer for answer in ANSWERS if answer.chars > LONG_CHARS]
    assert wrong(server, long, ask, 1) == []
    before = counter(chunked, "prefix_cache_hits_total")
    assert wrong(server, long, ask, 1) == []
    assert wrong(server, long, ask_streamed, AT_ONCE) == []
    assert counter(chunked, "prefix_cache_hits_total") - before >= 2 * BLOCK * len(long)


@pytest.mark.parametrize("name", ["moe", pytest.param("dense", marks=pytest.mark.slow)])
def test_known_answers_with_drafts_are_exact_and_drafts_are_taken(tmp_path: Path, name: str) -> None:
    model = {} if name == "moe" else {"MODEL": str(FOLDER / name)}
    with serve(tmp_path, SPECULATIVE_TOKENS="2", **model) as served:
        server = connect(served.url, None)
        assert wrong(server, read_answers(FOLDER / name), ask, AT_ONCE) == []
        accepted = counter(served, "spec_decode_num_accepted_tokens_total")
        drafted = counter(served, "spec_decode_num_draft_tokens_total")
    assert drafted > 100
    assert accepted / drafted >= LEAST_ACCEPTANCE
    print(f"{accepted:g} of {drafted:g} drafts accepted")


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        {"MODEL": str(FOLDER / "dense"), "MAX_NUM_BATCHED_TOKENS": str(CHUNK)},
        {"KV_CACHE_DTYPE": "bfloat16"},
        {"PREFIX_CACHING": "0", "MAX_NUM_BATCHED_TOKENS": str(CHUNK)},
        {"ENFORCE_EAGER": "0"},
        {"CPU_ACTIVATIONS": "w4a4"},
    ],
    ids=["dense", "BF16 cache", "no prefix caching", "compiled", "W4A4"],
)
def test_known_answers_under_other_settings_are_exact(tmp_path: Path, env: dict[str, str]) -> None:
    answers = read_answers(Path(env.get("MODEL", EMBEDDED)))
    with serve(tmp_path, **env) as served:
        assert wrong(connect(served.url, None), answers, ask, AT_ONCE) == []
