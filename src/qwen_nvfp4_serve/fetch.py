"""Download a checkpoint into the hub cache: resumable to the byte, checked against its hashes, safe when two run.

huggingface_hub names the files, signs the requests and later finds the result; the bytes are written here, because the
library (2.x) throws a partial file away when it is interrupted, which for a shard of 5 GB is most of an evening.
Layout of the cache, as the library documents it: `models--owner--name/{blobs,refs,snapshots}`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from uuid import uuid4

from qwen_nvfp4_serve.blobs import Blob, Meter, download_blob, partial_bytes
from qwen_nvfp4_serve.checkpoint.check_files import check_files
from qwen_nvfp4_serve.checkpoint.source import open_folder
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.hub import HubUnreachableError, Repo, find_repo, is_commit
from qwen_nvfp4_serve.units import MIB, gib

# What a server reads; other formats of the same weights and code are left on the hub.
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
MARK = "config.json"  # a snapshot without it counts for nothing
DISK_MARGIN_BYTES = 16 * MIB  # for what a file system needs beside the data
WORKERS = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a download is. rate: bytes per second over the last seconds; eta_s: None until a rate is known."""

    done_bytes: int
    total_bytes: int
    rate_bytes_per_s: float
    eta_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A complete snapshot. commit: 40 hex digits. notice: a sentence when the hub could not be asked."""

    folder: Path
    commit: str
    downloaded_bytes: int = 0
    notice: str | None = None


def fetch(
    name: str,
    *,
    cache: Path,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    interval_s: float = 1.0,
) -> Fetched:
    """The snapshot of repository `name` at `revision` (None: main) under hub cache `cache`, downloaded where needed.

    A pinned commit that is complete needs no network. on_progress is called about every `interval_s` from the calling
    thread. Raises QwenNvfp4Error for a full disk, damage, no access or no network, UsageError for a wrong name.
    """
    store = _store(name, cache)
    try:
        return _fetch(
            name, store, revision, token=token, offline=offline, on_progress=on_progress, interval_s=interval_s
        )
    except OSError as error:
        do = "Check owner and mode of the folder, or set HF_HOME to another one."
        raise QwenNvfp4Error(f"{cache} cannot be used", seen=error.strerror or str(error), do=do) from None


def _fetch(
    name: str,
    store: Path,
    revision: str | None,
    *,
    token: str | None,
    offline: bool,
    on_progress: Callable[[Progress], None] | None,
    interval_s: float,
) -> Fetched:
    local = _complete_snapshot(store, revision)
    if local is not None and (offline or is_commit(revision)):
        return Fetched(folder=local, commit=local.name)
    if offline:
        what = f"{name} is not complete in {store.parent}"
        raise QwenNvfp4Error(what, seen="offline mode", do="Unset HF_HUB_OFFLINE once, or run qwen-nvfp4 fetch.")
    try:
        repo = find_repo(name, revision, token=token)
    except HubUnreachableError as error:
        if local is None:
            raise
        notice = f"{error.sentence()} What is used is the copy of {local.name[:12]} that is here."
        return Fetched(folder=local, commit=local.name, notice=notice)
    blobs = _wanted(repo, store)
    if MARK not in blobs:
        raise UsageError(f"{name} at {repo.commit[:12]}", seen="no config.json", expected="a checkpoint")
    downloaded = _download(repo, store, blobs, token=token, on_progress=on_progress, interval_s=interval_s)
    folder = _link(repo, store, blobs)
    _verify(folder)
    _name(store, revision or "main", repo.commit)
    return Fetched(folder=folder, commit=repo.commit, downloaded_bytes=downloaded)


def snapshot_here(name: str, cache: Path, revision: str | None = None) -> Path | None:
    """The folder of a repository at `revision` (None: main) when it is here, whole; asks nobody."""
    try:
        return _complete_snapshot(_store(name, cache), revision)
    except (OSError, UsageError):
        return None


def _store(name: str, cache: Path) -> Path:
    return cache / f"models--{name.replace('/', '--')}"


def missing_bytes(name: str, *, cache: Path, revision: str | None = None, token: str | None = None) -> int:
    """What `fetch` would still have to download, in bytes; asks the hub. Raises like `fetch`."""
    repo = find_repo(name, revision, token=token)
    blobs = _wanted(repo, _store(name, cache))
    return sum(blob.size_bytes - partial_bytes(blob) for blob in blobs.values() if not blob.is_whole)


def _wanted(repo: Repo, store: Path) -> dict[str, Blob]:
    chosen = [file for file in repo.files.values() if any(fnmatch(file.name, pattern) for pattern in WANTED)]
    for file in chosen:
        if file.name.startswith("/") or ".." in Path(file.name).parts:
            raise QwenNvfp4Error(f"{repo.name} lists a file outside its folder", seen=file.name, do="Do not use it.")
    return {
        file.name: Blob(
            file=file.name,
            path=store / "blobs" / file.blob,
            size_bytes=file.size_bytes,
            sha256=file.sha256,
        )
        for file in chosen
    }


def _download(
    repo: Repo,
    store: Path,
    blobs: Mapping[str, Blob],
    *,
    token: str | None,
    on_progress: Callable[[Progress], None] | None,
    interval_s: float,
) -> int:
    """Bring every blob here; returns the bytes that were downloaded. The largest begin first."""
    missing = sorted(
        {blob.path: blob for blob in blobs.values() if not blob.is_whole}.values(), key=_size, reverse=True
    )
    if not missing:
        return 0
    _check_disk(repo.name, store, missing)
    meter = Meter(sum(map(_size, missing)), sum(map(partial_bytes, missing)))
    stop = threading.Event()
    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(download_blob, repo, blob, token=token, meter=meter, stop=stop) for blob in missing]
        try:
            while not all(future.done() for future in running):
                failed = next((future for future in running if future.done() and future.exception()), None)
                if failed is not None:
                    failed.result()
                meter.wait(interval_s)
                if on_progress:
                    on_progress(Progress(*meter.state()))
            for future in running:
                future.result()
        finally:
            stop.set()
            for future in running:
                future.cancel()
    return meter.downloaded_bytes


def _size(blob: Blob) -> int:
    return blob.size_bytes


def _check_disk(name: str, store: Path, missing: list[Blob]) -> None:
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    needed = sum(blob.size_bytes - partial_bytes(blob) for blob in missing)
    free = shutil.disk_usage(store).free
    if free < needed + DISK_MARGIN_BYTES:
        raise QwenNvfp4Error(
            f"not enough disk for {name} in {store.parent}",
            seen=f"{gib(free)} free",
            expected=f"{gib(needed + DISK_MARGIN_BYTES)}",
            do="Free some, or set HF_HOME to a folder on a larger disk.",
        )


def _link(repo: Repo, store: Path, blobs: Mapping[str, Blob]) -> Path:
    """The snapshot folder, each file a relative link to its blob, the one that says it is complete last.

    What is right already is not written again: the cache may be read-only.
    """
    folder = store / "snapshots" / repo.commit
    for name, blob in sorted(blobs.items(), key=lambda item: item[0] == MARK):
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        depth = len(Path(name).parts) + 1
        target = Path(*[".."] * depth, "blobs", blob.path.name)
        if link.is_symlink() and link.readlink() == target:
            continue
        with suppress(FileExistsError):
            link.symlink_to(target)
        if not link.is_symlink() or link.readlink() != target:
            spare = _spare(store)
            spare.symlink_to(target)
            spare.replace(link)
    return folder


def _name(store: Path, ref: str, commit: str) -> None:
    """Let `ref`, a branch or a tag, mean `commit`; a cache that says so already may be read-only."""
    path = store / "refs" / ref
    if is_commit(ref) or (path.is_file() and path.read_text().strip() == commit):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = _spare(store)
    spare.write_text(commit)
    spare.replace(path)


def _spare(store: Path) -> Path:
    """A name to write under before the right one is taken, outside of what anybody reads and nobody else's."""
    return store / "blobs" / f"{uuid4().hex}.part"


def _complete_snapshot(store: Path, revision: str | None) -> Path | None:
    """The folder of `revision` when it holds every shard, whole; None otherwise."""
    ref = store / "refs" / (revision or "main")
    commit = revision if is_commit(revision) else ref.read_text().strip() if ref.is_file() else None
    folder = store / "snapshots" / commit if commit else None
    if folder is None or not (folder / MARK).is_file():
        return None
    try:
        _verify(folder)
    except QwenNvfp4Error:
        return None
    return folder


def _verify(folder: Path) -> None:
    """Raises QwenNvfp4Error when a header, a size or the index contradicts what is there."""
    source = open_folder(folder)
    finding = next((finding for finding in check_files(source) if finding.severity.value == "error"), None)
    if finding is not None:
        raise QwenNvfp4Error(f"{folder}: {finding.says}", do="Delete the file and run qwen-nvfp4 fetch again.")
    if not source.shards:
        raise QwenNvfp4Error(f"{folder} has no *.safetensors file", do="Choose a checkpoint in safetensors.")
