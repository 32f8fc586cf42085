"""A repository on the hub: its files, its errors in plain words, and the parts of a checkpoint by range requests.

The endpoint, the cache folder and a saved token are huggingface_hub's own settings (HF_ENDPOINT, HF_HOME, HF_TOKEN).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import quote

from qwen_nvfp4_serve.checkpoint.header import LENGTH_BYTES, HeaderError, Tensor, header_length, parse_header
from qwen_nvfp4_serve.checkpoint.source import (
    INDEX_NAME,
    MAX_JSON_BYTES,
    Shard,
    Source,
    decode_scalar,
    parse_json,
    shard_names,
)
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# One request brings the header of most shards; the library found 97 % of headers to be shorter than this.
FIRST_READ_BYTES = 100_000
WORKERS = 8
TIMEOUT_S = 30.0


class HubUnreachableError(QwenNvfp4Error):
    """No answer from the hub: no network, a proxy, a server that is down."""


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository. blob: the name of its content in the cache; sha256: known for large files, else None."""

    name: str
    size_bytes: int
    blob: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository at one commit (40 hex digits)."""

    name: str
    commit: str
    files: Mapping[str, RepoFile]


@contextmanager
def plain_errors(repo: str, revision: str | None, *, has_token: bool) -> Iterator[None]:
    """Turns the hub's errors into one sentence: QwenNvfp4Error with what to do, UsageError for a wrong name."""
    import httpx
    from huggingface_hub import errors

    token = "Check HF_TOKEN." if has_token else "Set HF_TOKEN to a token with access."
    try:
        yield
    except errors.GatedRepoError:
        do = f"Ask for access on the repository's page with your account. {token}"
        raise QwenNvfp4Error(f"{repo} is gated", seen="no access", do=do) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{repo} has no revision {revision}", do="Choose a commit, tag or branch of it.") from None
    except errors.RepositoryNotFoundError as error:
        refused = _status(error) == 401
        seen = "the hub refuses this token (401)" if refused and has_token else "not found, or private"
        raise QwenNvfp4Error(f"{repo}", seen=seen, do=f"Check the name. {token}") from None
    except errors.EntryNotFoundError as error:
        raise QwenNvfp4Error(f"{repo}: a file is missing on the hub", seen=_first_line(error)) from None
    except errors.OfflineModeIsEnabled:
        raise QwenNvfp4Error(
            f"{repo} is needed from the hub", seen="offline mode", do="Unset HF_HUB_OFFLINE."
        ) from None
    except errors.HfHubHTTPError as error:
        what, status = f"{repo}: the hub answered {_status(error)}", _status(error)
        if status is None or status == 429 or status >= 500:
            raise HubUnreachableError(what, do="Try again later.") from None
        raise QwenNvfp4Error(what, do=token if status in (401, 403) else "Check name and revision.") from None
    except errors.HFValidationError as error:
        raise UsageError(f"hub id {repo!r}", seen=_first_line(error), expected="owner/name") from None
    except (httpx.TransportError, ConnectionError, TimeoutError) as error:
        raise _unreachable(repo, error) from None
    except Exception as error:
        # The library has had two HTTP clients; both name these errors alike.
        if any(base.__name__ == "TransportError" for base in type(error).__mro__):
            raise _unreachable(repo, error) from None
        raise


def _unreachable(repo: str, error: Exception) -> HubUnreachableError:
    do = "Check the network, HF_ENDPOINT and proxies; with a complete download, set HF_HUB_OFFLINE=1."
    return HubUnreachableError(
        f"{repo}: the hub cannot be reached", seen=_first_line(error) or type(error).__name__, do=do
    )


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return re.sub(r"^\[Errno -?\d+\] ", "", line)[:200]


def api(token: str | None = None) -> HfApi:
    """The library's client; without a token it uses a saved one."""
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="qwen-nvfp4-serve")


def is_commit(revision: str | None) -> bool:
    """True for 40 hex digits, which name a commit for good."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def find_repo(name: str, revision: str | None = None, *, token: str | None = None) -> Repo:
    """The repository's files at `revision` (None: its main branch). Raises QwenNvfp4Error or UsageError."""
    client = api(token)
    with plain_errors(name, revision, has_token=token is not None):
        commit = revision if is_commit(revision) else client.model_info(name, revision=revision or "main").sha
        if commit is None:
            raise QwenNvfp4Error(f"{name}: the hub names no commit", do="Try again later.")
        files = _list_files(client, name, commit)
    return Repo(name, commit, {file.name: file for file in files})


def _list_files(client: HfApi, name: str, commit: str) -> list[RepoFile]:
    from huggingface_hub import errors
    from huggingface_hub.hf_api import RepoFile as Entry

    try:
        tree = [
            entry for entry in client.list_repo_tree(name, recursive=True, revision=commit) if isinstance(entry, Entry)
        ]
    except errors.HfHubHTTPError as error:
        if _status(error) not in (404, 405, 501):
            raise
        # A mirror without listings: take the names from the repository's entry and ask for each file.
        siblings = client.model_info(name, revision=commit).siblings or ()
        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(lambda entry: _ask_for_file(client, name, commit, entry.rfilename), siblings))
    hashes = {entry.path: entry.lfs.sha256 if entry.lfs else None for entry in tree}
    return [RepoFile(e.path, e.size, hashes[e.path] or e.blob_id, hashes[e.path]) for e in tree]


