"""Whatever lies under the root: links lead nowhere, strange names stay, a crash costs a miss."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from omlx.cache.block_file import Unreadable
from omlx.disk.block_files import BlockFiles
from omlx.disk.layout import BLOCKS, SIDECARS
from omlx.disk.whole_files import NotAFile, Obstructed
from tests.disk.faulty import (
    NAMESPACE,
    FaultyFileSystem,
    acquired,
    below,
    block_files,
    bytes_of,
    identity,
    payload,
)


@contextmanager
def scene() -> Iterator[tuple[BlockFiles, Path]]:
    """A directory of its own for each example."""
    with tempfile.TemporaryDirectory() as folder:
        directory = acquired(Path(folder))
        try:
            yield block_files(directory), Path(folder)
        finally:
            directory.release()


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return block_files(acquired(tmp_path / "root"))


# ── names ────────────────────────────────────────────────────────────────────────────────────

OURS = identity(5).block_hash.hex()
near_misses = st.sampled_from(
    [
        OURS,
        f"{OURS}.safetensors.tmp",
        f"{OURS}.SAFETENSORS",
        f"{OURS.upper()}.safetensors",
        f"{OURS[1:]}.safetensors",
        f"{OURS}0.safetensors",
        f"{OURS}.safetensors\n",
        f" {OURS}.safetensors",
        f"{OURS}.safetensors~",
        f".{OURS}.safetensors",
        f".{OURS}.1-{'0' * 16}.tmp",
        f".{OURS}.x-{'0' * 16}.{'1' * 16}.tmp",
        f".{OURS}.1-{'0' * 16}.{'1' * 16}.tmp2",
        f"{OURS}.1-{'0' * 16}.{'1' * 16}.tmp",
        "lock",
        SIDECARS,
        ".DS_Store",
        "-rf",
        "*",
    ]
)
any_names = st.binary(min_size=1, max_size=40).map(os.fsdecode)
names = (near_misses | any_names).filter(lambda n: "/" not in n and "\0" not in n)
folders = st.sampled_from(
    [
        "",
        BLOCKS,
        f"{BLOCKS}/{NAMESPACE}",
        f"{BLOCKS}/{NAMESPACE}/{OURS[:2]}",
        f"{BLOCKS}/{NAMESPACE}/{SIDECARS}",
        f"{BLOCKS}/{NAMESPACE}/{SIDECARS}/{OURS[:2]}",
        f"{BLOCKS}/{'e' * 16}/{OURS[:2]}",
        f"{BLOCKS}/{NAMESPACE}/{OURS[:2]}/{OURS}.safetensors",
    ]
)


@given(st.sets(st.tuples(folders, names), max_size=8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_names_that_are_not_ours_are_never_touched(
    strange: set[tuple[str, str]], as_folder: bool
) -> None:
    """K5."""
    with scene() as (files, root):
        files.write(identity(0), payload())
        made: list[Path] = []
        for folder, name in sorted(strange):
            path = root / folder / name
            taken = any(other in path.parents for other in made)
            if name in (".", "..") or taken or os.path.lexists(path):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if as_folder:
                path.mkdir()
                path = path / "inside"
            path.write_bytes(b"theirs")
            os.utime(path, (1, 1))
            made.append(path)

        parts = list(files.census())

        assert [file.identity for part in parts for file in part.found] == [identity(0)]
        assert all(path.read_bytes() == b"theirs" for path in made)
        foreign = sum(part.foreign_bytes for part in parts) - (root / "lock").stat().st_size
        assert foreign == 6 * len(made)


# ── links and other things that are no files ─────────────────────────────────────────────────


def link_to_a_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "theirs")


def link_to_a_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def dangling_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nowhere")


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def full_folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "theirs").write_bytes(b"theirs")


def listening_socket(path: Path, outside: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may have 100 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


THINGS = [link_to_a_file, link_to_a_folder, dangling_link, pipe, full_folder, listening_socket]


@pytest.mark.parametrize("make", THINGS)
def test_what_is_no_file_is_a_miss_and_stays(
    files: BlockFiles, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    """K5: nothing is followed, waited for, removed or replaced."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "theirs").write_bytes(b"theirs")
    path = files.path(identity().block_hash)
    path.parent.mkdir()
    make(path, outside)
    before = below(tmp_path)

    with pytest.raises(NotAFile):
        files.read(identity())
    with pytest.raises(Obstructed):
        files.write(identity(), payload())
    files.remove(identity().block_hash)
    parts = list(files.census())

    assert not any(part.found or part.damaged for part in parts)
    assert below(tmp_path) == before
    assert (outside / "theirs").read_bytes() == b"theirs"


