"""Seeded requests whose prompt is read in chunks, on CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qwen_nvfp4_patches import cpu_seeded_prefill

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def runner(*, unfinished: list[bool], outputs: list[list[int]]) -> Any:
    """A model runner in the middle of a step: each request has drawn a number from its generator."""
    generators = {}
    for index in range(len(unfinished)):
        generators[index] = torch.Generator().manual_seed(index)
        torch.rand(1, generator=generators[index])
    names = [f"r{index}" for index in range(len(unfinished))]
    return SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=len(unfinished), req_ids=names, generators=generators),
        discard_request_mask=SimpleNamespace(np=numpy.array([*unfinished, True])),
        requests={name: SimpleNamespace(output_token_ids=ids) for name, ids in zip(names, outputs, strict=True)},
    )


def sync(self: Any, *values: Any) -> str:
    """What vLLM does there."""
    for index in self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]:
        generator = self.input_batch.generators.get(int(index))
        if generator is not None:
            generator.set_offset(generator.get_offset() - 4)
    return "done"


def next_of(generator: Any) -> float:
    return float(torch.rand(1, generator=generator))


def after_seed(seed: int, drawn: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    return [next_of(generator) for _ in range(drawn + 1)][-1]


def test_stock_step_fails_on_an_unfinished_prompt_with_a_seed() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        sync(runner(unfinished=[True], outputs=[[]]))
    assert cpu_seeded_prefill._needed().needed


def test_patched_step_sets_unfinished_prompts_back_and_leaves_the_others() -> None:
    one = runner(unfinished=[True, False, True], outputs=[[], [7], [7]])
    everyone = one.input_batch.generators
    assert cpu_seeded_prefill.rewinding(sync)(one, 1, 2) == "done"
    assert one.input_batch.generators is everyone
    assert next_of(everyone[0]) == after_seed(0, 0)
    assert next_of(everyone[1]) == after_seed(1, 1)
    assert next_of(everyone[2]) == after_seed(2, 1)


def test_step_that_fails_leaves_the_generators_in_place() -> None:
    def fail(self: Any) -> None:
        raise ValueError("no")

    one = runner(unfinished=[True], outputs=[[]])
    with pytest.raises(ValueError, match="no"):
        cpu_seeded_prefill.rewinding(fail)(one)
    assert list(one.input_batch.generators) == [0]


def test_what_the_patch_takes_for_granted_is_there(cpu_vllm: None) -> None:
    import inspect

    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    function = CPUModelRunner._bookkeeping_sync
    original = getattr(function, "_qwen_nvfp4_original", function)
    assert tuple(inspect.signature(original).parameters) == cpu_seeded_prefill.PARAMETERS
    assert "gen.set_offset(gen.get_offset() - 4)" in inspect.getsource(original)
