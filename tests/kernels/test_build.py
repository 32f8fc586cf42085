"""Names, caching and errors of kernel builds, with a stand-in for nvcc."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_nvfp4_serve.errors import QwenNvfp4Error, UnsupportedHostError, UsageError
from qwen_nvfp4_serve.kernels import build

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build-kernels"


@pytest.fixture
def library(tmp_path: Path) -> build.KernelLibrary:
    (tmp_path / "one.cu").write_text("// first")
    (tmp_path / "two.cuh").write_text("// second")
    return build.KernelLibrary("one", tmp_path, ("one.cu", "two.cuh"))


def stand_in(folder: Path, body: str) -> str:
    """A program that nvcc is replaced by."""
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


WRITES_TARGET = 'while [ "$1" != "-o" ]; do shift; done; echo built > "$2"'


def test_digest_follows_every_source(library: build.KernelLibrary) -> None:
    before = library.digest()
    (library.folder / "two.cuh").write_text("// changed")
    assert library.digest() != before


def test_file_name_says_which_cards(library: build.KernelLibrary) -> None:
    assert library.file_name().endswith("-all.so")
    assert library.file_name(("90a",)).endswith("-90a.so")


def test_compile_command_has_machine_code_for_each_card(library: build.KernelLibrary) -> None:
    command = build.compile_command(library, "nvcc", Path("out.so"))
    assert [part for part in command if part.startswith("-gencode")] == [
        f"-gencode=arch=compute_{card},code=sm_{card}" for card in ("80", "86", "89", "90a", "120a", "121a")
    ]


@pytest.mark.parametrize("cards", [(), ("75",), ("120a", "nonsense")])
def test_compile_command_unknown_cards_are_refused(library: build.KernelLibrary, cards: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="cards"):
        build.compile_command(library, "nvcc", Path("out.so"), cards)


def test_build_writes_once_and_reuses(library: build.KernelLibrary, tmp_path: Path) -> None:
    target = build.build(library, tmp_path / "cache", nvcc=stand_in(tmp_path, WRITES_TARGET))
    assert target.read_text() == "built\n"
    failing = stand_in(tmp_path, "exit 1")
    assert build.build(library, tmp_path / "cache", nvcc=failing) == target


def test_build_failure_shows_the_compilers_words_and_leaves_nothing(
    library: build.KernelLibrary, tmp_path: Path
) -> None:
    failing = stand_in(tmp_path, "echo 'one.cu(3): error: no such thing' >&2; exit 2")
    with pytest.raises(QwenNvfp4Error, match="no such thing"):
        build.build(library, tmp_path / "cache", nvcc=failing)
    assert list((tmp_path / "cache").iterdir()) == []


def test_build_without_nvcc_says_what_to_do(
    library: build.KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedHostError, match="CUDA 13"):
        build.build(library, tmp_path / "cache")


def test_find_prefers_the_build_for_all_cards_and_ignores_stale_ones(
    library: build.KernelLibrary, tmp_path: Path
) -> None:
    assert build.find(library, (tmp_path,)) is None
    (tmp_path / "one-000000000000-all.so").touch()
    assert build.find(library, (tmp_path,)) is None
    some, every = tmp_path / library.file_name(("90a",)), tmp_path / library.file_name()
    some.touch()
    assert build.find(library, (tmp_path,)) == some
    every.touch()
    assert build.find(library, (tmp_path,)) == every


def test_load_of_what_was_never_built_says_what_to_run(library: build.KernelLibrary) -> None:
    with pytest.raises(UnsupportedHostError, match="build-kernels"):
        build.load(library)


def test_main_builds_into_the_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, WRITES_TARGET)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert build.main([str(tmp_path / "out"), "--cards", "120a"]) == 0
    assert capsys.readouterr().out.strip().endswith("-120a.so")


def test_script_builds_from_a_checkout_with_a_python_that_has_no_package_of_ours(tmp_path: Path) -> None:
    stand_in(tmp_path, WRITES_TARGET)
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, tmp_path / "out", "--cards", "120a"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(bare), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*-120a.so"))) == len(build.LIBRARIES)
