"""The linear layers of a model as one card holds them, and the memory that our kernels take beside them. No torch."""

from __future__ import annotations

from qwen_nvfp4_serve.dims import Dims
from qwen_nvfp4_serve.kernels.admission.table import BF16_BITS, Shape
from qwen_nvfp4_serve.units import MIB

VOCAB_MULTIPLE = 64  # vLLM pads the rows of lm_head to it (layers/vocab_parallel_embedding.py)

# kernels/nvfp4_linear/launch.py: bound of the dequantized rows; linear.cu: a part for each resident block, on a
# multiprocessor two blocks with parts of at most 64 KiB or, of sm_90's, one with parts of 96 KiB; and the counters.
DEQUANTIZED_BYTES = 128 * MIB
PARTIAL_BYTES_PER_PROCESSOR = 2 * 64 * 1024
COUNTER_BYTES = 64 * 1024
TILED_BYTES = 64 * MIB  # kernels/nvfp4_linear/tiled.py: bound of what the tiled GEMM takes beside its result
EXPERTS_BYTES = 256 * MIB  # kernels/nvfp4_moe/large_m.py: bound of what the grouped GEMM takes beside its result


def layers_of(dims: Dims, tensor_parallel: int = 1) -> dict[str, Shape]:
    """Every linear layer of a decoder of these dimensions by its role, after vLLM's fusions, and the head.

    Routed experts and the vision tower are not among them.
    """
    cards, hidden = tensor_parallel, dims.hidden
    queries = dims.q_heads * dims.head_dim // cards
    keys = max(1, dims.kv_heads // cards) * dims.head_dim  # fewer heads than cards are repeated
    value_width = dims.gdn_value_heads * dims.gdn_value_dim // cards
    key_width = dims.gdn_key_heads * dims.gdn_key_dim // cards
    vocab = -(-dims.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // cards
    found = {
        "attn_qkv": Shape(queries * (2 if dims.output_gate else 1) + 2 * keys, hidden),
        "attn_o": Shape(hidden, queries),
        "gdn_qkvz": Shape(2 * key_width + 2 * value_width, hidden),
        "gdn_ba": Shape(2 * dims.gdn_value_heads // cards, hidden),
        "gdn_out": Shape(hidden, value_width),
    }
    for kind, width in (("", dims.intermediate), ("shared_", dims.shared_intermediate)):
        if width:
            found[f"{kind}gate_up"] = Shape(2 * width // cards, hidden)
            found[f"{kind}down"] = Shape(hidden, width // cards)
    # The head is by far the largest, and often not quantized: last, should time run out.
    return {**found, "lm_head": Shape(vocab, hidden)}


def linear_shapes(dims: Dims, tensor_parallel: int = 1) -> tuple[Shape, ...]:
    """The shapes of `layers_of`, without repeats: of every layer that a checkpoint can quantize.

    Layers that a checkpoint leaves unquantized are included: which those are is only known once the layer is built.
    """
    return tuple(dict.fromkeys(layers_of(dims, tensor_parallel).values()))


def bf16_shapes(dims: Dims, tensor_parallel: int = 1) -> tuple[Shape, ...]:
    """The same layers as a checkpoint leaves them that does not quantize them.

    First the delta net's two projections of its input as one, which is how they are served.
    """
    layers = layers_of(dims, tensor_parallel)
    together = Shape(layers["gdn_qkvz"].n + layers["gdn_ba"].n, dims.hidden)
    return tuple(Shape(shape.n, shape.k, bits=BF16_BITS) for shape in dict.fromkeys((together, *layers.values())))


def experts_shapes(dims: Dims, tensor_parallel: int = 1) -> tuple[Shape, ...]:
    """The routed experts of a model as one card holds them; none for a model without."""
    if not dims.is_moe:
        return ()
    rows = 2 * dims.expert_intermediate // tensor_parallel
    return (Shape(rows, dims.hidden, dims.experts, dims.experts_per_token),)


def workspace_bytes(multiprocessors: int, *, moe: bool) -> int:
    """What the kernels may take on a card: a workspace for each stream that runs them.

    Streams: the engine's own, the one that CUDA graphs are captured on, and for a mixture of experts vLLM's second
    one, for shared experts; the routed ones run on one stream at a time.
    """
    one = DEQUANTIZED_BYTES + TILED_BYTES + COUNTER_BYTES + multiprocessors * PARTIAL_BYTES_PER_PROCESSOR
    return one * 3 + EXPERTS_BYTES if moe else one * 2
