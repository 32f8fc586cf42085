"""Global scales that differ inside a matrix which vLLM runs as one."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from qwen_nvfp4_serve.checkpoint.check_modules import SeverityOf
from qwen_nvfp4_serve.checkpoint.contents import Contents, Group, Module
from qwen_nvfp4_serve.checkpoint.faults import Finding, Severity
from qwen_nvfp4_serve.checkpoint.header import Tensor
from qwen_nvfp4_serve.checkpoint.naming import area_of
from qwen_nvfp4_serve.checkpoint.source import Source

# Below this the difference is rounding of the scale itself.
RATIO_TOLERANCE = 1.001
# On the hub each scale is a request: look at the first, the middle and the last layer of each kind.
SAMPLES = 3


def check_scales(source: Source, contents: Contents, severity_of: SeverityOf) -> Iterator[Finding]:
    """One finding for each fused group whose parts have unequal global scales, with the largest ratio of all first.

    A scale among them that is negative, infinite or no number is one of its own.
    """
    fused = [parts for group in _chosen(source, contents) for parts in _fused_parts(group)]
    scales: list[Tensor] = [module.global_scale for parts in fused for module in parts if module.global_scale]
    values = iter(source.read_scalars(scales))
    found = []
    for parts in fused:
        numbers = [next(values) for _ in parts]
        for module, number in zip(parts, numbers, strict=True):
            if number is not None and not 0 <= number < inf:
                says = f"the global scale of {module.name} is {number:g}"
                level = severity_of(area_of(module.name))
                yield Finding(severity=level, code="bad-scale", name=module.name, says=says)
        known = [number for number in numbers if number]
        if len(known) == len(parts) and min(known) > 0 and max(known) / min(known) > RATIO_TOLERANCE:
            found.append((max(known) / min(known), parts))
    for ratio, parts in sorted(found, key=lambda item: -item[0]):
        names = " and ".join(module.name.rpartition(".")[2] for module in parts)
        owner = parts[0].name.rpartition(".")[0]
        yield Finding(
            severity=Severity.WARNING,
            code="unequal-scales",
            name=owner,
            says=f"{names} of {owner} are fused, but their global scales differ by a factor of {ratio:.3g}",
            topic=names,
        )


def _chosen(source: Source, contents: Contents) -> list[Group]:
    groups = list(contents.groups.values())
    if source.scalars_are_cheap:
        return groups
    by_kind: dict[str, list[Group]] = {}
    for group in groups:
        by_kind.setdefault(group.unit.kind, []).append(group)
    places = {kind: {0, len(same) // 2, len(same) - 1} for kind, same in by_kind.items()}
    return [
        group for kind, same in by_kind.items() for i, group in enumerate(same) if i in sorted(places[kind])[:SAMPLES]
    ]


def _fused_parts(group: Group) -> Iterator[list[Module]]:
    """The modules that share one scale in vLLM: a fused matrix, or gate and up of one expert."""
    if group.unit.leaf != "experts":
        if len(group.modules) > 1 and all(module.global_scale for module in group.modules):
            yield group.modules
        return
    pairs: dict[str, list[Module]] = {}
    for module in group.modules:
        owner, _, leaf = module.name.rpartition(".")
        if leaf in ("gate_proj", "up_proj") and module.global_scale:
            pairs.setdefault(owner, []).append(module)
    yield from (pair for pair in pairs.values() if len(pair) > 1)
