"""One file of a repository, downloaded: appended to a partial file under a lock, then checked and renamed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from qwen_nvfp4_serve.errors import QwenNvfp4Error
from qwen_nvfp4_serve.hub import HubUnreachableError, Repo, file_request, plain_errors
from qwen_nvfp4_serve.units import MIB

HASH_CHUNK_BYTES = 8 * MIB
RATE_WINDOW_S = 10.0
RETRIES = 5
LOCK_POLL_S = 0.2
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A file's content. path: where it belongs once whole. sha256: of large files, None where only a size is known."""

    file: str
    path: Path
    size_bytes: int
    sha256: str | None

    @property
    def partial(self) -> Path:
        """Where it is while it grows. The name ends unlike a blob's, so nothing takes it for whole."""
        return self.path.with_name(self.path.name + ".part")

    @property
    def lock(self) -> Path:
        """The lock file, beside the library's own; never removed, since a waiter may hold it open."""
        store = self.path.parent.parent
        return store.parent / ".locks" / store.name / f"{self.path.name}.part.lock"

    @property
    def is_whole(self) -> bool:
        """Whether it is here in its full size; its hash was right when it got its name."""
        try:
            return self.path.stat().st_size == self.size_bytes
        except OSError:
            return False


def partial_bytes(blob: Blob) -> int:
    """Bytes of it that are here already."""
    try:
        return min(blob.size_bytes, blob.partial.stat().st_size)
    except OSError:
        return 0


class Meter:
    """Bytes done of a total, and the rate of the last seconds; shared by the workers."""

    def __init__(self, total_bytes: int, done_bytes: int) -> None:
        self._total, self._done, self.downloaded_bytes = total_bytes, done_bytes, 0
        self._lock, self._changed = threading.Lock(), threading.Event()
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def add(self, size: int) -> None:
        """Count bytes that arrived over the network."""
        with self._lock:
            self._done += size
            self.downloaded_bytes += size

    def correct(self, size: int) -> None:
        """Count bytes that came or went without the network: another process's work, a partial file given up."""
        with self._lock:
            self._done += size

    def wait(self, interval_s: float) -> None:
        """Sleep for an interval, or until a worker ends."""
        self._changed.wait(interval_s)
        self._changed.clear()

    def wake(self) -> None:
        """End a wait."""
        self._changed.set()

    def state(self) -> tuple[int, int, float, float | None]:
        """Bytes done, bytes in all, bytes per second, seconds left (None while nothing moves)."""
        now = time.monotonic()
        with self._lock:
            self._marks.append((now, self.downloaded_bytes))
            while len(self._marks) > 2 and now - self._marks[0][0] > RATE_WINDOW_S:
                self._marks.popleft()
            (first_at, first), (last_at, last) = self._marks[0], self._marks[-1]
            done = min(self._done, self._total)
        rate = (last - first) / (last_at - first_at) if last_at > first_at else 0.0
        return done, self._total, rate, (self._total - done) / rate if rate > 0 else None


def download_blob(repo: Repo, blob: Blob, *, token: str | None, meter: Meter, stop: threading.Event) -> None:
    """Make `blob.path` whole, or raise QwenNvfp4Error. Another process at the same blob is waited for."""
    try:
        blob.lock.parent.mkdir(parents=True, exist_ok=True)
        with _lock(blob, stop):
            before = partial_bytes(blob)
            if blob.is_whole:
                meter.correct(blob.size_bytes - before)
                return
            # What an earlier run left may itself be the damage: then it is given up once, and the file begun anew.
            for _ in range(2 if before else 1):
                _append(repo, blob, token=token, meter=meter, stop=stop)
                if stop.is_set() or _finish(blob, meter):
                    return
            do = "Run it again: the file was removed."
            raise QwenNvfp4Error(f"{blob.file} arrived damaged", seen="another size or hash", do=do)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            do = "Free some space and run it again: what is here is kept and resumed."
            raise QwenNvfp4Error(f"the disk of {blob.path.parent} is full", seen=blob.file, do=do) from None
        what = f"{blob.path.parent} cannot be written"
        raise QwenNvfp4Error(what, seen=error.strerror or str(error), do="Check its owner and mode.") from None
    finally:
        meter.wake()


@contextmanager
def _lock(blob: Blob, stop: threading.Event) -> Iterator[None]:
    """Holds the blob's lock file; the system drops the lock with its process, however that ends."""
    with blob.lock.open("w") as file:
        while not stop.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stop.wait(LOCK_POLL_S)
        yield


def _append(repo: Repo, blob: Blob, *, token: str | None, meter: Meter, stop: threading.Event) -> None:
    """Extend the partial file to the full size; a connection that breaks is opened again where it broke."""
    failures = 0
    while partial_bytes(blob) < blob.size_bytes and not stop.is_set():
        before, broken = partial_bytes(blob), None
        try:
            with blob.partial.open("ab") as file:
                _stream(repo, blob, file, token=token, meter=meter, stop=stop)
        except HubUnreachableError as error:
            broken = error
        if partial_bytes(blob) > before:
            failures = 0
            continue
        failures += 1
        if failures >= RETRIES:
            raise broken or HubUnreachableError(
                f"{repo.name}: {blob.file} ends early on the hub", do="Try again later."
            )
        stop.wait(0.25 * 2**failures)
    blob.partial.touch()


def _stream(repo: Repo, blob: Blob, file: BinaryIO, *, token: str | None, meter: Meter, stop: threading.Event) -> None:
    url, headers = file_request(repo, blob.file, token)
    start = file.tell()
    if start:
        headers["Range"] = f"bytes={start}-"
    utils = import_module("huggingface_hub.utils")
    with (
        plain_errors(repo.name, repo.commit, has_token=token is not None),
        utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response,
    ):
        utils.hf_raise_for_status(response)
        if start and response.status_code != 206:
            # The server sends all of it again.
            file.truncate(0)
            meter.correct(-start)
        # As received, so that a connection that breaks costs nothing.
        for chunk in response.iter_raw():
            if stop.is_set():
                return
            file.write(chunk)
            meter.add(len(chunk))


def _finish(blob: Blob, meter: Meter) -> bool:
    """Give the blob its name when size and hash are right; otherwise remove the partial file and return False."""
    size = blob.partial.stat().st_size
    if size != blob.size_bytes or not _is_intact(blob):
        blob.partial.unlink()
        meter.correct(-size)
        return False
    with blob.partial.open("rb") as file:
        os.fsync(file.fileno())
    blob.partial.replace(blob.path)
    return True


def _is_intact(blob: Blob) -> bool:
    if blob.sha256 is None:
        return not blob.file.endswith(".json") or _is_json(blob.partial)
    digest = hashlib.sha256()
    with blob.partial.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == blob.sha256


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True
