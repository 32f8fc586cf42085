"""Requests that nest too deeply."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from qwen_nvfp4_patches import deep_requests
from qwen_nvfp4_serve import shims


@pytest.fixture(scope="module")
def stock() -> Any:
    """vLLM's own create_error_response."""
    shims.install()
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.entrypoints.serve.exception_handling import error_response

    function = error_response.create_error_response
    return getattr(function, "_qwen_nvfp4_original", function)


def too_deep() -> RecursionError:
    try:
        json.loads("[" * 100_000)
    except RecursionError as error:
        return error
    raise AssertionError


def test_stock_vllm_blames_itself(stock: Any) -> None:
    """When this fails, vLLM answers 400 itself: drop the patch."""
    assert stock(too_deep()).error.code == 500


def test_patched_vllm_answers_400_with_a_sentence(stock: Any) -> None:
    error = deep_requests.blaming_the_client(stock)(too_deep()).error
    assert (error.code, error.message) == (400, deep_requests.SENTENCE)


@pytest.mark.parametrize(("fault", "code"), [(ValueError("x"), 400), (RuntimeError("x"), 500), ("text", 400)])
def test_other_faults_are_reported_as_before(stock: Any, fault: Any, code: int) -> None:
    assert deep_requests.blaming_the_client(stock)(fault) == stock(fault)
    assert stock(fault).error.code == code


def test_what_the_patch_takes_for_granted_is_there(stock: Any) -> None:
    assert tuple(inspect.signature(stock).parameters) == deep_requests.PARAMETERS
