"""Faults of the files: shards that are cut, missing or of another revision than the index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qwen_nvfp4_serve.checkpoint.faults import Finding, Severity
from qwen_nvfp4_serve.checkpoint.source import INDEX_NAME, Source

# An index counts tensor bytes and some tools count more than they write, so only a real gap is an error.
SIZE_TOLERANCE = 0.01


def check_files(source: Source) -> Iterator[Finding]:
    """Findings about shards and the index; a missing tensor is reported only for shards that could be read."""
    broken = [shard for shard in source.shards if shard.reason is not None]
    for shard in broken:
        code = "shard" if shard.size_bytes is not None else "missing-shard"
        yield Finding(
            severity=Severity.ERROR, code=code, name=shard.name, says=f"{shard.name} {shard.reason}", topic=shard.name
        )
    if source.index is not None and not broken:
        yield from _check_index(source, source.index)


def _check_index(source: Source, index: Mapping[str, object]) -> Iterator[Finding]:
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, Mapping):
        yield _index_finding("weight_map", f"{INDEX_NAME} has no weight_map")
        return
    present: dict[str, str] = {}
    for shard in source.shards:
        present |= dict.fromkeys(shard.tensors, shard.name)
    for name, wanted in weight_map.items() if present != weight_map else ():
        if present.get(name) != wanted:
            where = f"is in {present[name]}" if name in present else "is in none"
            yield _index_finding(name, f"{INDEX_NAME} puts {name} into {wanted}, but it {where}")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, int | float) and not isinstance(total, bool) and total > 0:
        yield from _check_total(source, int(total))


def _check_total(source: Source, total: int) -> Iterator[Finding]:
    held = sum([tensor.size_bytes for shard in source.shards for tensor in shard.tensors.values()])
    if abs(held - total) <= SIZE_TOLERANCE * total:
        return
    says = f"{INDEX_NAME} declares {total:,} bytes of tensors, the shards hold {held:,}"
    if held < total:
        yield Finding(severity=Severity.ERROR, code="short", name=INDEX_NAME, says=says)
    else:
        yield Finding(severity=Severity.WARNING, code="index", name=INDEX_NAME, says=says)


def _index_finding(name: str, says: str) -> Finding:
    return Finding(severity=Severity.ERROR, code="index", name=name, says=says)
