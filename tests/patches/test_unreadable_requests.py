"""Requests that cannot be read."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from qwen_nvfp4_patches import unreadable_requests
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
    error = unreadable_requests.blaming_the_client(stock)(too_deep()).error
    assert (error.code, error.message) == (400, unreadable_requests.TOO_DEEP)


@pytest.mark.parametrize(("fault", "code"), [(ValueError("x"), 400), (RuntimeError("x"), 500), ("text", 400)])
def test_other_faults_are_reported_as_before(stock: Any, fault: Any, code: int) -> None:
    assert unreadable_requests.blaming_the_client(stock)(fault) == stock(fault)
    assert stock(fault).error.code == code


def fault_in_reading(field: object) -> Exception:
    """What FastAPI raises for a body whose validator fails on `field`."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from pydantic import BaseModel, model_validator

    class Body(BaseModel):
        field: object

        @model_validator(mode="before")
        @classmethod
        def check(cls, data: Any) -> Any:
            data["field"].get("x")
            return data

    Body.model_rebuild(_types_namespace={"Any": Any})
    app = FastAPI()

    def endpoint(body: Any) -> None:
        raise KeyError("in the endpoint")

    endpoint.__annotations__["body"] = Body
    app.post("/")(endpoint)
    try:
        TestClient(app).post("/", json={"field": field})
    except Exception as error:
        return error
    raise AssertionError


def test_value_of_another_type_is_answered_400_with_a_sentence(stock: Any) -> None:
    error = unreadable_requests.blaming_the_client(stock)(fault_in_reading("text")).error
    assert error.code == 400
    assert "another type" in error.message


def test_fault_of_the_endpoint_is_no_fault_of_the_client(stock: Any) -> None:
    assert unreadable_requests.blaming_the_client(stock)(fault_in_reading({})).error.code == 500


def test_each_kind_has_a_handler_of_its_own(stock: Any) -> None:
    from fastapi import FastAPI
    from vllm.entrypoints.serve.exception_handling import register

    init = register.init_exception_handler
    app = FastAPI()
    unreadable_requests.registering(getattr(init, "_qwen_nvfp4_original", init))(app)
    assert set(unreadable_requests.KINDS) <= set(app.exception_handlers)


def test_what_the_patch_takes_for_granted_is_there(stock: Any) -> None:
    assert tuple(inspect.signature(stock).parameters) == unreadable_requests.PARAMETERS
