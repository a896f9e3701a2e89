"""A census counts every byte, the served namespace first, and touches nothing but what is ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omlx.cache.block_file import Unreadable
from omlx.disk import census
from omlx.disk.block_files import BlockFiles
from omlx.disk.census import CensusSlice
from omlx.disk.directory import CacheDirectory
from omlx.disk.layout import BLOCKS, LOCK, SIDECARS, temporary_path
from tests.disk.faulty import (
    NAMESPACE,
    OTHER,
    FaultyFileSystem,
    acquired,
    below,
    block_files,
    identity,
    payload,
)


@pytest.fixture
def directory(tmp_path: Path) -> CacheDirectory:
    return acquired(tmp_path)


@pytest.fixture
def files(directory: CacheDirectory) -> BlockFiles:
    return block_files(directory)


def whole(files: BlockFiles) -> CensusSlice:
    """All slices as one."""
    parts = list(files.census())
    return CensusSlice(
        tuple(file for part in parts for file in part.found),
        tuple(file for part in parts for file in part.others),
        tuple(file for part in parts for file in part.damaged),
        sum(part.foreign_bytes for part in parts),
        sum(part.skipped for part in parts),
    )


def counted(part: CensusSlice) -> int:
    files = [*part.found, *part.others]
    return sum(file.nbytes for file in files) + part.foreign_bytes


def on_disk(root: Path) -> int:
    return sum((root / name).lstat().st_size for name in below(root))


def rename_format(path: Path, form: bytes) -> None:
    content = path.read_bytes()
    assert b'"format":"3"' in content
    path.write_bytes(content.replace(b'"format":"3"', b'"format":"' + form + b'"'))


def test_an_empty_directory_holds_the_lock(files: BlockFiles, tmp_path: Path) -> None:
    part = whole(files)

    assert not part.found
    assert part.foreign_bytes == (tmp_path / LOCK).stat().st_size > 0


def test_every_byte_is_counted_once(
    files: BlockFiles, directory: CacheDirectory, tmp_path: Path
) -> None:
    """B56: what we count is what du counts."""
    files.write(identity(0), payload())
    files.write(identity(1), payload())
    block_files(directory, OTHER).write(identity(0, OTHER), payload())
    deep = tmp_path / BLOCKS / "not a namespace" / "deeper" / "still"
    deep.mkdir(parents=True)
    (deep / "theirs").write_bytes(b"x" * 1000)
    (tmp_path / "notes.txt").write_bytes(b"x" * 100)
    (tmp_path / BLOCKS / NAMESPACE / "stray").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to("/etc")

    part = whole(files)

    assert (len(part.found), len(part.others)) == (2, 1)
    assert counted(part) == on_disk(tmp_path)


def test_the_served_namespace_comes_first_and_is_said_to_be_complete(
    files: BlockFiles, directory: CacheDirectory
) -> None:
    other = block_files(directory, OTHER)
    for seed in range(4):
        other.write(identity(seed, OTHER), payload())
        files.write(identity(seed), payload())

    parts = list(files.census())

    (complete,) = [i for i, part in enumerate(parts) if part.own_complete]
    assert sum(len(part.found) for part in parts[: complete + 1]) == 4
    assert not any(part.others for part in parts[: complete + 1])
    assert sum(len(part.others) for part in parts[complete + 1 :]) == 4
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_slice_is_small(
    files: BlockFiles, directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(census, "SLICE_FILES", 3)
    other = block_files(directory, OTHER)
    for seed in range(10):
        files.write(identity(seed), payload())
        other.write(identity(seed, OTHER), payload())

    parts = list(files.census())

    assert max(len(part.found) + len(part.others) for part in parts) == 3
    assert sum(len(part.found) for part in parts) == 10
    assert sum(len(part.others) for part in parts) == 10


def test_reads_and_writes_between_two_slices_are_served(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(census, "SLICE_FILES", 1)
    for seed in range(5):
        files.write(identity(seed), payload())

    for _ in files.census():
        assert files.read(identity(2))
        files.write(identity(3), payload(3))
        files.remove(identity(4).block_hash)

    assert len(whole(files).found) == 4


# ── others ───────────────────────────────────────────────────────────────────────────────────


def test_another_namespaces_file_tells_its_name_and_its_parent(
    files: BlockFiles, directory: CacheDirectory, tmp_path: Path
) -> None:
    """B43, B55: it may be evicted, leaf first, and is not deleted because of us."""
    name = identity(0, OTHER)
    size = block_files(directory, OTHER).write(name, payload())

    (found,) = whole(files).others

    assert (found.block_hash, found.parent) == (name.block_hash, name.parent)
    assert found.nbytes == size
    assert (tmp_path / found.path).stat().st_mtime == found.used_at


def test_another_format_is_kept_and_counted_in_any_namespace(
    files: BlockFiles, directory: CacheDirectory
) -> None:
    """B55."""
    other = block_files(directory, OTHER)
    for one, name in [(files, identity(0)), (other, identity(0, OTHER))]:
        one.write(name, payload())
        rename_format(one.path(name.block_hash), b"4")

    part = whole(files)

    assert (len(part.others), len(part.found), len(part.damaged)) == (2, 0, 0)
    assert all(file.block_hash is None and file.parent is None for file in part.others)
    assert files.path(identity(0).block_hash).exists()


def test_a_damaged_file_of_another_namespace_is_the_first_to_go_and_not_now(
    files: BlockFiles, directory: CacheDirectory
) -> None:
    other = block_files(directory, OTHER)
    other.write(identity(0, OTHER), payload())
    path = other.path(identity(0, OTHER).block_hash)
    path.write_bytes(b"\0" * 100)

    (found,) = whole(files).others

    assert (found.nbytes, found.parent) == (100, None)
    assert path.exists()


def test_another_file_is_removed_by_its_path_and_nothing_else_is(
    files: BlockFiles, directory: CacheDirectory, tmp_path: Path
) -> None:
    block_files(directory, OTHER).write(identity(0, OTHER), payload())
    (found,) = whole(files).others

    files.discard(found.path)
    files.discard(found.path)

    assert not (tmp_path / found.path).exists()
    for path in [LOCK, "../x", f"{BLOCKS}/{OTHER}/../../lock", f"{found.path}/..", ""]:
        with pytest.raises(AssertionError, match="no block's name"):
            files.discard(path)


# ── damage ───────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_file_goes_and_says_why(files: BlockFiles) -> None:
    """B46."""
    for seed, content in enumerate([b"", b"\0" * 4096, b"\xff" * 4096]):
        files.write(identity(seed), payload())
        files.path(identity(seed).block_hash).write_bytes(content)

    part = whole(files)

    assert sorted(damage.reason[:20] for damage in part.damaged) == [
        "0 bytes are too few ",
        "a header of 18446744",
        "the header is damage",
    ]
    assert not whole(files).damaged


def test_a_sound_file_that_was_renamed_meanwhile_is_not_taken_for_the_damaged_one(
    tmp_path: Path,
) -> None:
    fs = FaultyFileSystem()
    files = block_files(acquired(tmp_path, fs))
    path = files.path(identity().block_hash)

    def read() -> None:
        with pytest.raises(Unreadable):
            files.read(identity())

    for look in (lambda: whole(files), read):
        files.write(identity(), payload())
        path.write_bytes(b"\0" * 100)

        def replace(kind: str, at: str) -> None:
            if kind == "close" and at == str(path):
                fs.before = None
                files.write(identity(), payload(5))

        fs.before = replace
        look()

        assert files.read(identity())


def test_a_block_among_the_checkpoints_goes(files: BlockFiles, tmp_path: Path) -> None:
    files.write(identity(), payload())
    path = files.path(identity().block_hash)
    target = tmp_path / BLOCKS / NAMESPACE / SIDECARS / path.parent.name / path.name
    target.parent.mkdir(parents=True)
    path.rename(target)

    (damage,) = whole(files).damaged

    assert damage.reason == "a block among the checkpoints, or a checkpoint among the blocks"
    assert not target.exists()


def test_a_block_in_another_shard_is_not_ours(files: BlockFiles) -> None:
    """It would be listed and never found."""
    files.write(identity(), payload())
    path = files.path(identity().block_hash)
    shard = "00" if path.parent.name != "00" else "01"
    target = path.parent.parent / shard / path.name
    target.parent.mkdir()
    path.rename(target)

    part = whole(files)

    assert not part.found
    assert not part.damaged
    assert target.exists()


# ── temporaries ──────────────────────────────────────────────────────────────────────────────

FORMER = f"{os.getpid()}-{'0' * 16}"
"""With our own number, as every server in a container has."""


def temporary(files: BlockFiles, owner: str) -> Path:
    path = Path(temporary_path(str(files.path(identity(9).block_hash)), owner))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    return path


def test_what_a_former_process_left_half_done_is_swept_in_every_namespace(
    files: BlockFiles, directory: CacheDirectory
) -> None:
    """B43, B46."""
    left = [temporary(files, FORMER), temporary(block_files(directory, OTHER), FORMER)]
    for path in left:
        os.utime(path, (directory.since - 1, directory.since - 1))

    part = whole(files)

    assert not any(path.exists() for path in left)
    assert counted(part) == on_disk(Path(directory.root))


def test_what_somebody_writes_in_spite_of_our_lock_is_left_alone_and_counted(
    files: BlockFiles, directory: CacheDirectory
) -> None:
    """B43."""
    path = temporary(files, FORMER)
    os.utime(path, (directory.since + 1, directory.since + 1))

    part = whole(files)

    assert path.exists()
    assert counted(part) == on_disk(Path(directory.root))


def test_without_a_lock_nothing_is_swept(tmp_path: Path) -> None:
    files = block_files(CacheDirectory(tmp_path))
    path = temporary(files, FORMER)
    os.utime(path, (1, 1))

    whole(files)

    assert path.exists()


def test_what_we_are_writing_is_not_swept(tmp_path: Path) -> None:
    """B43: a census is taken while the writer works."""
    fs = FaultyFileSystem()
    files = block_files(acquired(tmp_path, fs))
    seen = 0

    def take_one(kind: str, path: str) -> None:
        nonlocal seen
        if kind == "writev":
            fs.before = None
            assert not whole(files).found
            seen += 1

    fs.before = take_one

    files.write(identity(), payload())

    assert seen == 1
    assert files.read(identity())