def _ask_for_file(client: HfApi, name: str, commit: str, file: str) -> RepoFile:
    from huggingface_hub import get_hf_file_metadata

    url = f"{client.endpoint}/{name}/resolve/{commit}/{quote(file)}"
    found = get_hf_file_metadata(url, token=client.token)
    if found.size is None or not found.etag or "/" in found.etag:
        raise QwenNvfp4Error(f"{name}: the hub says neither size nor identity of {file}", do="Try again later.")
    return RepoFile(file, found.size, found.etag, found.etag if re.fullmatch("[0-9a-f]{64}", found.etag) else None)


def file_request(repo: Repo, name: str, token: str | None) -> tuple[str, dict[str, str]]:
    """URL and headers of a GET for one file at the repository's commit, uncompressed so that offsets count."""
    url = f"{api(token).endpoint}/{repo.name}/resolve/{repo.commit}/{quote(name)}"
    headers: dict[str, str] = import_module("huggingface_hub.utils").build_hf_headers(token=token)
    return url, {**headers, "Accept-Encoding": "identity"}


class RangeReader:
    """Reads byte ranges of a repository's files at one commit."""

    def __init__(self, repo: Repo, token: str | None) -> None:
        self._repo, self._token = repo, token

    def read(self, name: str, start: int, size: int) -> bytes:
        """`size` bytes of file `name` from `start`; fewer at its end. Raises QwenNvfp4Error."""
        url, headers = file_request(self._repo, name, self._token)
        headers["Range"] = f"bytes={start}-{start + size - 1}"
        utils = import_module("huggingface_hub.utils")  # it exports these without saying so to type checkers
        with plain_errors(self._repo.name, self._repo.commit, has_token=self._token is not None):
            response = utils.get_session().get(url, headers=headers, timeout=TIMEOUT_S)
            utils.hf_raise_for_status(response)
        data: bytes = response.content
        return data if response.status_code == 206 else data[start : start + size]


def open_repo(name: str, *, revision: str | None = None, token: str | None = None) -> Source:
    """The parts of a checkpoint on the hub; downloads its JSON files and headers only. Raises like `find_repo`."""
    repo = find_repo(name, revision, token=token)
    reader = RangeReader(repo, token)
    config = _read_json(repo, reader, "config.json")
    if config is None:
        raise UsageError(f"{name} at {repo.commit[:12]}", seen="no config.json", expected="a checkpoint")
    index = _read_json(repo, reader, INDEX_NAME)
    present = [file for file in repo.files if file.endswith(".safetensors") and "/" not in file]
    with ThreadPoolExecutor(WORKERS) as pool:
        shards = tuple(pool.map(lambda shard: _read_shard(repo, reader, shard), shard_names(index, present)))
    return Source(
        place=name,
        config=config,
        hf_quant=_read_json(repo, reader, "hf_quant_config.json"),
        index=index,
        shards=shards,
        read_scalars=lambda tensors: _read_scalars(reader, tensors),
        scalars_are_cheap=False,
    )


def _read_json(repo: Repo, reader: RangeReader, name: str) -> Mapping[str, object] | None:
    file = repo.files.get(name)
    if file is None:
        return None
    if file.size_bytes > MAX_JSON_BYTES:
        raise UsageError(f"{repo.name}/{name}", seen=f"{file.size_bytes:,} bytes", expected="a small JSON file")
    return parse_json(reader.read(name, 0, max(1, file.size_bytes)), f"{repo.name}/{name}")


def _read_shard(repo: Repo, reader: RangeReader, name: str) -> Shard:
    file = repo.files.get(name)
    if file is None:
        return Shard(name=name, size_bytes=None, tensors={}, reason="is not in the repository")
    try:
        first = reader.read(name, 0, FIRST_READ_BYTES)
        length = header_length(first, file.size_bytes)
        text = first[LENGTH_BYTES : LENGTH_BYTES + length]
        if len(text) < length:
            text += reader.read(name, LENGTH_BYTES + len(text), length - len(text))
        tensors = parse_header(text, name, file.size_bytes)
    except HeaderError as error:
        return Shard(name=name, size_bytes=file.size_bytes, tensors={}, reason=error.reason)
    data_bytes = file.size_bytes - LENGTH_BYTES - length
    return Shard(name=name, size_bytes=file.size_bytes, tensors=tensors, data_bytes=data_bytes)


def _read_scalars(reader: RangeReader, tensors: Sequence[Tensor]) -> list[float | None]:
    def one(tensor: Tensor) -> float | None:
        return decode_scalar(tensor.dtype, reader.read(tensor.shard, tensor.start, min(8, tensor.size_bytes)))

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(one, tensors))
