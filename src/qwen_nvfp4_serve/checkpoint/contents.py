"""The tensors of a checkpoint, grouped into the matrices that vLLM runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qwen_nvfp4_serve.checkpoint.header import Tensor
from qwen_nvfp4_serve.checkpoint.naming import Area, Unit, area_of, unit_of
from qwen_nvfp4_serve.checkpoint.schemes import PLAIN

GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")
_PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the checkpoint: its tensors by the last part of their names."""

    name: str
    tensors: dict[str, Tensor]

    @property
    def matrix(self) -> Tensor | None:
        """The tensor with the weights."""
        return self.tensors.get("weight_packed") or self.tensors.get("weight") or self.tensors.get("qweight")

    @property
    def label(self) -> str | None:
        """How the weights are stored: `BF16`, `FP8`, `NVFP4`, …; None for a module without a matrix."""
        matrix = self.matrix
        if matrix is None:
            stacked = next(iter(self.tensors.values()))
            return PLAIN if len(stacked.shape) == 3 and stacked.dtype in _PLAIN_DTYPES else None
        if matrix.dtype in ("U8", "F4"):
            return "NVFP4"
        if matrix.dtype.startswith("F8_"):
            scale = self.tensors.get("weight_scale")
            return "MXFP8" if scale is not None and scale.dtype in ("U8", "F8_E8M0") else "FP8"
        return PLAIN if matrix.dtype in _PLAIN_DTYPES else "INT"

    @property
    def global_scale(self) -> Tensor | None:
        """The per-tensor scale of an NVFP4 matrix."""
        return next((self.tensors[name] for name in GLOBAL_SCALES if name in self.tensors), None)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Group:
    """A unit of vLLM with the checkpoint's modules that make it up."""

    unit: Unit
    modules: list[Module]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(module.size_bytes for module in self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All groups by unit name, and what else the names tell."""

    groups: Mapping[str, Group]
    has_mtp: bool
    has_vision: bool
    has_kv_scales: bool


def group_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Contents:
    """The contents of a checkpoint with these named tensors."""
    modules: dict[str, Module] = {}
    has_kv_scales = False
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        if leaf in ("k_scale", "v_scale"):
            has_kv_scales = True
            continue
        modules.setdefault(owner, Module(owner, {})).tensors[leaf] = tensor
    groups: dict[str, Group] = {}
    for module in modules.values():
        unit = unit_of(module.name)
        groups.setdefault(unit.name, Group(unit, [])).modules.append(module)
    areas = {area_of(name + ".") for name in modules}
    return Contents(
        groups=groups,
        has_mtp=Area.MTP in areas,
        has_vision=Area.VISUAL in areas,
        has_kv_scales=has_kv_scales,
    )
