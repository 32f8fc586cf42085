"""The linear layer for 17 to 512 tokens, on any card: a tiled GEMM that reads the packed weight in place.

    linear(x, weight, y, bias=bias)

A block multiplies a tile of tokens with a tile of outputs whose weights are dequantized in registers (`triton_step`).
Where tiles are too few for the card, each sum is cut into parts of equal length, which are kept in float32 and added up
in their order. Every output is rounded once, within `reference.error_bound`, and repeats bit for bit. Needs Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import cards
from qwen_nvfp4_serve.kernels.nvfp4_linear import K_MULTIPLE, N_LIMIT, LinearWeight

MAX_TOKENS = 512
WORKSPACE_BYTES = 64 * 2**20  # of the activations in their other order, and of the parts
K_LIMIT = WORKSPACE_BYTES // (2 * MAX_TOKENS)
BLOCKS_LIMIT = 2**31  # block scales are found by 32-bit indices
OLDEST_CAPABILITY = (8, 0)  # BF16 tensor cores
WGMMA_MAJOR = 9  # compute capability 9.0 alone has `wgmma`
STEP_BYTES = 64  # of a weight row that one step takes: 128 columns
COLUMNS_IN_STEP = 1024  # of the kernels that only move or add
PARTS = (1, 2, 4, 8)
# What a block takes beside its steps, in steps. Measured: H200, 2026-11-30. With 6 to 8 the rule of `parts_for` picks
# the fastest number of parts at 64, 128 and 256 tokens of the 27B's gate_up, down, attn_qkv and attn_o.
BLOCK_STEPS = 7
CPU_PROCESSORS = 4  # pretended for Triton's interpreter


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one block computes: `rows` tokens of `columns` outputs. warps, stages: as Triton understands them.

    registers: the most a thread may take, None for no bound of ours. resident: blocks that a multiprocessor holds.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None
    resident: int = 1


# Measured: H200, 2026-11-30; at 64, 128 and 256 tokens each is the fastest of its time's sweep or within 13 % of that.
# resident: from registers and the 57 to 210 KB of shared memory that Triton 3.6 gives a block, 3.8 up to 226.
WGMMA_TILES = (
    Tile(rows=64, columns=64, warps=4, stages=3, registers=128, resident=3),
    Tile(rows=128, columns=128, warps=8, stages=3),
    Tile(rows=256, columns=128, warps=8, stages=3),
)
# Run on no card. Chosen by what Triton compiles for 8.0 and 12.0: up to 58 KB of shared memory, of which 12.0 has 99;
# nothing spilled by 3.6, at most 8 bytes by 3.8.
MMA_TILES = (
    Tile(rows=64, columns=64, warps=4, stages=2, resident=2),
    Tile(rows=128, columns=128, warps=8, stages=2),
)


def unavailable() -> str | None:
    """Why this cannot run on this machine at all, None if it can."""
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def supports(capability: tuple[int, int], n: int, k: int) -> str | None:
    """None if an [n, k] weight is served on a card of this compute capability, else the reason it is not."""
    if capability < OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no BF16 tensor cores"
    if k % K_MULTIPLE or not 0 < k <= K_LIMIT:
        return f"K = {k} is not a multiple of {K_MULTIPLE} up to {K_LIMIT}"
    if not 0 < n <= N_LIMIT or n * k // 16 >= BLOCKS_LIMIT:
        return f"N = {n} is not in 1..{min(N_LIMIT, BLOCKS_LIMIT * 16 // k)}"
    return None


def tiles_of(capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Those in use on a card of this compute capability, smallest first."""
    return WGMMA_TILES if capability[0] == WGMMA_MAJOR else MMA_TILES


def tile_for(tokens: int, tiles: Sequence[Tile]) -> Tile:
    """The smallest tile that holds all tokens, the largest where none does."""
    return next((tile for tile in tiles if tokens <= tile.rows), tiles[-1])


