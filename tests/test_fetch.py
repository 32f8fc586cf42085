"""Downloads from a hub on loopback: whole, interrupted, contended, refused and out of space."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tests.checkpoint_files import Shape, write_config, write_shard
from tests.hub_stand_in import COMMIT, REPO, Hub, serve

from qwen_nvfp4_serve import blobs
from qwen_nvfp4_serve import fetch as fetching
from qwen_nvfp4_serve.blobs import Meter
from qwen_nvfp4_serve.errors import QwenNvfp4Error, UsageError
from qwen_nvfp4_serve.fetch import Fetched, Progress, fetch, missing_bytes

SHARDS = 3
SHARD_BYTES = 400_000
RUN = """
import sys
from pathlib import Path
from qwen_nvfp4_serve.fetch import fetch
print(fetch(sys.argv[1], cache=Path(sys.argv[2])).folder)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A sharded checkpoint with random data, and files that no server reads."""
    folder, generator = tmp_path_factory.mktemp("repo"), random.Random(4)
    write_config(folder)
    names: dict[str, str] = {}
    for index in range(SHARDS):
        shard = f"model-0000{index + 1}-of-0000{SHARDS}.safetensors"
        tensor = f"model.language_model.layers.{index}.mlp.down_proj.weight"
        tensors: dict[str, Shape] = {tensor: ("BF16", (SHARD_BYTES // 2,))}
        write_shard(folder / shard, tensors)
        data = (folder / shard).read_bytes()
        (folder / shard).write_bytes(data[:-SHARD_BYTES] + generator.randbytes(SHARD_BYTES))
        names[tensor] = shard
    index = {"metadata": {"total_size": SHARDS * SHARD_BYTES}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    (folder / "modeling.py").write_text("print('never fetched')")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with that checkpoint, at which the library in this process points."""
    with serve(files) as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        monkeypatch.setattr(fetching, "DISK_MARGIN_BYTES", 0)
        yield running


def get(cache: Path, **values: Any) -> Fetched:
    """Fetch with a short interval."""
    return fetch(REPO, cache=cache, **{"interval_s": 0.02} | values)


def same(folder: Path, files: dict[str, bytes]) -> bool:
    """True when the snapshot holds exactly the wanted files, byte for byte."""
    wanted = {name: data for name, data in files.items() if not name.endswith((".bin", ".py"))}
    return {path.name: path.read_bytes() for path in folder.iterdir()} == wanted


def leftovers(cache: Path) -> list[str]:
    """Files in the blob folder that are no whole blob."""
    return [path.name for path in cache.glob("*/blobs/*") if len(path.name) not in (40, 64)]


