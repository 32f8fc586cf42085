"""Faults of the files: shards that are cut, missing or of another revision than the index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from qwen_nvfp4_serve.checkpoint.faults import Finding, Severity
from qwen_nvfp4_serve.checkpoint.source import INDEX_NAME, Source
from qwen_nvfp4_serve.errors import printable

# An index counts tensor bytes and some tools count more than they write, so only a real gap is an error.
SIZE_TOLERANCE = 0.01
MOST_BYTES = 2**60


def check_files(source: Source) -> Iterator[Finding]:
    """Findings about shards and the index; a missing tensor is reported only for shards that could be read."""
    broken = [shard for shard in source.shards if shard.reason is not None]
    for shard in broken:
        code = "shard" if shard.size_bytes is not None else "missing-shard"
        yield Finding(severity=Severity.ERROR, code=code, name=shard.name, says=f"{shard.name} {shard.reason}")
    if source.index is None:
        yield from _check_numbers([shard.name for shard in source.shards])
    if source.index is not None and not broken and _is_as_indexed(source, source.index.get("weight_map")):
        yield from _check_total(source, source.index)
        return
    present: dict[str, str] = {}
    for shard in source.shards:
        if not present.keys().isdisjoint(shard.tensors):
            name = min(present.keys() & shard.tensors.keys())
            says = f"{name} is in {present[name]} and in {shard.name}"
            yield Finding(severity=Severity.WARNING, code="duplicate", name=shard.name, says=says, topic=shard.name)
        present |= dict.fromkeys(shard.tensors, shard.name)
    if source.index is not None and not broken:
        yield from _check_index(source, source.index, present)


def _is_as_indexed(source: Source, weight_map: object) -> bool:
    """Whether every tensor is where the index puts it, and no other: so no two files hold the same one."""
    if not isinstance(weight_map, Mapping) or not weight_map:
        return False
    return len(weight_map) == sum(len(shard.tensors) for shard in source.shards) and all(
        [*map(weight_map.get, shard.tensors)].count(shard.name) == len(shard.tensors) for shard in source.shards
    )


def _check_numbers(names: Sequence[str]) -> Iterator[Finding]:
    """Without an index, `model-00001-of-00004.safetensors` still says how many there should be."""
    for name in names:
        match = re.fullmatch(r"(.*-)(\d{1,6})(-of-)(\d{1,6})(\.safetensors)", name)
        if match is None:
            continue
        stem, _, of, count, end = match.groups()
        wanted = [f"{stem}{number:0{len(match[2])}}{of}{count}{end}" for number in range(1, min(int(count), 9999) + 1)]
        for absent in sorted(set(wanted) - set(names)):
            says = f"{absent} is not there, although {name} is"
            yield Finding(severity=Severity.ERROR, code="missing-shard", name=absent, says=says)
        return


def _check_index(source: Source, index: Mapping[str, object], present: Mapping[str, str]) -> Iterator[Finding]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        yield _index_finding("weight_map", f"{INDEX_NAME} has no weight_map, so no file would be loaded")
        return
    yield from _differences(weight_map, present)
    yield from _check_total(source, index)


def _differences(weight_map: Mapping[str, object], present: Mapping[str, str]) -> Iterator[Finding]:
    for name, wanted in weight_map.items():
        if present.get(name) != wanted:
            where = f"is in {present[name]}" if name in present else "is in none"
            yield _index_finding(name, f"{INDEX_NAME} puts {name} into {wanted}, but it {where}")
    for name in sorted(present.keys() - weight_map.keys()):
        says = f"{name} is in {present[name]}, and {INDEX_NAME} does not name it"
        yield Finding(severity=Severity.WARNING, code="index", name=name, says=says, topic="unnamed")


def _check_total(source: Source, index: Mapping[str, object]) -> Iterator[Finding]:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if total is None:
        return
    if isinstance(total, bool) or not isinstance(total, int | float) or not 0 < total < MOST_BYTES:
        says = f"{INDEX_NAME} declares a total_size of {printable(repr(total), 40)}, which is no size"
        yield Finding(severity=Severity.WARNING, code="index", name=INDEX_NAME, says=says, topic="size")
        return
    held = sum(shard.data_bytes for shard in source.shards)
    if abs(held - total) <= SIZE_TOLERANCE * total:
        return
    says = f"{INDEX_NAME} declares {int(total):,} bytes of tensors, the shards hold {held:,}"
    if held < total:
        yield Finding(severity=Severity.ERROR, code="short", name=INDEX_NAME, says=says)
    else:
        yield Finding(severity=Severity.WARNING, code="index", name=INDEX_NAME, says=says, topic="size")


def _index_finding(name: str, says: str) -> Finding:
    return Finding(severity=Severity.ERROR, code="index", name=name, says=says)
