"""The tensors of a checkpoint, grouped into the matrices that vLLM runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from qwen_nvfp4_serve.checkpoint.header import Tensor
from qwen_nvfp4_serve.checkpoint.naming import Area, Unit, unit_of
from qwen_nvfp4_serve.checkpoint.schemes import PLAIN

_PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")


class Module:
    """One module of the checkpoint, its tensors by the last part of their names.

    matrix: the tensor with the weights. global_scale: the per-tensor scale of an NVFP4 matrix. label: how the weights
    are stored (`BF16`, `FP8`, `NVFP4`, `MXFP8`, `INT`), None for a module without a matrix.
    """

    __slots__ = ("global_scale", "label", "matrix", "name", "tensors")

    def __init__(self, name: str, tensors: dict[str, Tensor]) -> None:
        self.name, self.tensors = name, tensors
        self.matrix = tensors.get("weight_packed") or tensors.get("weight") or tensors.get("qweight")
        self.global_scale = tensors.get("weight_global_scale") or tensors.get("weight_scale_2")
        self.label = self._label()

    def _label(self) -> str | None:
        matrix = self.matrix
        if matrix is None:
            stacked = next(iter(self.tensors.values()))
            return PLAIN if len(stacked.shape) == 3 and stacked.dtype in _PLAIN_DTYPES else None
        if matrix.dtype in ("U8", "F4"):
            return "NVFP4"
        if matrix.dtype in _PLAIN_DTYPES:
            return PLAIN
        if matrix.dtype.startswith("F8_"):
            scale = self.tensors.get("weight_scale")
            return "MXFP8" if scale is not None and scale.dtype in ("U8", "F8_E8M0") else "FP8"
        return "INT"


@dataclass(frozen=True, slots=True)
class Group:
    """A unit of vLLM with the checkpoint's modules that make it up."""

    unit: Unit
    modules: list[Module]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum([tensor.size_bytes for module in self.modules for tensor in module.tensors.values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All groups by unit name, and what else the names tell."""

    groups: Mapping[str, Group]
    has_mtp: bool
    has_vision: bool
    has_kv_scales: bool


class _Same(dict[str, str]):
    """For each text the first object equal to it: of 100,000 names' ends few remain, and memory takes time."""

    def __missing__(self, text: str) -> str:
        self[text] = text
        return text


def group_tensors(shards: Iterable[Mapping[str, Tensor]]) -> Contents:
    """The contents of a checkpoint whose shards hold these tensors by name."""
    owners: dict[str, dict[str, Tensor]] = {}
    has_kv_scales = False
    last, parts, leaves = None, {}, _Same()
    for name, tensor in chain.from_iterable(shard.items() for shard in shards):
        owner, _, leaf = name.rpartition(".")
        if leaf in ("k_scale", "v_scale"):
            has_kv_scales = True
            continue
        if owner != last:  # a module's tensors stand together in most files
            last, parts = owner, owners.setdefault(owner, {})
        parts[leaves[leaf]] = tensor
    groups: dict[str, Group] = {}
    experts: dict[str, Group] = {}
    for owner, parts in owners.items():
        # A large model has 30,000 expert matrices: name their unit once for each layer.
        layer, found, _ = owner.partition(".experts.")
        group = experts.get(layer) if found else None
        if group is None:
            unit = unit_of(owner)
            group = groups.setdefault(unit.name, Group(unit, []))
            if found:
                experts[layer] = group
        group.modules.append(Module(owner, parts))
    areas = {group.unit.area for group in groups.values()}
    return Contents(
        groups=groups,
        has_mtp=Area.MTP in areas,
        has_vision=Area.VISUAL in areas,
        has_kv_scales=has_kv_scales,
    )