def test_fetch_whole_repository_matches_byte_for_byte(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    seen: list[Progress] = []
    hub.chunk_delay_s = 0.002
    found = get(tmp_path, on_progress=seen.append)
    assert same(found.folder, files)
    assert found.commit == COMMIT
    assert leftovers(tmp_path) == []
    assert found.downloaded_bytes == sum(
        len(data) for name, data in files.items() if not name.endswith((".bin", ".py"))
    )
    assert [entry.done_bytes for entry in seen] == sorted(entry.done_bytes for entry in seen)
    assert any(entry.rate_bytes_per_s > 0 and entry.eta_s is not None for entry in seen)
    assert not any(path.endswith((".bin", ".py")) for path in hub.sent_requests)


def test_fetch_result_is_what_the_library_finds_offline(tmp_path: Path, hub: Hub) -> None:
    found = get(tmp_path)
    library = huggingface_hub.snapshot_download(REPO, cache_dir=tmp_path, local_files_only=True)
    assert Path(library) == found.folder


def test_fetch_from_a_mirror_without_listings(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    hub.listings = False
    found = get(tmp_path)
    assert same(found.folder, files)
    library = huggingface_hub.snapshot_download(REPO, cache_dir=tmp_path, local_files_only=True)
    assert Path(library) == found.folder


def test_fetch_again_downloads_nothing(tmp_path: Path, hub: Hub) -> None:
    get(tmp_path)
    hub.log.clear()
    assert get(tmp_path).downloaded_bytes == 0
    assert hub.sent_requests == []
    assert missing_bytes(REPO, cache=tmp_path) == 0


def test_fetch_pinned_and_complete_needs_no_hub(tmp_path: Path, hub: Hub) -> None:
    get(tmp_path, revision=COMMIT)
    hub.status = 500
    hub.log.clear()
    assert get(tmp_path, revision=COMMIT).commit == COMMIT
    assert hub.log == []


def test_fetch_unreachable_hub_uses_the_complete_copy_and_says_so(tmp_path: Path, hub: Hub) -> None:
    get(tmp_path)
    hub.status = 503
    notice = get(tmp_path).notice
    assert notice is not None
    assert "copy" in notice


def test_fetch_offline_without_a_copy_is_refused(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(QwenNvfp4Error, match="not complete"):
        get(tmp_path, offline=True)
    assert hub.log == []


def test_fetch_offline_with_a_damaged_copy_is_refused(tmp_path: Path, hub: Hub) -> None:
    folder = get(tmp_path).folder
    assert get(tmp_path, offline=True).folder == folder
    blob = (folder / f"model-00001-of-0000{SHARDS}.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:1000])
    with pytest.raises(QwenNvfp4Error, match="not complete"):
        get(tmp_path, offline=True)


def test_fetch_damaged_copy_is_mended_where_the_hub_answers(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    folder = get(tmp_path, revision=COMMIT).folder
    blob = (folder / f"model-00001-of-0000{SHARDS}.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:1000])
    assert missing_bytes(REPO, cache=tmp_path) == len(files[f"model-00001-of-0000{SHARDS}.safetensors"])
    assert same(get(tmp_path, revision=COMMIT).folder, files)


@pytest.mark.parametrize("links", range(SHARDS + 3))
def test_fetch_ended_between_two_links_is_not_taken_for_complete(
    tmp_path: Path, hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, links: int
) -> None:
    made: list[Path] = []

    def ending(link: Path, target: Path) -> None:
        if len(made) == links:
            raise KeyboardInterrupt
        made.append(link)
        os.symlink(target, link)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", ending)
        with pytest.raises(KeyboardInterrupt):
            get(tmp_path, revision=COMMIT)
    with pytest.raises(QwenNvfp4Error, match="not complete"):
        get(tmp_path, revision=COMMIT, offline=True)
    assert same(get(tmp_path, revision=COMMIT).folder, files)


def test_fetch_of_a_complete_cache_writes_nothing(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    get(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    for name in ("symlink_to", "write_text", "replace", "touch"):
        monkeypatch.setattr(Path, name, refuse)
    assert get(tmp_path).commit == COMMIT


def test_fetch_wrong_link_is_replaced(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    link = get(tmp_path).folder / "config.json"
    link.unlink()
    link.symlink_to("../../blobs/of-another-commit")
    assert same(get(tmp_path).folder, files)
    link.unlink()
    link.write_text("no link at all")
    assert same(get(tmp_path).folder, files)
    assert leftovers(tmp_path) == []


def test_fetch_snapshot_that_fails_its_check_gets_no_name(
    tmp_path: Path, hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = f"model-00001-of-0000{SHARDS}.safetensors"
    hub.files = {name: data for name, data in files.items() if name != shard}
    with pytest.raises(QwenNvfp4Error, match=shard):
        get(tmp_path)
    assert not list(tmp_path.glob("*/refs/*"))


def test_fetch_branch_that_moved_is_followed(
    tmp_path: Path, hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = get(tmp_path).folder
    newer = files | {"generation_config.json": b'{"temperature": 1}'}
    hub.files, commit = newer, "f" * 40
    monkeypatch.setattr("tests.hub_stand_in.COMMIT", commit)
    found = get(tmp_path)
    assert (found.commit, found.downloaded_bytes) == (commit, len(newer["generation_config.json"]))
    assert same(found.folder, newer)
    assert same(before, files)
    assert get(tmp_path, offline=True).commit == commit
    assert get(tmp_path, revision=COMMIT, offline=True).folder == before


def test_fetch_connection_that_breaks_is_resumed(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    hub.cut_after_bytes = 150_000
    assert same(get(tmp_path).folder, files)
    assert any(wanted and wanted != "bytes=0-" for _, path, wanted in hub.log if "/resolve/" in path)


def test_fetch_server_without_ranges_begins_again(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    first = next(
        blob
        for blob in fetching._wanted(fetching.find_repo(REPO), tmp_path / f"models--{REPO.replace('/', '--')}").values()
        if blob.sha256
    )
    first.path.parent.mkdir(parents=True)
    first.partial.write_bytes(b"rubbish" * 1000)
    hub.ranges = False
    assert same(get(tmp_path).folder, files)


def test_fetch_damaged_data_is_removed_and_refused(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    hub.damage = True
    with pytest.raises(QwenNvfp4Error, match="damaged"):
        get(tmp_path)
    assert not list(tmp_path.glob("*/snapshots/*"))
    hub.damage = False
    assert same(get(tmp_path).folder, files)


def test_fetch_partial_of_other_bytes_is_given_up(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    store = tmp_path / f"models--{REPO.replace('/', '--')}"
    blob = next(blob for blob in fetching._wanted(fetching.find_repo(REPO), store).values() if blob.sha256)
    blob.path.parent.mkdir(parents=True)
    blob.partial.write_bytes(bytes(1000))
    assert same(get(tmp_path).folder, files)


@pytest.mark.parametrize(
    ("answer", "token", "error", "words"),
    [
        ((401, None), None, QwenNvfp4Error, "HF_TOKEN"),
        ((401, "RepoNotFound"), None, QwenNvfp4Error, "Set HF_TOKEN"),
        ((401, "RepoNotFound"), "hf_bad", QwenNvfp4Error, "Check HF_TOKEN"),
        ((403, "GatedRepo"), "hf_ok", QwenNvfp4Error, "gated"),
        ((403, "GatedRepo"), None, QwenNvfp4Error, "Ask for access"),
        ((404, "RepoNotFound"), None, QwenNvfp4Error, "Check the name"),
        ((404, "RevisionNotFound"), None, UsageError, "no revision"),
        ((500, None), None, QwenNvfp4Error, "500"),
        ((429, None), None, QwenNvfp4Error, "429"),
    ],
)
def test_fetch_refusal_of_the_hub_is_one_line(
    tmp_path: Path, hub: Hub, *, answer: tuple[int, str | None], token: str | None, error: type[Exception], words: str
) -> None:
    hub.status, hub.error_code = answer
    with pytest.raises(error, match=words) as caught:
        get(tmp_path, token=token)
    assert "\n" not in str(caught.value)
    assert "hf_bad" not in str(caught.value)
    assert not list(tmp_path.glob("*/snapshots/*"))


def test_fetch_token_is_sent(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    hub.token = "hf_right"
    assert same(get(tmp_path, token="hf_right").folder, files)


def test_fetch_nobody_listening_is_one_line(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(QwenNvfp4Error, match="cannot be reached"):
        get(tmp_path)


def test_fetch_cache_that_cannot_be_a_folder_is_one_line(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "hub").write_text("in the way")
    with pytest.raises(QwenNvfp4Error, match="cannot be used"):
        get(tmp_path / "hub")


def test_fetch_disk_that_is_too_small_is_refused_before_the_first_byte(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(QwenNvfp4Error, match="not enough disk"):
        get(tmp_path)
    assert hub.sent_requests == []


def test_fetch_disk_that_fills_up_leaves_nothing_as_if_complete(
    tmp_path: Path, hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = blobs._stream

    def filling(repo: Any, blob: Any, file: Any, **values: Any) -> None:
        file.write(b"\0" * 10)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blobs, "_stream", filling)
    with pytest.raises(QwenNvfp4Error, match="full") as caught:
        get(tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*/snapshots/*"))
    assert all(name.endswith(".part") for name in leftovers(tmp_path))
    assert len(leftovers(tmp_path)) == len(list(tmp_path.glob("*/blobs/*")))
    monkeypatch.setattr(blobs, "_stream", whole)
    for part in tmp_path.glob("*/blobs/*.part"):
        part.unlink()
    assert same(get(tmp_path).folder, files)


def start(hub: Hub, cache: Path) -> subprocess.Popen[str]:
    """A fetch in a process of its own."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", RUN, REPO, str(cache)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_fetch_killed_twenty_times_ends_identical(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    generator, progress = random.Random(20), []
    hub.chunk_delay_s = 0.05
    for _ in range(20):
        process = start(hub, tmp_path)
        deadline = time.monotonic() + 30
        hub.log.clear()
        while not hub.sent_requests and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.15))
        process.kill()
        process.communicate()
        progress.append(sum(path.stat().st_size for path in tmp_path.glob("*/blobs/*")))
    assert progress == sorted(progress)
    hub.chunk_delay_s = 0.0
    process = start(hub, tmp_path)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert same(Path(out.strip()), files)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_fetch_two_at_once_end_identical_and_share_the_work(tmp_path: Path, hub: Hub, files: dict[str, bytes]) -> None:
    hub.chunk_delay_s = 0.02
    processes = [start(hub, tmp_path) for _ in range(2)]
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert same(Path(out.strip()), files)
    shards = [path for path in hub.sent_requests if path.endswith(".safetensors")]
    assert len(shards) == SHARDS
    assert leftovers(tmp_path) == []


def test_meter_rate_and_time_left_follow_the_bytes() -> None:
    meter = Meter(total_bytes=1000, done_bytes=200)
    assert meter.state()[3] is None
    meter.add(300)
    time.sleep(0.02)
    done, total, rate, left = meter.state()
    assert (done, total) == (500, 1000)
    assert rate > 0
    assert left == pytest.approx(500 / rate)
