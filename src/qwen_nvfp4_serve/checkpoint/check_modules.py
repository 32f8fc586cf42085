"""Faults of the matrices: what the config says of each against how it is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qwen_nvfp4_serve.checkpoint.contents import Contents, Group, Module
from qwen_nvfp4_serve.checkpoint.faults import Finding, Severity
from qwen_nvfp4_serve.checkpoint.naming import Area, Unit
from qwen_nvfp4_serve.checkpoint.schemes import PLAIN, Resolver, SplitError, Unquantized

NVFP4_BLOCK = 16
SCALE_DTYPE = "F8_E4M3"
# Marlin, the kernel of cards without native FP4 and of W4A16, works in tiles of 64; others pad.
TILE = 64

SeverityOf = Callable[[Area], Severity]


def check_modules(contents: Contents, resolver: Resolver, severity_of: SeverityOf) -> Iterator[Finding]:
    """Findings for every unit; severity_of says how much a fault in an area matters."""
    packed = [group for group in contents.groups.values() if any(is_packed(module) for module in group.modules)]
    if isinstance(resolver, Unquantized):
        yield from _undeclared(packed, severity_of)
        return
    any_scale = any(module.global_scale for group in packed for module in group.modules)
    for group in contents.groups.values():
        unit = group.unit
        if _is_unknown(unit, resolver):
            continue
        severity = severity_of(unit.area)
        try:
            expected = resolver.scheme(unit)
        except SplitError as split:
            says = f"{unit.name} would mix schemes: {split.reason}"
            yield Finding(severity=severity, code="fused-split", name=unit.name, says=says, topic=_topic(unit))
            continue
        findings = list(_storage(group, expected, severity))
        yield from findings
        if not findings:
            yield from _matrix(group, severity, any_scale=any_scale)


def is_packed(module: Module) -> bool:
    """True when the module's weights are stored in fewer bits than BF16."""
    return module.label not in (None, PLAIN)


def _is_unknown(unit: Unit, resolver: Resolver) -> bool:
    return any(name.endswith(unit.name.rpartition("layers.")[2]) for name in resolver.unknown)


def _topic(unit: Unit) -> str:
    return "visual" if unit.area is Area.VISUAL else unit.kind


def _undeclared(packed: list[Group], severity_of: SeverityOf) -> Iterator[Finding]:
    for group in packed:
        says = f"{group.unit.name} is packed, but no quantization is declared"
        yield Finding(severity=severity_of(group.unit.area), code="undeclared", name=group.unit.name, says=says)


def _storage(group: Group, expected: str, severity: Severity) -> Iterator[Finding]:
    """Modules stored otherwise than vLLM will read them."""
    unit = group.unit
    wanted = expected.partition(" ")[0]
    for module in group.modules:
        stored = module.label
        if stored is None or stored == wanted or (stored == "INT" and wanted.startswith("INT")):
            continue
        if wanted == PLAIN:
            why = "vLLM never quantizes it" if unit.is_plain else "the config leaves it in BF16"
            code, says = "ignored-but-packed", f"{module.name} is stored as {stored}, but {why}"
        elif stored == PLAIN:
            code, says = "quantized-but-plain", f"{module.name} is BF16, but the config makes it {expected}"
        else:
            code, says = "scheme-differs", f"{module.name} is stored as {stored}, but the config makes it {expected}"
        yield Finding(severity=severity, code=code, name=module.name, says=says, topic=_topic(unit))


def _matrix(group: Group, severity: Severity, *, any_scale: bool) -> Iterator[Finding]:
    """Faults inside NVFP4 matrices that are stored as declared."""
    kinds: dict[object, list[Module]] = {}  # hundreds of experts, stored alike: each way is looked at once
    for module in group.modules:
        if module.label == "NVFP4" and module.matrix is not None:
            scale = module.tensors.get("weight_scale")
            stored = (module.matrix[:2], scale and scale[:2], module.global_scale is None)
            kinds.setdefault(stored, []).append(module)
    if not kinds:
        return
    unit, topic = group.unit, _topic(group.unit)
    for first, *others in kinds.values():
        if ("weight_scale" not in first.tensors or first.global_scale is None) and unit.area is not Area.VISUAL:
            # A checkpoint that has no scale anywhere was stripped on purpose; a single hole is damage.
            level = severity if any_scale else Severity.WARNING
            for module in (first, *others):
                says = f"{module.name} is packed and has no scales"
                yield Finding(severity=level, code="missing-scale", name=module.name, says=says, topic=topic)
        if fault := _scale_fault(first):
            for module in (first, *others):
                says = f"the scales of {module.name} are {fault}"
                yield Finding(severity=severity, code="scale-shape", name=module.name, says=says, topic=topic)
    yield from _dims(group, [modules[0].matrix.shape for modules in kinds.values() if modules[0].matrix], severity)


def _dims(group: Group, shapes: list[tuple[int, ...]], severity: Severity) -> Iterator[Finding]:
    """Faults of the packed `shapes` in `group`, of which no NVFP4 kernel or not every one takes each."""
    unit, topic = group.unit, _topic(group.unit)
    if flat := next((shape for shape in shapes if len(shape) < 2 or not all(shape)), None):
        says = f"{unit.name} holds a packed matrix of shape {list(flat)}: no NVFP4 kernel takes it"
        yield Finding(severity=severity, code="kernel-dims", name=unit.name, says=says, topic=topic)
        return
    inputs = [2 * shape[1] for shape in shapes if len(shape) == 2]
    if not inputs:
        return
    outputs = _outputs(group, shapes)
    if any(columns % NVFP4_BLOCK for columns in inputs):
        says = f"{unit.name} has {inputs[0]:,} inputs, not a multiple of {NVFP4_BLOCK}: no NVFP4 kernel takes it"
        yield Finding(severity=severity, code="kernel-dims", name=unit.name, says=says, topic=topic)
    elif outputs % TILE or any(columns % TILE for columns in inputs):
        size = f"{outputs:,} outputs and {inputs[0]:,} inputs"
        says = f"{unit.name} has {size}, not multiples of {TILE}: Marlin cannot take it, other kernels pad"
        yield Finding(severity=Severity.WARNING, code="odd-dims", name=unit.name, says=says, topic=topic)


def _outputs(group: Group, shapes: list[tuple[int, ...]]) -> int:
    """Rows of the matrix that vLLM makes of the group's: all of them, but of experts one."""
    if group.unit.leaf == "experts":
        return next(shape[0] for shape in shapes if len(shape) == 2)
    packed = [module.matrix for module in group.modules if module.label == "NVFP4" and module.matrix is not None]
    return sum(matrix.shape[0] for matrix in packed if len(matrix.shape) == 2)


def _scale_fault(module: Module) -> str | None:
    """What the block scales of a packed matrix are and should be: there is one E4M3 number for 16 values of a row."""
    matrix, scale = module.matrix, module.tensors.get("weight_scale")
    if matrix is None or scale is None or len(scale.shape) != len(matrix.shape):
        return None
    if scale.dtype == SCALE_DTYPE and scale.shape[:-1] == matrix.shape[:-1]:
        blocks = 2 * matrix.shape[-1] // NVFP4_BLOCK
        if scale.shape[-1] == blocks or 2 * matrix.shape[-1] % NVFP4_BLOCK:
            return None
    wanted = [*matrix.shape[:-1], 2 * matrix.shape[-1] // NVFP4_BLOCK]
    return f"{scale.dtype} {list(scale.shape)}, for this matrix they have to be {SCALE_DTYPE} {wanted}"
