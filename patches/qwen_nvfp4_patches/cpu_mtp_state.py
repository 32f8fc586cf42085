"""Recurrent state across block borders with speculation, on CPU: two Triton kernels written out in Python.

With prefix caching, GDN layers keep a state for each cache block. When a request crosses a border, its running state
moves to the next block before the step, and after the step a snapshot is left at the last border that was passed.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch, Platform

if TYPE_CHECKING:
    import torch

MODULE = "vllm.v1.worker.mamba_utils"
BLOCK_ID_BYTES = 4


class StateLayout(NamedTuple):
    """Where one state tensor of one layer lies. Addresses and strides in bytes, widths and sizes in elements.

    conv_width: tokens in the convolution's window, 0 for a recurrent state. inner: elements of a token of the window,
    or of the whole recurrent state. rows, row_stride: set where the window's rows lie apart (dim-first layout).
    """

    base: int
    block_stride: int
    element_bytes: int
    inner: int
    conv_width: int
    block_table: int
    rows: int
    row_stride: int


def state_layouts(columns: Sequence[torch.Tensor], block_tables: torch.Tensor) -> tuple[StateLayout, ...]:
    """The layouts out of vLLM's flat tensors.

    columns: eight of int32 or int64 [states], in the order of the kernels' parameters: base address, block stride,
    element size, inner size, window, group, rows, row stride. block_tables: int64 [groups], addresses.
    """
    tables = block_tables.tolist()
    return tuple(
        StateLayout(base, stride, size, inner, width, tables[group], rows, row_stride)
        for base, stride, size, inner, width, group, rows, row_stride in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )


def copy_state(layout: StateLayout, row_bytes: int, source: int, target: int, accepted: int) -> None:
    """Copies a request's state from block column `source` to `target`, as of `accepted` tokens after the step began.

    row_bytes: offset of the request's row in the block table. A window moves left by `accepted` tokens; of recurrent
    states there is one for each draft token, in the columns that follow. Source and target may overlap.
    """

    def block(column: int) -> int:
        entry = layout.block_table + row_bytes + column * BLOCK_ID_BYTES
        return layout.base + ctypes.c_int32.from_address(entry).value * layout.block_stride

    if layout.conv_width == 0:
        ctypes.memmove(block(target), block(source + accepted), layout.inner * layout.element_bytes)
        return
    kept = layout.conv_width - accepted
    if layout.rows:
        for row in range(layout.rows):
            start = row * layout.row_stride
            shift = accepted * layout.element_bytes
            ctypes.memmove(block(target) + start, block(source) + start + shift, kept * layout.element_bytes)
        return
    token_bytes = layout.inner * layout.element_bytes
    ctypes.memmove(block(target), block(source) + accepted * token_bytes, kept * token_bytes)


def precopy(
    mamba_state_idx_ptr: torch.Tensor,
    src_col_ptr: torch.Tensor,
    token_bias_ptr: torch.Tensor,
    block_table_ptrs_ptr: torch.Tensor,
    block_table_stride_req: int,
    *state_columns_and_mapping: Any,
    HAS_IDX_MAPPING: bool = True,
    **_: Any,
) -> None:
    """Stands in for precopy_mamba_align_fused_kernel: before a step, moves each request's state to its new block.

    mamba_state_idx_ptr, src_col_ptr, token_bias_ptr: int32 [requests], target column, source column (negative: none),
    accepted tokens. Then vLLM's eight state columns, the row mapping or None, and the number of requests.
    """
    *columns, mapping, num_reqs = state_columns_and_mapping
    layouts = state_layouts(columns, block_table_ptrs_ptr)
    for request in _requests(mapping if HAS_IDX_MAPPING else None, num_reqs):
        source, target = int(src_col_ptr[request]), int(mamba_state_idx_ptr[request])
        if source < 0 or source == target:
            continue
        for layout in layouts:
            row_bytes = request * block_table_stride_req * BLOCK_ID_BYTES
            copy_state(layout, row_bytes, source, target, int(token_bias_ptr[request]))


def postprocess(  # noqa: PLR0917 - the kernel's parameters
    num_accepted_tokens_ptr: torch.Tensor,
    mamba_state_idx_ptr: torch.Tensor,
    num_scheduled_tokens_ptr: torch.Tensor | None,
    num_computed_tokens_ptr: torch.Tensor,
    num_draft_tokens_ptr: torch.Tensor | None,
    block_table_ptrs_ptr: torch.Tensor,
    block_table_stride_req: int,
    *state_columns_and_mapping: Any,
    block_size: int,
    HAS_IDX_MAPPING: bool = False,
    **_: Any,
) -> None:
    """Stands in for postprocess_mamba_fused_kernel: after a step, leaves a snapshot at the last border passed.

    All int32 [requests]. Where the running block is the snapshot's own, the accepted count becomes 1, as the state was
    moved in place. num_scheduled_tokens_ptr is None where num_computed_tokens_ptr already counts the step.
    """
    *columns, accepted_out, mapping, num_reqs = state_columns_and_mapping
    layouts = state_layouts(columns, block_table_ptrs_ptr)
    for request in _requests(mapping if HAS_IDX_MAPPING else None, num_reqs):
        accepted = int(num_accepted_tokens_ptr[request])
        computed = int(num_computed_tokens_ptr[request])
        if num_scheduled_tokens_ptr is None or num_draft_tokens_ptr is None:
            running = computed - accepted + 1
        else:
            running = computed + int(num_scheduled_tokens_ptr[request]) - int(num_draft_tokens_ptr[request])
        border = (running + accepted - 1) // block_size * block_size
        if border < running:
            continue
        source, target = int(mamba_state_idx_ptr[request]), border // block_size - 1
        if source == target:
            accepted_out[request] = 1
            if border == running:
                continue
        for layout in layouts:
            row_bytes = request * block_table_stride_req * BLOCK_ID_BYTES
            copy_state(layout, row_bytes, source, target, border - running)


def _requests(mapping: torch.Tensor | None, count: int) -> Iterator[int]:
    """The rows of the requests in the batch; a negative entry of `mapping` is an empty place."""
    rows = range(count) if mapping is None else mapping[:count].tolist()
    return (row for row in rows if row >= 0)


_OVERRIDES = {
    f"{MODULE}.precopy_mamba_align_fused_kernel": precopy,
    f"{MODULE}.postprocess_mamba_fused_kernel": postprocess,
}
_STATE_COLUMNS = (
    "state_base_addrs_ptr",
    "state_block_strides_ptr",
    "state_elem_sizes_ptr",
    "state_inner_sizes_ptr",
    "state_conv_widths_ptr",
    "state_group_indices_ptr",
    "state_dim_row_count_ptr",
    "state_dim_row_stride_ptr",
)
_BLOCK_TABLE = ("block_table_ptrs_ptr", "block_table_stride_req")
KERNEL_PARAMETERS = {
    "precopy_mamba_align_fused_kernel": (
        *("mamba_state_idx_ptr", "src_col_ptr", "token_bias_ptr", *_BLOCK_TABLE, *_STATE_COLUMNS),
        *("idx_mapping_ptr", "num_reqs", "COPY_BLOCK_SIZE", "CONV_STATE_DIM_FIRST", "HAS_IDX_MAPPING"),
        "TEMPORAL_TILES",
    ),
    "postprocess_mamba_fused_kernel": (
        *("num_accepted_tokens_ptr", "mamba_state_idx_ptr", "num_scheduled_tokens_ptr", "num_computed_tokens_ptr"),
        *("num_draft_tokens_ptr", *_BLOCK_TABLE, *_STATE_COLUMNS, "num_accepted_tokens_out_ptr", "idx_mapping_ptr"),
        *("num_reqs", "block_size", "COPY_BLOCK_SIZE", "CONV_STATE_DIM_FIRST", "HAS_IDX_MAPPING"),
        *("PRECOMPUTED_NEW_COMPUTED", "TEMPORAL_TILES"),
    ),
}


def _needed() -> Need:
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import _registry

    if HAS_TRITON:
        return Need(False, "Triton is present")
    others = [name for name, override in _OVERRIDES.items() if _registry.get(name, (None, override))[1] is not override]
    if others:
        return Need(False, f"vLLM has its own fallback for {others[0]}")
    return Need(True, "MTP with prefix caching calls two Triton kernels without a fallback")


def _apply() -> None:
    from vllm.triton_utils.dispatcher import _registry, register_kernels
    from vllm.v1.worker import mamba_utils

    if not _OVERRIDES.keys() <= _registry.keys():
        for name, parameters in KERNEL_PARAMETERS.items():
            kernel = seams.require_attribute(mamba_utils, name)
            seams.require_parameters(getattr(kernel, "func", kernel), *parameters)
        with warnings.catch_warnings():
            # register_kernels looks at every name of every module, deprecated ones of torch too.
            warnings.simplefilter("ignore", FutureWarning)
            register_kernels(_OVERRIDES)


PATCH = Patch(
    name="cpu-mtp-state",
    platform=Platform.CPU,
    changes="registers Python versions of two Triton kernels of vllm.v1.worker.mamba_utils",
    why="the first request with MTP and prefix caching kills the engine on CPU",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/worker/mamba_utils.py",
    remove_when="CpuPlatform.register_triton_kernel_overrides covers both kernels",
    needed=_needed,
    apply=_apply,
)
