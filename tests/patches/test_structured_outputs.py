"""Structured outputs: where thinking ends, which backend compiles, and what is too large."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.contracts.parser_driver import Driver

from qwen_nvfp4_patches import structured_backends, structured_limits, structured_reasoning, structured_separator
from qwen_nvfp4_patches.seams import stock_of
from qwen_nvfp4_serve import shims

JSON_TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "<tool_call>"}})


@pytest.fixture(scope="module")
def driver() -> Driver:
    shims.install()
    pytest.importorskip("vllm", reason="vLLM is not installed")
    return Driver(patched=True)


def stock(owner: Any, name: str) -> Any:
    return stock_of(getattr(owner, name))


def bounds(driver: Driver, prompt: str, output: str, *, tag: str | None, patched: bool) -> tuple[int, int]:
    """Where stock vLLM begins to constrain `output`, in tokens, with our reasoner or its own."""
    from vllm.parser.engine.registered_adapters import Qwen3ParserReasoningAdapter
    from vllm.v1.structured_output import StructuredOutputManager

    getting = stock(StructuredOutputManager, "_get_reasoner")
    manager = SimpleNamespace(
        reasoner_cls=Qwen3ParserReasoningAdapter, tokenizer=driver.tokenizer, enable_in_reasoning=False
    )
    get = structured_reasoning.getting_reasoner(getting) if patched else getting
    manager._get_reasoner = lambda request: get(manager, request)
    asked = SimpleNamespace(
        reasoning_ended=None, reasoning_parser_kwargs=None, reasoner=None, params=SimpleNamespace(structural_tag=tag)
    )
    ids = driver.encode(output)
    request = SimpleNamespace(
        structured_output_request=asked, prompt_token_ids=driver.encode(prompt), all_token_ids=list(ids)
    )
    start = StructuredOutputManager._get_constraint_bounds(manager, request, ids, spec_tokens_committed=True)
    return start.grammar_start, len(ids)


THINKING = "<|im_start|>assistant\n<think>\n"
CASES = {
    "thinking": (THINKING, "plan</think>", None),
    "a call is mentioned": (THINKING, "<tool_call></think>", None),
    "a call is allowed": (THINKING, "<tool_call>", JSON_TAG),
    "thinking closed by the prompt": (f"{THINKING}\n</think>\n\n", "{", None),
    "no thinking in the prompt": ("hello", "{", None),
}
WANTED = {"thinking": 1.0, "a call is mentioned": 1.0, "a call is allowed": 0.0}


@pytest.mark.parametrize("name", CASES)
def test_constraint_begins_where_thinking_ends(driver: Driver, name: str) -> None:
    prompt, output, tag = CASES[name]
    start, length = bounds(driver, prompt, output, tag=tag, patched=True)
    assert start == WANTED.get(name, 0.0) * length


@pytest.mark.parametrize("name", ["a call is mentioned", "no thinking in the prompt"])
def test_stock_vllm_still_misjudges_where_thinking_ends(driver: Driver, name: str) -> None:
    """When this fails, vLLM has changed: see whether the patch can go."""
    prompt, output, tag = CASES[name]
    assert bounds(driver, prompt, output, tag=tag, patched=False) != bounds(
        driver, prompt, output, tag=tag, patched=True
    )


@pytest.mark.parametrize("shown", [True, False])
def test_thinking_that_is_not_shown_is_not_constrained(driver: Driver, shown: bool) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    resolve = structured_reasoning.resolving(stock(ChatCompletionRequest, "resolve_reasoning_ended"))
    request = driver.request(include_reasoning=shown)
    parser, prompt = driver._parser(request, True)
    assert resolve(request, parser, prompt) is False
    assert resolve(request, parser, driver.encode(f"{THINKING}\n</think>\n\n")) is True


class Manager:
    """What the patch takes for granted of vLLM's StructuredOutputManager, with backends that are their names."""

    def __init__(self) -> None:
        self.backend: str | None = None
        self.backend_name: str | None = None
        self._use_async_grammar_compilation = True
        self.waiting: list[tuple[Any, bool]] = []

    def grammar_init(self, request: Any) -> None:
        name = request.sampling_params.structured_outputs._backend
        assert self.backend_name in (None, name)  # what vLLM 0.33 insists on
        if self.backend is None:
            self.backend = self.backend_name = name
        self.waiting.append((request, self._use_async_grammar_compilation))

    def _create_grammar(self, request: Any) -> tuple[str | None, Any]:
        return self.backend, request


