"""Faults of the whole: matrices that config.json asks for and no shard holds, and those of other dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from qwen_nvfp4_serve.checkpoint.contents import Contents, Group, Module
from qwen_nvfp4_serve.checkpoint.faults import MAX_NAMES, Finding, Severity
from qwen_nvfp4_serve.checkpoint.naming import FUSED, Area
from qwen_nvfp4_serve.checkpoint.schemes import PLAIN
from qwen_nvfp4_serve.dims import Dims, attention_pattern

# Where published checkpoints keep the decoder; under any other name nothing is judged.
ROOTS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
PARTS_OF_A_MODEL = 3  # of embedding, head, final norm, mixers and FFNs: fewer are an excerpt, not a damaged model
ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm")
GDN = ("in_proj_qkvz", "in_proj_ba", "out_proj", "conv1d", "norm")
DENSE = ("mlp.gate_up_proj", "mlp.down_proj")
MOE = ("mlp.gate", "mlp.experts", "mlp.shared_expert_gate")
SHARED = ("mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
_NOT_A_MATRIX = {"weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "input_scale",
                 "input_global_scale", "bias"}  # fmt: skip


def check_whole(contents: Contents, dims: Dims, config: Mapping[str, object]) -> Iterator[Finding]:
    """Findings of the language model; none for an excerpt, nor for names that are not known to be needed."""
    units = {group.unit.name: group for group in contents.groups.values() if group.unit.area is Area.LANGUAGE}
    root = next((root for root in ROOTS if any(name.startswith(f"{root}layers.") for name in units)), None)
    if root is None or not _is_a_model(units, root):
        return
    yield from _missing_ends(units, root, dims, config)
    held = {group.unit.layer for name, group in units.items() if name.startswith(f"{root}layers.")}
    layers = max((layer for layer in held if layer is not None), default=-1) + 1
    if layers > dims.layers:
        says = f"config.json counts {dims.layers:,} layers, but the shards hold layer {layers - 1:,}"
        yield _shape("num_hidden_layers", says)
    text = config.get("text_config")
    dense = (text if isinstance(text, Mapping) else config).get("mlp_only_layers")
    for layer, is_attention in enumerate(attention_pattern(config)):
        owner = f"{root}layers.{layer}"
        if layer not in held:
            yield _missing(owner)
        else:
            yield from _layer(units, owner, dims, is_attention=is_attention, any_ffn=bool(dense))
    sizes = _sizes(dims)
    for group in units.values():
        yield from _sizes_of(group, sizes, dims)


def _is_a_model(units: Mapping[str, Group], root: str) -> bool:
    mixers = any(".self_attn." in name or ".linear_attn." in name for name in units)
    ffns = any(".mlp." in name for name in units)
    ends = sum(name in units for name in (f"{root}embed_tokens", f"{root}norm", *_heads(root)))
    return ends + mixers + ffns >= PARTS_OF_A_MODEL


def _heads(root: str) -> tuple[str, ...]:
    return "lm_head", f"{root}lm_head", "model.lm_head", "language_model.lm_head"


def _missing_ends(units: Mapping[str, Group], root: str, dims: Dims, config: Mapping[str, object]) -> Iterator[Finding]:
    for name in (f"{root}embed_tokens", f"{root}norm"):
        if name not in units or not _has_matrix(units[name].modules):
            yield _missing(name)
    heads = [units[name] for name in dict.fromkeys(_heads(root)) if name in units]
    tied = dims.tied_embeddings or bool(config.get("tie_word_embeddings"))
    if not tied and not any(_has_matrix(group.modules) for group in heads):
        yield _missing("lm_head")


def _has_matrix(modules: list[Module]) -> bool:
    return not all(_is_hollow(module) for module in modules)


def _is_hollow(module: Module) -> bool:
    """True for scales without the matrix that they belong to; tensors that are not known may hold it."""
    return module.matrix is None and _NOT_A_MATRIX.issuperset(module.tensors)


def _layer(
    units: Mapping[str, Group], owner: str, dims: Dims, *, is_attention: bool, any_ffn: bool
) -> Iterator[Finding]:
    wanted = [*NORMS, *(ATTENTION if is_attention else [f"linear_attn.{part}" for part in GDN])]
    has_experts = f"{owner}.mlp.experts" in units
    if any_ffn:
        pass  # which layers are dense is written there: not a layout of the family's published models
    elif has_experts and not dims.is_moe:
        says = f"config.json describes a dense model, but {owner}.mlp holds experts"
        yield _shape(f"{owner}.mlp", says)
    elif not has_experts and dims.is_moe and f"{owner}.mlp.gate_up_proj" in units:
        says = f"config.json describes a mixture of experts, but {owner}.mlp is a dense one"
        yield _shape(f"{owner}.mlp", says)
    else:
        wanted += [*MOE, *SHARED] if dims.is_moe else DENSE
    for suffix in wanted:
        yield from _unit(units.get(f"{owner}.{suffix}"), f"{owner}.{suffix}")
    if not is_attention and (mixer := f"{owner}.linear_attn") in units:
        held = units[mixer].modules[0].tensors
        yield from (_missing(f"{mixer}.{leaf}") for leaf in ("A_log", "dt_bias") if leaf not in held)
    elif not is_attention:
        yield _missing(f"{mixer}.A_log")


def _unit(group: Group | None, name: str) -> Iterator[Finding]:
    """Parts of a matrix that are not there. One stored as vLLM fuses it is whole."""
    owner, _, leaf = name.rpartition(".")
    if leaf == "experts":
        if group is None:
            yield _missing(name)
        return
    modules = {} if group is None else {module.name: module for module in group.modules}
    if name in modules and not _is_hollow(modules[name]):
        return
    for part in FUSED.get(leaf, (leaf,)):
        module = modules.get(f"{owner}.{part}")
        if module is None or _is_hollow(module):
            yield _missing(f"{owner}.{part}")


def _sizes(dims: Dims) -> dict[str, tuple[int, int]]:
    """Rows and columns of each matrix by the last part of its name; MLPs are apart, for there are two widths."""
    heads, kv = dims.q_heads * dims.head_dim, dims.kv_heads * dims.head_dim
    key, value = dims.gdn_key_heads * dims.gdn_key_dim, dims.gdn_value_heads * dims.gdn_value_dim
    inputs = {"q_proj": heads * (2 if dims.output_gate else 1), "k_proj": kv, "v_proj": kv, "in_proj_z": value}
    inputs |= {"in_proj_qkv": 2 * key + value, "in_proj_b": dims.gdn_value_heads, "in_proj_a": dims.gdn_value_heads}
    inputs |= {"embed_tokens": dims.vocab, "lm_head": dims.vocab, "gate": dims.experts}
    outputs = {"o_proj": heads, "out_proj": value}
    return {
        **{name: (rows, dims.hidden) for name, rows in inputs.items()},
        **{name: (dims.hidden, columns) for name, columns in outputs.items()},
    }


def _sizes_of(group: Group, sizes: Mapping[str, tuple[int, int]], dims: Dims) -> Iterator[Finding]:
    owner = group.unit.name.rpartition(".")[0]
    if group.unit.leaf == "experts":
        if dims.is_moe:
            yield from _experts(group, dims)
        return
    width = dims.shared_intermediate if owner.endswith(".shared_expert") else dims.intermediate
    mlp = {"gate_proj": (width, dims.hidden), "up_proj": (width, dims.hidden), "down_proj": (dims.hidden, width)}
    for module in group.modules:
        leaf = module.name.rpartition(".")[2]
        wanted = (mlp if width else {}).get(leaf) or sizes.get(leaf)
        if wanted and (seen := _size(module)) and seen != wanted and all(wanted):
            yield _shape(module.name, f"{module.name} is {_by(seen)}, but config.json makes it {_by(wanted)}")


def _size(module: Module) -> tuple[int, ...] | None:
    """Rows and columns of a matrix in values; None for a way of packing that is not known here."""
    matrix = module.matrix
    if matrix is None or len(matrix.shape) != 2:
        return None
    if module.label == "NVFP4":
        return (matrix.shape[0], 2 * matrix.shape[1]) if matrix.dtype == "U8" else None
    return matrix.shape if module.label in (PLAIN, "FP8", "MXFP8") else None


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(f"{number:,}" for number in size)


def _experts(group: Group, dims: Dims) -> Iterator[Finding]:
    """A layer's experts: how many there are, and their sizes. Stacks that are not in BF16 are left to the loader."""
    modules = group.modules
    name = group.unit.name
    if len(modules) == 1 and modules[0].name == name:
        yield from _stacks(modules[0], dims)
        return
    # Lists in place of generators: a large model has 30,000 of these, and a generator is called for each.
    unknown = [module for module in modules if module.matrix is None and not _is_hollow(module)]
    if unknown or [module for module in modules if module.name == name]:
        return
    hollow = [module.name for module in modules if module.matrix is None]
    if len(modules) != 3 * dims.experts or hollow:
        known = {module.name for module in modules}.difference(hollow)
        numbers = {part for module in known if (part := module.removeprefix(f"{name}.").partition(".")[0]).isdecimal()}
        if not numbers or len(known) > 3 * len(numbers):
            return
        beyond = max(numbers, key=lambda number: int(number[:9]))
        if int(beyond[:9]) >= dims.experts:
            yield _shape(name, f"config.json counts {dims.experts:,} experts, but {name}.{beyond} is there")
            return
        wanted = (f"{name}.{expert}.{part}" for expert in range(dims.experts) for part in EXPERT_PARTS)
        yield from map(_missing, islice((module for module in wanted if module not in known), MAX_NAMES))
    allowed = {(dims.expert_intermediate, dims.hidden), (dims.hidden, dims.expert_intermediate)}
    for kind in {(module.matrix.shape, module.matrix.dtype): module for module in modules if module.matrix}.values():
        if (seen := _size(kind)) and seen not in allowed:
            wanted_size = _by((dims.expert_intermediate, dims.hidden))
            yield _shape(name, f"{kind.name} is {_by(seen)}, but config.json makes experts {wanted_size}")


def _stacks(module: Module, dims: Dims) -> Iterator[Finding]:
    """Experts in two tensors: gate and up as one, and down. Either order of rows and columns is in use."""
    stacks, width = module.tensors, dims.expert_intermediate
    if not {"gate_up_proj", "down_proj"}.issuperset(stacks) or module.label != PLAIN:
        return
    for leaf, columns in (("gate_up_proj", 2 * width), ("down_proj", width)):
        name, wanted = f"{module.name}.{leaf}", (dims.experts, columns, dims.hidden)
        if leaf not in stacks:
            yield _missing(name)
        elif stacks[leaf].shape not in (wanted, (dims.experts, dims.hidden, columns)):
            yield _shape(name, f"{name} is {_by(stacks[leaf].shape)}, but config.json makes it {_by(wanted)}")


def _missing(name: str) -> Finding:
    says = f"{name} is in no shard, but config.json asks for it"
    return Finding(severity=Severity.ERROR, code="missing", name=name, says=says)


def _shape(name: str, says: str) -> Finding:
    return Finding(severity=Severity.ERROR, code="shape", name=name, says=says)
