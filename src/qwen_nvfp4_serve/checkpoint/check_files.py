"""Faults of the files: shards that are cut, missing or of another revision than the index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
        is_there = shard.size_bytes is not None
        yield Finding(
            severity=Severity.ERROR,
            code="shard" if is_there else "missing-shard",
            name=shard.name,
            says=f"{shard.name} {shard.reason}",
            topic=shard.name if is_there else "",
        )
    present: dict[str, str] = {}
    for shard in source.shards:
        if twice := present.keys() & shard.tensors.keys():
            name = min(twice)
            says = f"{name} is in {present[name]} and in {shard.name}"
            yield Finding(severity=Severity.WARNING, code="duplicate", name=shard.name, says=says, topic=shard.name)
        present |= dict.fromkeys(shard.tensors, shard.name)
    if source.index is not None and not broken:
        yield from _check_index(source, source.index, present)


def _check_index(source: Source, index: Mapping[str, object], present: Mapping[str, str]) -> Iterator[Finding]:
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, Mapping) or not weight_map:
        yield _index_finding("weight_map", f"{INDEX_NAME} has no weight_map, so no file would be loaded")
        return
    for name, wanted in weight_map.items() if present != weight_map else ():
        if present.get(name) != wanted:
            where = f"is in {present[name]}" if name in present else "is in none"
            yield _index_finding(name, f"{INDEX_NAME} puts {name} into {wanted}, but it {where}")
    for name in sorted(present.keys() - weight_map.keys()):
        says = f"{name} is in {present[name]}, and {INDEX_NAME} does not name it"
        yield Finding(severity=Severity.WARNING, code="index", name=name, says=says, topic="unnamed")
    if isinstance(metadata, Mapping) and metadata.get("total_size") is not None:
        yield from _check_total(source, metadata["total_size"])


def _check_total(source: Source, total: object) -> Iterator[Finding]:
    if isinstance(total, bool) or not isinstance(total, int | float) or not 0 < total < MOST_BYTES:
        says = f"{INDEX_NAME} declares a total_size of {printable(repr(total), 40)}, which is no size"
        yield Finding(severity=Severity.WARNING, code="index", name=INDEX_NAME, says=says, topic="size")
        return
    held = sum([tensor.size_bytes for shard in source.shards for tensor in shard.tensors.values()])
    if abs(held - total) <= SIZE_TOLERANCE * total:
        return
    says = f"{INDEX_NAME} declares {int(total):,} bytes of tensors, the shards hold {held:,}"
    if held < total:
        yield Finding(severity=Severity.ERROR, code="short", name=INDEX_NAME, says=says)
    else:
        yield Finding(severity=Severity.WARNING, code="index", name=INDEX_NAME, says=says, topic="size")


def _index_finding(name: str, says: str) -> Finding:
    return Finding(severity=Severity.ERROR, code="index", name=name, says=says)
