"""Moving recurrent state between cache blocks: against plain indexing of tensors."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from qwen_nvfp4_patches import cpu_mtp_state as state  # noqa: E402

BLOCKS, WIDTH, DIM, HEADS, COLUMNS = 12, 5, 6, 4, 6


class Cache:
    """Two requests' blocks of one layer: a convolution window [blocks, WIDTH, DIM] and a state [blocks, HEADS, DIM]."""

    def __init__(self, dim_first: bool = False) -> None:
        shape = (BLOCKS, DIM, WIDTH) if dim_first else (BLOCKS, WIDTH, DIM)
        self.conv = torch.randn(shape).bfloat16()
        self.temporal = torch.randn(BLOCKS, HEADS, DIM)
        self.table = torch.randperm(BLOCKS).to(torch.int32).reshape(2, COLUMNS)
        self.dim_first = dim_first

    def columns(self) -> list[Any]:
        """vLLM's eight metadata tensors, in the kernels' order."""
        conv, temporal = self.conv, self.temporal
        rows, row_stride = (DIM, conv.stride(1) * 2) if self.dim_first else (0, 0)
        inner = 1 if self.dim_first else DIM
        return [
            torch.tensor([conv.data_ptr(), temporal.data_ptr()]),
            torch.tensor([conv.stride(0) * 2, temporal.stride(0) * 4]),
            torch.tensor([2, 4], dtype=torch.int32),
            torch.tensor([inner, HEADS * DIM]),
            torch.tensor([WIDTH, 0], dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
            torch.tensor([rows, 0], dtype=torch.int32),
            torch.tensor([row_stride, 0]),
        ]

    def window(self, request: int, column: int) -> Any:
        """A request's convolution window as [WIDTH, DIM]."""
        block = self.conv[self.table[request, column]]
        return block.T if self.dim_first else block

    def recurrent(self, request: int, column: int) -> Any:
        return self.temporal[self.table[request, column]]

    def tables(self) -> tuple[Any, int]:
        return torch.tensor([self.table.data_ptr()]), self.table.stride(0)


@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize(("source", "target", "accepted"), [(0, 1, 0), (1, 4, 2), (2, 2, 1), (0, 0, 3)])
def test_precopy_moves_window_and_state_as_of_the_accepted_tokens(
    dim_first: bool, source: int, target: int, accepted: int
) -> None:
    cache = Cache(dim_first)
    window = cache.window(1, source)[accepted:].clone()
    recurrent = cache.recurrent(1, source + accepted).clone()
    untouched = cache.temporal.clone()
    indices = [torch.tensor([0, value], dtype=torch.int32) for value in (target, source, accepted)]
    indices[1][0] = -1  # request 0 is fresh
    state.precopy(*indices, *cache.tables(), *cache.columns(), None, 2, HAS_IDX_MAPPING=False)
    if source == target:  # still in its block: nothing moves
        assert torch.equal(cache.temporal, untouched)
        return
    assert torch.equal(cache.window(1, target)[: WIDTH - accepted], window)
    assert torch.equal(cache.recurrent(1, target), recurrent)
    changed = (cache.temporal != untouched).any(-1).any(-1).nonzero().flatten().tolist()
    assert changed == [int(cache.table[1, target])]


def test_copy_state_in_place_shifts_an_overlapping_window() -> None:
    cache = Cache()
    want = cache.window(0, 2)[1:].clone()
    layout = state.state_layouts(cache.columns(), cache.tables()[0])[0]
    state.copy_state(layout, 0, 2, 2, 1)
    assert torch.equal(cache.window(0, 2)[: WIDTH - 1], want)


def run_postprocess(cache: Cache, *, accepted: int, block: int, computed: int, scheduled: int, drafts: int) -> Any:
    out = torch.tensor([accepted, 7], dtype=torch.int32)
    numbers = (accepted, block, scheduled, computed, drafts)
    values = [torch.tensor([number, 0], dtype=torch.int32) for number in numbers]
    state.postprocess(*values, *cache.tables(), *cache.columns(), out, None, 1, block_size=16)
    return out


def test_postprocess_leaves_a_snapshot_at_the_border_that_was_passed() -> None:
    # 14 tokens done, 1 + 3 drafts scheduled, 3 accepted: the running state is at 15, the sequence at 17, border at 16.
    cache = Cache()
    want = cache.recurrent(0, 2 + 1).clone()
    window = cache.window(0, 2)[1:].clone()
    out = run_postprocess(cache, accepted=3, block=2, computed=14, scheduled=4, drafts=3)
    assert torch.equal(cache.recurrent(0, 0), want)
    assert torch.equal(cache.window(0, 0)[: WIDTH - 1], window)
    assert out.tolist() == [3, 7]


def test_postprocess_inside_a_block_changes_nothing() -> None:
    cache = Cache()
    before = cache.temporal.clone(), cache.conv.clone()
    out = run_postprocess(cache, accepted=2, block=0, computed=4, scheduled=4, drafts=3)
    assert torch.equal(cache.temporal, before[0])
    assert torch.equal(cache.conv, before[1])
    assert out.tolist() == [2, 7]


def test_postprocess_in_the_running_block_resets_the_accepted_count() -> None:
    cache = Cache()
    want = cache.recurrent(0, 1).clone()
    out = run_postprocess(cache, accepted=2, block=0, computed=14, scheduled=4, drafts=3)
    assert torch.equal(cache.recurrent(0, 0), want)
    assert out.tolist() == [1, 7]


def test_postprocess_with_a_mapping_and_counted_tokens_skips_empty_places() -> None:
    cache = Cache()
    want = cache.recurrent(1, 1).clone()
    untouched = cache.temporal[cache.table[0].long()].clone()
    accepted = torch.tensor([9, 2], dtype=torch.int32)
    out = accepted.clone()
    state.postprocess(
        accepted,
        torch.tensor([0, 0], dtype=torch.int32),
        None,
        torch.tensor([99, 16], dtype=torch.int32),
        None,
        *cache.tables(),
        *cache.columns(),
        out,
        torch.tensor([-1, 1], dtype=torch.int32),
        2,
        block_size=16,
        HAS_IDX_MAPPING=True,
    )
    assert torch.equal(cache.recurrent(1, 0), want)
    assert torch.equal(cache.temporal[cache.table[0].long()], untouched)
    assert out.tolist() == [9, 1]