def test_each_request_is_compiled_by_its_own_backend_whenever_its_thread_runs() -> None:
    init = structured_backends.initialising(Manager.grammar_init)
    create = structured_backends.creating(Manager._create_grammar)
    manager = Manager()
    names = ["xgrammar", "guidance", "xgrammar", "guidance"]
    requests = [
        SimpleNamespace(
            structured_output_request=object(),
            sampling_params=SimpleNamespace(structured_outputs=SimpleNamespace(_backend=name)),
        )
        for name in names
    ]
    for request in requests:
        init(manager, request)
    assert [in_thread for _, in_thread in manager.waiting] == [False, False, True, True]
    assert [create(manager, request) for request, _ in manager.waiting] == list(zip(names, requests, strict=True))
    assert manager.backend == "xgrammar"
    init(manager, SimpleNamespace(structured_output_request=None))


def asked(**fields: Any) -> Any:
    empty = dict.fromkeys(("json", "regex", "choice", "grammar", "structural_tag"))
    return SimpleNamespace(**empty | fields)


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(count)}}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"json": properties(1_998)}, None),
        ({"json": properties(1_999)}, "objects"),
        ({"json": json.dumps(properties(1_999))}, "objects"),
        ({"json": {"description": "x" * 262_144}}, "characters"),
        ({"json": {"enum": list(range(10_000))}}, None),
        ({"json": '{"broken'}, None),
        ({"choice": ["x"] * 2_000}, None),
        ({"choice": ["x"] * 2_001}, "choices"),
        ({"choice": ["x" * 65_537]}, "characters"),
        ({"regex": "a" * 32_769}, "characters"),
        ({"grammar": "a" * 65_537}, "characters"),
        ({"structural_tag": json.dumps([{}] * 2_001)}, "objects"),
    ],
)
def test_structured_output_that_is_too_large_is_refused_with_the_bound(fields: Any, word: str | None) -> None:
    fault = structured_limits.fault_of(asked(**fields))
    assert fault is None if word is None else fault is not None and word in fault


def test_schema_that_only_outlines_could_compile_is_refused(driver: Driver) -> None:
    from vllm.exceptions import VLLMValidationError

    def choosing(backend: str) -> Any:
        def _validate(self: Any) -> None:
            self.structured_outputs._backend, self.structured_outputs._backend_was_auto = backend, True

        return structured_limits.limiting(_validate)

    params = SimpleNamespace(structured_outputs=asked(json=properties(1)))
    choosing("guidance")(params)
    with pytest.raises(VLLMValidationError, match="patternProperties"):
        choosing("outlines")(params)


@pytest.mark.parametrize(
    ("schema", "keys"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}, "minContains": 2}, "contains, minContains"),
    ],
)
def test_keywords_that_no_backend_knows_are_named_in_a_sentence(driver: Driver, schema: Any, keys: str) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar

    def _validate(self: Any) -> None:
        validate_guidance_grammar(self, tokenizer=None)

    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    wanted = f"^The JSON schema uses {keys}, which neither xgrammar nor llguidance can enforce. Leave it out"
    with pytest.raises(VLLMValidationError, match=wanted):
        structured_limits.limiting(_validate)(params)


def test_what_the_patches_take_for_granted_is_there(driver: Driver) -> None:
    import inspect

    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.structured_output import StructuredOutputManager

    for owner, name, parameters in (
        (ChatCompletionRequest, "resolve_reasoning_ended", structured_reasoning.RESOLVE),
        (StructuredOutputManager, "_get_reasoner", structured_reasoning.GET_REASONER),
        (StructuredOutputManager, "grammar_init", structured_backends.REQUEST),
        (StructuredOutputManager, "_create_grammar", structured_backends.REQUEST),
        (StructuredOutputManager, "_create_grammar", structured_separator.PARAMETERS),
        (SamplingParams, "_validate_structured_outputs", structured_limits.PARAMETERS),
    ):
        assert tuple(inspect.signature(stock(owner, name)).parameters) == parameters
    for patch in (structured_reasoning, structured_backends, structured_separator, structured_limits):
        assert patch._needed().needed