def parts_for(tokens: int, n: int, k: int, tile: Tile, processors: int) -> int:
    """Into how many parts each sum is cut on a card of so many multiprocessors: one of PARTS.

    The one with the least waves of blocks times the length of a block, as far as WORKSPACE_BYTES suffice.
    """
    blocks, steps = -(-tokens // tile.rows) * -(-n // tile.columns), k // (2 * STEP_BYTES)

    def steps_in_all(parts: int) -> float:
        waves = -(-blocks * parts // (processors * tile.resident))
        return waves * (steps / parts + BLOCK_STEPS)

    fits = [parts for parts in PARTS if workspace_bytes(tokens, n, k, parts) <= WORKSPACE_BYTES and parts <= steps]
    return min(fits or PARTS[:1], key=steps_in_all)


_parts_for = lru_cache(maxsize=2**14)(parts_for)  # tokens of a prefill times the sizes of a model's layers


def workspace_bytes(tokens: int, n: int, k: int, parts: int) -> int:
    """What a call takes beside its result; with the `parts` of `parts_for` at most WORKSPACE_BYTES."""
    return 2 * tokens * k + (4 * parts * tokens * n if parts > 1 else 0)


def linear(
    x: torch.Tensor,
    weight: LinearWeight,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
    parts: int | None = None,
) -> None:
    """Fills y with x W^T + bias, on the current stream of x's device.

    x: contiguous bf16 [M, K], M in 1..512. y: contiguous bf16 [M, N]. bias: contiguous bf16 [N] or None.
    tile, parts: instead of those chosen for M. Raises UsageError for shapes, dtypes or sizes that are not served.
    The first call of a tile compiles it, which no graph capture allows: see `warm_up`.
    """
    tiles = tiles_of(_check(x, weight, y, bias))
    (m, k), n = x.shape, weight.packed.shape[0]
    tile = tile or tile_for(m, tiles)
    parts = parts or _parts_for(m, n, k, tile, _processors(x.device))
    if not x.is_cuda or cards.is_current(x.device):
        _launch(x, weight, y, bias, tile, parts)
        return
    with torch.cuda.device(x.device):
        _launch(x, weight, y, bias, tile, parts)


def warm_up(weight: LinearWeight) -> None:
    """Compiles what any call with this weight may need, so that none does it later, least of all inside a capture."""
    n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
    device = weight.packed.device
    x, y = (torch.zeros(1, size, dtype=torch.bfloat16, device=device) for size in (k, n))
    tiles = tiles_of(torch.cuda.get_device_capability(device))
    for tile in tiles:
        for parts in PARTS if tile is tiles[0] else PARTS[:2]:  # the parts are compiled into `add_parts` alone
            linear(x, weight, y, tile=tile, parts=parts)


def _launch(  # noqa: PLR0917
    x: torch.Tensor, weight: LinearWeight, y: torch.Tensor, bias: torch.Tensor | None, tile: Tile, parts: int
) -> None:
    kernels = _kernels()
    (m, k), n = x.shape, weight.packed.shape[0]
    split = torch.empty_like(x)
    kernels.split_columns[(m, -(-k // COLUMNS_IN_STEP))](x, split, k, WIDTH=COLUMNS_IN_STEP)
    sums = y if parts == 1 else torch.empty(parts, m, n, dtype=torch.float32, device=x.device)
    addend, has_bias = (y, 0) if bias is None else (bias, 1)
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    # Blocks that share weights come one after another.
    kernels.multiply[(-(-m // tile.rows), -(-n // tile.columns), parts)](
        split,
        weight.packed,
        weight.scales.view(torch.uint8),
        weight.row_scale,
        addend,
        sums,
        m,
        n,
        k,
        parts,
        has_bias,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BYTES=STEP_BYTES,
        WHOLE=parts == 1,
        ON_CARD=x.is_cuda,
        **options,
    )
    if parts > 1:
        kernels.add_parts[(m, -(-n // COLUMNS_IN_STEP))](
            sums, weight.row_scale, addend, y, m, n, has_bias, PARTS=parts, WIDTH=COLUMNS_IN_STEP
        )


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _kernels() -> ModuleType:
    from qwen_nvfp4_serve.kernels.nvfp4_linear import tiled_kernels

    return tiled_kernels


def _check(x: torch.Tensor, weight: LinearWeight, y: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int]:
    """The card's compute capability. Raises UsageError for what is not served."""
    n, k = weight.packed.shape[0], weight.packed.shape[1] * 2
    capability = cards.capability(x.device) if x.is_cuda else OLDEST_CAPABILITY
    reason = supports(capability, n, k)
    if reason is not None:
        raise UsageError(f"tiled NVFP4 linear of [{n}, {k}]", seen=reason)
    # Triton's interpreter has other dtypes.
    dtype = torch.bfloat16 if x.is_cuda else x.dtype
    if x.ndim != 2 or x.shape[1] != k or not 0 < x.shape[0] <= MAX_TOKENS or x.dtype is not dtype:
        expected = f"bfloat16 [1..{MAX_TOKENS}, {k}]"
        raise UsageError("activations", seen=f"{x.dtype} {tuple(x.shape)}", expected=expected)
    for name, tensor, shape in (("output", y, (x.shape[0], n)), ("bias", bias, (n,))):
        if tensor is not None and (tensor.dtype is not dtype or tensor.shape != shape):
            raise UsageError(name, seen=f"{tensor.dtype} {tuple(tensor.shape)}", expected=f"{dtype} {shape}")
    tensors = (("activations", x), ("output", y), ("packed", weight.packed), ("scales", weight.scales), ("bias", bias))
    for name, tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise UsageError(name, seen=f"strides {tensor.stride()}", expected="a contiguous tensor")
    return capability
