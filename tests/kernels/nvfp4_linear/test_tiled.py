"""The tiled GEMM of the linear layer without a card: its limits, its choices, its numbers, its machine code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels import nvfp4_linear
from qwen_nvfp4_serve.kernels.admission import Span, dispatch
from qwen_nvfp4_serve.kernels.admission.candidates import Tiled
from qwen_nvfp4_serve.kernels.nvfp4_linear import LinearWeight, tiled
from qwen_nvfp4_serve.kernels.nvfp4_linear.shapes import SHAPES, LinearShape

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}  # of a block, by compute capability
H200_PROCESSORS = 132
LAYERS = {shape.name: shape for shape in SHAPES}


@with_triton
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_numbers_in_the_interpreter_equal_the_definition() -> None:
    path = Path(__file__).parent / "interpreted_tiled.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("capability", "rows"), [((9, 0), [64, 64, 128, 128, 256, 256]), ((12, 0), [64, 64, 128, 128, 128, 128])]
)
def test_tile_grows_with_the_tokens_as_far_as_the_card_has_it(capability: tuple[int, int], rows: list[int]) -> None:
    tiles = tiled.tiles_of(capability)
    assert [tiled.tile_for(tokens, tiles).rows for tokens in (17, 64, 65, 128, 129, 512)] == rows


# The fastest of each when all were timed on an H200, 2026-11-30.
@pytest.mark.parametrize(
    ("layer", "parts"),
    [("gate_up", [2, 2, 1]), ("down", [4, 8, 8]), ("attn_qkv", [1, 1, 1]), ("attn_o", [4, 2, 2])],
)
def test_parts_are_those_that_were_fastest(layer: str, parts: list[int]) -> None:
    shape, tiles = LAYERS[f"27b/{layer}"], tiled.tiles_of((9, 0))
    found = [
        tiled.parts_for(tokens, shape.n, shape.k, tiled.tile_for(tokens, tiles), H200_PROCESSORS)
        for tokens in (64, 128, 256)
    ]
    assert found == parts


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("processors", [48, 170])
def test_workspace_is_bounded_whatever_the_tokens(shape: LinearShape, processors: int) -> None:
    for capability in ((9, 0), (12, 0)):
        for tokens in range(1, tiled.MAX_TOKENS + 1):
            tile = tiled.tile_for(tokens, tiled.tiles_of(capability))
            parts = tiled.parts_for(tokens, shape.n, shape.k, tile, processors)
            assert tiled.workspace_bytes(tokens, shape.n, shape.k, parts) <= tiled.WORKSPACE_BYTES


def test_workspace_of_the_most_columns_leaves_no_room_for_parts() -> None:
    tile = tiled.WGMMA_TILES[-1]
    assert tiled.parts_for(512, 128, tiled.K_LIMIT, tile, H200_PROCESSORS) == 1
    assert tiled.workspace_bytes(512, 128, tiled.K_LIMIT, 1) == tiled.WORKSPACE_BYTES
    assert tiled.parts_for(64, 128, tiled.K_LIMIT, tile, H200_PROCESSORS) == 8


def test_parts_are_not_more_than_the_steps() -> None:
    assert tiled.parts_for(64, 64, 128, tiled.WGMMA_TILES[0], H200_PROCESSORS) == 1
    assert tiled.parts_for(64, 64, 256, tiled.WGMMA_TILES[0], H200_PROCESSORS) <= 2


@pytest.mark.parametrize(
    ("capability", "n", "k", "word"),
    [
        ((7, 5), 128, 128, "7.5"),
        ((9, 0), 128, 192, "192"),
        ((9, 0), 128, 0, "K = 0"),
        ((9, 0), 128, 2**17, "K = 131072"),
        ((9, 0), 0, 128, "N = 0"),
        ((9, 0), 2**20, 2**16, "1..524288"),
    ],
)
def test_supports_refuses_with_the_reason(capability: tuple[int, int], n: int, k: int, word: str) -> None:
    assert word in (tiled.supports(capability, n, k) or "")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0), (12, 1)])
def test_supports_takes_the_models_layers(capability: tuple[int, int]) -> None:
    assert not any(tiled.supports(capability, shape.n, shape.k) for shape in SHAPES)


def zero_weight() -> LinearWeight:
    """96 rows of 128 columns."""
    scales = torch.zeros(96, 8).to(torch.float8_e4m3fn)
    return nvfp4_linear.prepare_weight(torch.zeros(96, 64, dtype=torch.uint8), scales, (96,), (1.0,))


SPOILED: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "activations": lambda given: given.update(x=torch.zeros(2, 256)),
    "activations ": lambda given: given.update(x=torch.zeros(513, 128), y=torch.zeros(513, 96)),
    "activations  ": lambda given: given.update(x=torch.zeros(128, 2).T),
    "output": lambda given: given.update(y=torch.zeros(2, 95)),
    "output ": lambda given: given.update(y=torch.zeros(96, 2).T),
    "bias": lambda given: given.update(bias=torch.zeros(95)),
    "bias ": lambda given: given.update(bias=torch.zeros(192)[::2]),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_linear_other_shapes_or_strides_are_refused(spoiled: str) -> None:
    given = {"x": torch.zeros(2, 128), "y": torch.zeros(2, 96), "bias": torch.zeros(96)}
    SPOILED[spoiled](given)
    with pytest.raises(UsageError, match=spoiled.strip()):
        tiled.linear(given["x"], zero_weight(), given["y"], bias=given["bias"])


def test_candidate_without_triton_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert Tiled().unavailable() == "triton is not installed"


@pytest.mark.parametrize(("name", "calls"), [("qwen-tiled", 1), ("qwen-dequantized", 0)])
def test_warm_up_compiles_for_the_plans_that_use_it(name: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[LinearWeight] = []
    monkeypatch.setattr(tiled, "warm_up", warmed.append)
    dispatch.warm_up((Span(16, "qwen-small-m"), Span(512, name), Span(2**31 - 1, "qwen-dequantized")), zero_weight())
    assert len(warmed) == calls


def test_warm_up_calls_every_tile_whole_and_in_parts_and_adds_up_every_number_of_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[tuple[int, int]] = []

    def linear(x: torch.Tensor, _weight: LinearWeight, y: torch.Tensor, *, tile: tiled.Tile, parts: int) -> None:
        assert (x.shape, y.shape) == ((1, 128), (1, 96))
        called.append((tile.rows, parts))

    monkeypatch.setattr(tiled, "linear", linear)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    tiled.warm_up(zero_weight())
    assert {(rows, parts > 1) for rows, parts in called} == {
        (tile.rows, cut) for tile in tiled.WGMMA_TILES for cut in (False, True)
    }
    assert {parts for _, parts in called} == set(tiled.PARTS)


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qwen_nvfp4_serve.kernels.nvfp4_linear import tiled, tiled_kernels as kernels

card = int(sys.argv[1])
pointers = {"x": "*bf16", "split": "*bf16", "packed": "*u8", "scales": "*u8", "row_scale": "*fp32", "bias": "*bf16",
            "y": "*bf16", "parts_of_y": "*fp32"}
unknown = {"bias", "tokens", "parts", "has_bias"}


def compile(kernel, fixed, out="*bf16", **options):
    names = kernel.arg_names
    known = pointers | {"out": out}
    signature = {name: "constexpr" if name in fixed else known.get(name, "i32") for name in names}
    aligned = [(i,) for i, name in enumerate(names) if name not in fixed and name not in unknown]
    attributes = {at: [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    ptx = built.asm["ptx"]
    print(json.dumps({"kernel": kernel.__name__, "shared": built.metadata.shared, "wgmma": ptx.count("wgmma.mma_async"),
                      "mma": ptx.count("mma.sync"), "bytes": len(built.asm["cubin"]), **options}))


for tile in tiled.tiles_of((card // 10, card % 10)):
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    options |= {} if tile.registers is None else {"maxnreg": tile.registers}
    for whole in (True, False):
        fixed = {"ROWS": tile.rows, "COLUMNS": tile.columns, "BYTES": tiled.STEP_BYTES, "WHOLE": whole, "ON_CARD": True}
        compile(kernels.multiply, fixed, "*bf16" if whole else "*fp32", **options)
for parts in tiled.PARTS[1:]:
    compile(kernels.add_parts, {"PARTS": parts, "WIDTH": tiled.COLUMNS_IN_STEP})
compile(kernels.split_columns, {"WIDTH": tiled.COLUMNS_IN_STEP})
"""


@with_triton
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("card", [80, 90, 120])
def test_kernels_compile_for_the_card_and_fit_its_shared_memory(card: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(card)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    products = [row for row in rows if row["kernel"] == "multiply"]
    assert len(products) == 2 * len(tiled.tiles_of((card // 10, card % 10)))
    assert len(rows) == len(products) + 4
    for row in rows:
        assert row["bytes"] > 0, row
        assert row["shared"] <= SHARED_BYTES[card], row
    for row in products:
        assert (row["wgmma"] > 0, row["mma"] > 0) == (card == 90, card != 90), row
