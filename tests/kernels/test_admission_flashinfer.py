"""The FlashInfer candidates against a stand-in with the signatures of flashinfer 0.7.2, which computes the definition.

It shows that scales, layouts and strides are handed over as the library documents them; the library needs a card.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import nvfp4
from qwen_nvfp4_serve.kernels.admission import Shape, Verdict, candidates, trial
from qwen_nvfp4_serve.kernels.admission.candidates import FlashInferFp4

CUTLASS, B12X = candidates.default_candidates()[-2:]


def fp4_quantize(
    x: torch.Tensor, global_scale: torch.Tensor, *, is_sf_swizzled_layout: bool, nvfp4_4over6: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    assert is_sf_swizzled_layout
    assert nvfp4_4over6 is None
    assert global_scale.shape == (1,)
    found = nvfp4.quantize_nvfp4(x, float(1 / global_scale))
    return found.packed, nvfp4.swizzle_scales(found.block_scale).view(torch.uint8).flatten()


def mm_fp4(  # noqa: PLR0917
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    out: torch.Tensor,
    backend: str,
) -> torch.Tensor:
    assert backend in ("cutlass", "b12x")
    assert (a.dtype, b.dtype, out.dtype) == (torch.uint8, torch.uint8, out_dtype)
    assert b.stride(0) == 1  # column-major: the weight as it lies
    m, n, groups = a.shape[0], b.shape[1], a.shape[1] // 8
    left = nvfp4.unswizzle_scales(a_descale.view(torch.float8_e4m3fn), m, groups)
    right = nvfp4.unswizzle_scales(b_descale.T.contiguous().view(torch.float8_e4m3fn), n, groups)
    x = nvfp4.dequantize_nvfp4(a, left, 1.0, dtype=torch.float64)
    w = nvfp4.dequantize_nvfp4(b.T.contiguous(), right, 1.0, dtype=torch.float64)
    return out.copy_((x @ w.T) * alpha.double())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(fp4_quantize=fp4_quantize, mm_fp4=mm_fp4)
    monkeypatch.setitem(sys.modules, "flashinfer", found)
    monkeypatch.setattr(candidates, "_flashinfer", lambda: found)
    monkeypatch.setattr(FlashInferFp4, "unavailable", lambda _: None)
    return found


def judge(candidate: Any) -> Any:
    return trial.try_one(
        candidate,
        Shape(128, 256),
        device=torch.device("cpu"),
        capability=(12, 0),
        timer=lambda _: 1.0,
        say=lambda _: None,
    )


@pytest.mark.parametrize("candidate", [CUTLASS, B12X], ids=lambda c: c.name)
def test_candidate_hands_over_what_the_library_documents(library: SimpleNamespace, candidate: Any) -> None:
    found = judge(candidate)
    assert (found.verdict, found.reason) == (Verdict.ADMITTED, "")


def test_candidate_whose_library_forgets_alpha_is_wrong(library: SimpleNamespace) -> None:
    def without_alpha(*arguments: Any, **more: Any) -> torch.Tensor:
        return mm_fp4(*arguments[:4], torch.ones(1), *arguments[5:], **more)

    library.mm_fp4 = without_alpha
    assert judge(CUTLASS).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("candidate", "capability", "taken"),
    [(CUTLASS, (10, 0), True), (CUTLASS, (9, 0), False), (B12X, (12, 1), True), (B12X, (10, 0), False)],
)
def test_candidate_takes_only_the_cards_that_have_the_backend(
    candidate: Any, capability: tuple[int, int], taken: bool
) -> None:
    assert (candidate.supports(capability, 5120, 17408) is None) is taken


@pytest.mark.parametrize(("n", "k"), [(5120, 17400), (100, 256)])
def test_candidate_refuses_sizes_that_would_need_a_padded_copy(n: int, k: int) -> None:
    assert "not a multiple" in (CUTLASS.supports((12, 0), n, k) or "")


def test_candidate_on_a_weight_only_layer_is_refused(library: SimpleNamespace) -> None:
    case = trial.make_case(Shape(128, 256), torch.device("cpu"), one_scale=True)
    with pytest.raises(UsageError, match="weight-only"):
        CUTLASS.run(case.x[:1], case.weight, torch.empty(1, 128, dtype=torch.bfloat16))