def test_an_empty_folder_in_a_blocks_place_gives_way(files: BlockFiles) -> None:
    files.path(identity().block_hash).mkdir(parents=True)

    with pytest.raises(NotAFile):
        files.read(identity())
    files.write(identity(), payload())

    assert bytes_of(files.read(identity())) == bytes_of(payload())


@pytest.mark.parametrize("depth", range(3), ids=["blocks", "namespace", "shard"])
def test_a_link_in_a_folders_place_leads_nowhere(
    files: BlockFiles, tmp_path: Path, depth: int
) -> None:
    """K5: a whole tree that would be sound where it lies."""
    files.write(identity(), payload())
    folder = files.path(identity().block_hash).parents[2 - depth]
    folder.rename(tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")
    before = below(tmp_path)

    with pytest.raises(NotADirectoryError):
        files.read(identity())
    with pytest.raises(NotADirectoryError):
        files.write(identity(), payload())
    with pytest.raises(NotADirectoryError):
        files.remove(identity().block_hash)
    parts = list(files.census())

    assert not any(part.found or part.damaged for part in parts)
    assert below(tmp_path) == before


# ── a power cut ──────────────────────────────────────────────────────────────────────────────


def content(seed: int) -> bytes:
    with scene() as (files, _):
        files.write(identity(), payload(seed))
        return files.path(identity().block_hash).read_bytes()


NEW, OLD = content(0), content(7)


@given(st.integers(0, len(NEW) - 1), st.sampled_from(["nothing", "zeros", "old bytes", "ones"]))
@settings(deadline=None, max_examples=100)
def test_a_file_that_is_part_of_a_write_is_a_miss_and_goes(kept: int, rest: str) -> None:
    """B46: the name reached the disk, and ``kept`` bytes of the data. Why nothing is fsynced."""
    tail = {
        "nothing": b"",
        "zeros": bytes(len(NEW) - kept),
        "ones": b"\xff" * (len(NEW) - kept),
        "old bytes": OLD[kept:],
    }[rest]
    torn = NEW[:kept] + tail
    with scene() as (files, _):
        path = files.path(identity().block_hash)
        path.parent.mkdir()
        path.write_bytes(torn)

        if torn in (NEW, OLD):
            assert files.read(identity())
            return
        with pytest.raises(Unreadable):
            files.read(identity())
        assert not path.exists()


@given(st.integers(0, len(NEW) - 1), st.integers(1, 255))
@settings(deadline=None, max_examples=100)
def test_a_byte_that_changed_is_a_miss_unless_it_says_nothing(at: int, flip: int) -> None:
    """The block size and the kinds of layers are written for people who look."""
    torn = bytearray(NEW)
    torn[at] ^= flip
    with scene() as (files, _):
        path = files.path(identity().block_hash)
        path.parent.mkdir()
        path.write_bytes(torn)

        try:
            assert bytes_of(files.read(identity())) == bytes_of(payload(0))
            assert NEW.index(b"block_size") <= at < NEW.index(b"checksums")
        except Unreadable:
            assert not path.exists()


@pytest.mark.parametrize("grows", [False, True])
def test_a_file_that_changes_its_size_while_it_is_read_is_no_trouble(
    tmp_path: Path, grows: bool
) -> None:
    fs = FaultyFileSystem()
    files = block_files(acquired(tmp_path, fs))
    files.write(identity(), payload())
    path = files.path(identity().block_hash)

    def change(kind: str, _: str) -> None:
        if kind == "preadv":
            fs.before = None
            os.truncate(path, path.stat().st_size + (100 if grows else -10))

    fs.before = change

    if grows:
        assert bytes_of(files.read(identity())) == bytes_of(payload())
    else:
        with pytest.raises(Unreadable):
            files.read(identity())
        assert not path.exists()
