"""The grouped GEMM of the experts without a card: its limits, its numbers, its machine code for three cards."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_nvfp4_serve.errors import UsageError
from qwen_nvfp4_serve.kernels.nvfp4_moe import ExpertWeights, large_m, large_m_measure, large_m_w4a4

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
INTERPRETED = ("interpreted_large_m.py", "interpreted_large_m_w4a4.py")
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}  # of a block, by compute capability


@with_triton
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", INTERPRETED)
def test_numbers_in_the_interpreter_equal_the_definition(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / name)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def zero_experts() -> ExpertWeights:
    """Two experts of hidden size 128 and width 64."""
    scales = torch.ones(2)
    return ExpertWeights(
        w13=torch.zeros(2, 128, 64, dtype=torch.uint8),
        w13_scales=torch.zeros(2, 128, 8).to(torch.float8_e4m3fn),
        w2=torch.zeros(2, 128, 32, dtype=torch.uint8),
        w2_scales=torch.zeros(2, 128, 4).to(torch.float8_e4m3fn),
        gate_scale=scales,
        up_scale=scales,
        down_scale=scales,
    )


@pytest.mark.parametrize(
    ("capability", "rows"), [((9, 0), [16, 16, 32, 32, 64, 128]), ((12, 0), [16, 16, 32, 32, 64, 64])]
)
def test_tile_grows_with_the_pairs_of_an_expert_as_far_as_the_card_has_it(
    capability: tuple[int, int], rows: list[int]
) -> None:
    tiles = large_m.tiles_of(capability)
    assert [large_m.tile_for(average, tiles).rows for average in (0.03, 8, 8.1, 24, 96, 256)] == rows


def test_workspace_is_bounded_whatever_the_tokens() -> None:
    some, many = (large_m.workspace_bytes(tokens, 8, 2048, 512) for tokens in (64, 10**6))
    assert some == 64 * (2 * 2048 + 8 * (2 * 512 + 4 * 2048))
    assert some < many <= large_m.WORKSPACE_BYTES


@pytest.mark.parametrize(
    ("capability", "hidden", "width", "word"),
    [((7, 5), 2048, 512, "7.5"), ((9, 0), 2080, 512, "2080"), ((9, 0), 2048, 96, "96"), ((9, 0), 2048, 0, "0")],
)
def test_supports_refuses_with_the_reason(capability: tuple[int, int], hidden: int, width: int, word: str) -> None:
    assert word in (large_m.supports(capability, hidden, width) or "")


def test_supports_takes_the_models_and_half_of_them() -> None:
    assert not any(large_m.supports((9, 0), *sizes) for sizes in ((2048, 512), (2048, 256), (256, 64)))


@pytest.mark.parametrize("spoiled", ["topk_ids", "topk_weights", "activations"])
def test_experts_other_shapes_or_dtypes_are_refused(spoiled: str) -> None:
    x, ids, shares = torch.zeros(2, 128), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    x = torch.zeros(2, 192) if spoiled == "activations" else x
    ids = ids.long() if spoiled == "topk_ids" else ids
    shares = shares[:1] if spoiled == "topk_weights" else shares
    with pytest.raises(UsageError, match=spoiled):
        large_m.experts(x, zero_experts(), ids, shares)


def test_experts_without_tokens_are_none() -> None:
    none = torch.zeros(0, 1)
    assert large_m.experts(torch.zeros(0, 128), zero_experts(), none.int(), none).shape == (0, 128)


@pytest.mark.parametrize(("tokens", "sizes"), [(3, [3]), (4, [4]), (5, [4, 1]), (9, [4, 4, 1])])
@pytest.mark.parametrize("quantized", [False, True])
def test_rounds_are_full_and_what_is_left_comes_last(
    tokens: int, sizes: list[int], quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = large_m_w4a4 if quantized else large_m
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(module, "tokens_in_round", lambda *_: 4)
    monkeypatch.setattr(module, "_round", lambda x, *_: asked.append(x))
    x = torch.randn(tokens, 128)
    ids, shares = torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1)
    if quantized:
        large_m_w4a4.experts(x, zero_experts(), ids, shares, torch.ones(2, 2), torch.empty_like(x))
    else:
        large_m.experts(x, zero_experts(), ids, shares)
    assert [len(rows) for rows in asked] == sizes
    assert torch.equal(torch.cat(asked), x)


def test_warm_up_while_a_model_loads_in_bfloat16_asks_for_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def experts(*given: torch.Tensor, tile: large_m.Tile) -> None:
        x, _, ids, shares = given
        asked.extend((x.dtype, ids.dtype, shares.dtype))

    monkeypatch.setattr(large_m, "experts", experts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    torch.set_default_dtype(torch.bfloat16)
    try:
        large_m.warm_up(zero_experts(), 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert asked == [torch.bfloat16, torch.int32, torch.float32] * len(large_m.TILES)


def run_ptx(text: str, codes: int, scales: tuple[int, int]) -> list[int]:
    """The outputs $0 to $3 of DECODE for 32 bits of codes and two words of BF16 scales, instruction by instruction."""
    registers = {"$4": codes, "$5": scales[0], "$6": scales[1]}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def product(a: int, b: int) -> int:
        halves = torch.tensor([[a & 0xFFFF, a >> 16], [b & 0xFFFF, b >> 16]]).to(torch.int32)
        left, right = halves.to(torch.uint16).view(torch.bfloat16).double()
        exact = left * right
        rounded = exact.bfloat16()
        assert torch.equal(rounded.double(), exact)
        low, high = rounded.view(torch.uint16).to(torch.int64).tolist()
        return low | high << 16

    def permute(a: int, b: int, selector: int) -> int:
        pool = (a | b << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(pool[selector >> 4 * i & 7] for i in range(4)), "little")

    for line in text.strip("{}\n").splitlines():
        if line.startswith(".reg"):
            continue
        name, _, rest = line.rstrip(";").partition(" ")
        target, *operands = rest.split(", ")
        given = [value(operand) for operand in operands]
        registers[target] = {
            "mov.b32": lambda v: v[0],
            "and.b32": lambda v: v[0] & v[1],
            "shr.u32": lambda v: v[0] >> v[1],
            "prmt.b32": lambda v: permute(*v),
            "mul.lo.u32": lambda v: v[0] * v[1] & 0xFFFFFFFF,
            "fma.rn.bf16x2": lambda v: product(v[0], v[1]),
        }[name](given)
    return [registers[f"${i}"] for i in range(4)]


@with_triton
def test_decode_every_code_in_every_place_times_every_scale_is_exact() -> None:
    from qwen_nvfp4_serve.kernels import triton_step
    from qwen_nvfp4_serve.kernels.nvfp4 import decode_e2m1

    text = getattr(triton_step.DECODE, "value", triton_step.DECODE)
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    # As `block_scales` and `add_step` hand them over: E4M3 times 2^-8, times 2^112.
    scales = (every * 2.0**104).bfloat16()
    assert torch.equal(scales.double(), every.double() * 2.0**104)
    bits = scales.view(torch.uint16).to(torch.int64).tolist()
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8)).double()
    for first in range(0, 127, 4):
        of_byte = [min(first + byte, 126) for byte in range(4)]
        words = tuple(bits[of_byte[i]] | bits[of_byte[i + 1]] << 16 for i in (0, 2))
        for start in range(16):
            nibbles = [(start + place) % 16 for place in range(8)]
            codes = sum(nibble << 4 * place for place, nibble in enumerate(nibbles))
            halves = [word >> 16 * half & 0xFFFF for word in run_ptx(text, codes, words) for half in range(2)]
            decoded = torch.tensor(halves, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).double()
            wanted = values[nibbles[0::2] + nibbles[1::2]] * every.double()[of_byte * 2] * 2.0**-22
            assert torch.equal(decoded, wanted), (of_byte, hex(codes))


def test_tiles_to_measure_begin_with_those_in_use_and_none_comes_twice() -> None:
    found = list(large_m_measure.tiles())
    assert tuple(found[: len(large_m.TILES)]) == large_m.TILES
    assert len(set(found)) == len(found)


def test_best_is_the_fastest_tile_of_each_m_that_was_timed() -> None:
    rows: list[dict[str, Any]] = [{"tokens": {"16": 9.0, "64": 5.0}}, {"tokens": {"16": 8.0}}]
    assert large_m_measure.best(rows, (16, 64, 256)) == {"16": 1, "64": 0}


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qwen_nvfp4_serve.kernels.nvfp4_moe import large_m, large_m_kernels as exact, large_m_w4a4_kernels as rounding

card = int(sys.argv[1])
pointers = dict.fromkeys(("x", "split", "middle", "gate_up", "output"), "*bf16") | {"y": "*bf16"}
pointers |= dict.fromkeys(("ids", "order", "block_expert", "starts", "places"), "*i32") | {"counts": "*i16"}
pointers |= dict.fromkeys(("packed", "scales"), "*u8")
pointers |= dict.fromkeys(("gate_scale", "up_scale", "down_scale", "first_scale", "second_scale"), "*fp32")
pointers |= dict.fromkeys(("input_scale", "pair_output", "weights"), "*fp32")
aligned = {"hidden", "width", "columns", "scale_bytes", "gate_row", "up_row"}


def compile(kernel, fixed, **options):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else pointers.get(name, "i32") for name in names}
    whole = [(i,) for i, name in enumerate(names) if name in pointers.keys() | aligned]
    attributes = {at: [["tt.divisibility", 16]] for at in whole}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    products = built.asm["ptx"].count("wgmma.mma_async") + built.asm["ptx"].count("mma.sync")
    print(json.dumps({"kernel": kernel.__name__, "shared": built.metadata.shared, "products": products,
                      "bytes": len(built.asm["cubin"])}))


for tile in large_m.tiles_of((card // 10, card % 10)):
    fixed = {"ROWS": tile.rows, "COLUMNS": tile.columns, "BYTES": large_m.STEP_BYTES, "ON_CARD": True}
    for kernel in (exact.gate_up, exact.down):
        compile(kernel, fixed, num_warps=tile.warps, num_stages=tile.stages)
dealing = {"WIDTH": 256, "CHUNK": large_m.PAIRS_IN_CHUNK}
compile(exact.count_pairs, dealing, num_warps=large_m.DEALING_WARPS)
dealing |= {"ROWS": 128, "COUNTS": large_m.LINES_IN_STEP, "BLOCKS": large_m.BLOCKS_IN_STEP}
compile(exact.place_pairs, dealing, num_warps=large_m.DEALING_WARPS)
compile(exact.split_columns, {"WIDTH": 1024})
compile(exact.add_up, {"TOP_K": 8, "WIDTH": 1024})
if card >= 120:
    compile(rounding.round_activations, {"GROUPS": 64})
    compile(rounding.round_swiglu, {"GROUPS": 64})
    compile(rounding.add_up_places, {"TOP_K": 8, "WIDTH": 1024})
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
    grouped = [row for row in rows if row["kernel"] in ("gate_up", "down")]
    assert len(grouped) == 2 * len(large_m.tiles_of((card // 10, card % 10)))
    assert len(rows) == len(grouped) + (7 if card >= 120 else 4)
    for row in rows:
        assert (row["products"] > 0) == (row in grouped), row
        assert row["bytes"] > 0, row
        assert row["shared"] <= SHARED_BYTES[card], row
