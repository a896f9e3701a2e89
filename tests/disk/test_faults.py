"""Each call of the system fails with each error, and no file is lost, torn or left half done."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from omlx.cache.block_file import Unreadable
from omlx.disk.block_files import BlockFiles
from omlx.disk.directory import CacheDirectoryLocked, CacheDirectoryUnusable
from omlx.disk.layout import BLOCKS, LOCK, temporary_path
from omlx.disk.whole_files import NoRoom
from tests.disk.faulty import (
    CODES,
    OTHER,
    FaultyFileSystem,
    acquired,
    below,
    block_files,
    bytes_of,
    identity,
    payload,
)

NAMES = {code: errno.errorcode[code] for code in CODES}


class Place(NamedTuple):
    root: Path
    fs: FaultyFileSystem
    files: BlockFiles
    owner: str


def make_place(root: Path) -> Place:
    fs = FaultyFileSystem()
    directory = acquired(root, fs)
    return Place(root, fs, block_files(directory, floor_bytes=1), directory.owner)


def check_closed(place: Place) -> None:
    assert list(place.fs.opened.values()) == [str(place.root / LOCK)], "a descriptor was leaked"


def temporaries(root: Path) -> list[str]:
    return [name for name in below(root) if name.endswith(".tmp")]


def new_block(place: Place) -> None:
    place.files.write(identity(1), payload(1))


def replaced_block(place: Place) -> None:
    place.files.write(identity(0), payload(7))


def block_in_small_pieces(place: Place) -> None:
    place.fs.chunk_bytes = 100
    try:
        place.files.write(identity(1), payload(1))
    finally:
        place.fs.chunk_bytes = None


def steps_of(tmp_path: Path, act: Callable[[Place], object]) -> list[str]:
    """The kinds of calls of a run in which nothing fails."""
    place = make_place(tmp_path / "clean")
    place.files.write(identity(0), payload(0))
    place.fs.watch()
    act(place)
    return [kind for kind, _ in place.fs.calls]


WRITES = [new_block, replaced_block, block_in_small_pieces]


def test_a_write_takes_the_steps_that_can_fail(tmp_path: Path) -> None:
    kinds = steps_of(tmp_path, new_block)

    assert {"lstat", "free_bytes", "mkdir", "open", "writev", "close", "rename"} <= set(kinds)
    assert steps_of(tmp_path / "pieces", block_in_small_pieces).count("writev") > 5


@pytest.mark.parametrize("code", CODES, ids=NAMES.get)
@pytest.mark.parametrize("act", WRITES)
def test_a_write_that_fails_anywhere_leaves_all_or_nothing(
    tmp_path: Path, act: Callable[[Place], object], code: int
) -> None:
    """B47."""
    for at in range(len(steps_of(tmp_path, act))):
        place = make_place(tmp_path / str(at))
        place.files.write(identity(0), payload(0))
        before = set(below(place.root))
        place.fs.watch(at, code)
        failed = False
        try:
            act(place)
        except OSError as error:
            failed = True
            assert isinstance(error, NoRoom) == (error.errno in (errno.ENOSPC, errno.EDQUOT))

        step = place.fs.calls[at]
        place.fs.watch()
        check_closed(place)
        assert temporaries(place.root) == [], step
        assert before <= set(below(place.root)), f"a sound file was lost: {step}"
        kept = bytes_of(place.files.read(identity(0)))
        old, new = bytes_of(payload(0)), bytes_of(payload(7))
        assert kept == (new if act is replaced_block and not failed else old), step
        if act is not replaced_block:
            if failed:
                with pytest.raises(FileNotFoundError):
                    place.files.read(identity(1))
            else:
                assert bytes_of(place.files.read(identity(1))) == bytes_of(payload(1)), step


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS], ids=NAMES.get)
def test_what_cant_even_be_unlinked_goes_at_the_next_census(tmp_path: Path, code: int) -> None:
    left = 0
    for at in range(len(steps_of(tmp_path, new_block))):
        place = make_place(tmp_path / str(at))
        place.fs.watch(at, code, always=["unlink"])
        with suppress(OSError):
            new_block(place)
        left += len(temporaries(place.root))

        place.fs.watch()
        list(place.files.census())

        check_closed(place)
        assert temporaries(place.root) == []
    assert left >= 3, "the open temporary, its bytes and its name failed in turn"


@pytest.mark.parametrize("code", CODES, ids=NAMES.get)
def test_a_read_that_fails_anywhere_loses_nothing(tmp_path: Path, code: int) -> None:
    """An error of the system says nothing about the file."""

    def read(place: Place) -> object:
        return place.files.read(identity(0))

    wanted = bytes_of(payload(0))
    for at in range(len(steps_of(tmp_path, read))):
        place = make_place(tmp_path / str(at))
        place.files.write(identity(0), payload(0))
        place.fs.watch(at, code)
        with suppress(OSError, Unreadable):
            assert bytes_of(place.files.read(identity(0))) == wanted

        place.fs.watch()
        check_closed(place)
        assert bytes_of(place.files.read(identity(0))) == wanted


def test_a_file_that_ends_before_its_size_has_not_proved_damaged(tmp_path: Path) -> None:
    """Its size says that there is more: it is the system that does not give it."""
    place = make_place(tmp_path)
    place.files.write(identity(0), payload(0))
    place.fs.chunk_bytes = 0

    with pytest.raises(OSError, match="in part only"):
        place.files.read(identity(0))
    parts = list(place.files.census())

    place.fs.chunk_bytes = None
    assert not any(part.found or part.damaged for part in parts)
    assert bytes_of(place.files.read(identity(0))) == bytes_of(payload(0))


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100])
def test_a_file_that_comes_in_small_pieces_is_read_whole(tmp_path: Path, chunk_bytes: int) -> None:
    place = make_place(tmp_path)
    place.files.write(identity(0), payload(0))
    place.fs.chunk_bytes = chunk_bytes

    assert bytes_of(place.files.read(identity(0))) == bytes_of(payload(0))


def furnish(place: Place) -> list[str]:
    """A bit of everything; returns what a census must never lose."""
    place.files.write(identity(0), payload(0))
    other = place.root / BLOCKS / OTHER / "ab" / f"{'ab' * 32}.safetensors"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"\0" * 100)
    (place.root / "notes").mkdir()
    (place.root / "notes" / "theirs.txt").write_text("theirs")
    (place.root / "link").symlink_to("/etc")
    kept = below(place.root)
    damaged = place.files.path(identity(1).block_hash)
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(b"\0" * 5000)
    dead = temporary_path(str(place.files.path(identity(2).block_hash)), "1-" + "0" * 16)
    Path(dead).parent.mkdir(exist_ok=True)
    Path(dead).write_bytes(b"half")
    os.utime(dead, (1, 1))
    return kept


def census_of(tmp_path: Path) -> list[tuple[str, str]]:
    place = make_place(tmp_path)
    furnish(place)
    place.fs.watch()
    list(place.files.census())
    return place.fs.calls


def test_a_census_takes_the_steps_that_can_fail(tmp_path: Path) -> None:
    kinds = {kind for kind, _ in census_of(tmp_path)}

    assert kinds == {"listdir", "open", "fstat", "preadv", "close", "lstat", "unlink"}


@pytest.mark.parametrize("code", CODES, ids=NAMES.get)
def test_a_census_that_fails_anywhere_loses_nothing(tmp_path: Path, code: int) -> None:
    for at in range(len(census_of(tmp_path / "clean"))):
        place = make_place(tmp_path / str(at))
        kept = furnish(place)
        place.fs.watch(at, code)
        with suppress(OSError):
            list(place.files.census())

        place.fs.watch()
        check_closed(place)
        assert set(kept) <= set(below(place.root))
        parts = list(place.files.census())
        assert [f.identity for part in parts for f in part.found] == [identity(0)]
        assert sorted(kept) == below(place.root), "what was to go has gone in the end"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE], ids=NAMES.get)
def test_a_census_without_descriptors_says_so_and_skips_nothing(tmp_path: Path, code: int) -> None:
    place = make_place(tmp_path)
    furnish(place)
    place.fs.watch(code=code, always=["open"])

    with pytest.raises(OSError, match="open files"):
        list(place.files.census())


@pytest.mark.parametrize("code", CODES, ids=NAMES.get)
def test_a_start_that_fails_anywhere_says_so_and_can_be_repeated(tmp_path: Path, code: int) -> None:
    clean = FaultyFileSystem()
    block_files(acquired(tmp_path / "clean", clean))
    for at in range(len(clean.calls)):
        fs = FaultyFileSystem()
        fs.watch(at, code)
        directory = None
        with suppress(OSError, CacheDirectoryUnusable, CacheDirectoryLocked):
            directory = acquired(tmp_path / str(at), fs)
            block_files(directory)

        fs.watch()
        if directory is not None:
            directory.release()
        assert not fs.opened
        block_files(acquired(tmp_path / str(at), fs))


# ── no room ──────────────────────────────────────────────────────────────────────────────────


def test_the_floor_is_not_written_into(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    files = block_files(acquired(tmp_path, fs), floor_bytes=10_000)
    fs.free = 10_500
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(NoRoom) as caught:
        files.write(identity(), payload())

    assert caught.value.errno == errno.ENOSPC
    assert sorted(tmp_path.rglob("*")) == before, "not even a folder was made"


def test_above_the_floor_and_without_one_there_is_room(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    directory = acquired(tmp_path, fs)
    fs.free = 20_000
    block_files(directory, floor_bytes=10_000).write(identity(0), payload())
    fs.free = 0
    fs.watch()
    block_files(directory, floor_bytes=0).write(identity(1), payload())

    assert ("free_bytes", str(tmp_path)) not in fs.calls


def test_a_disk_that_fills_while_a_block_is_written_keeps_nothing_of_it(tmp_path: Path) -> None:
    """B47: after some pieces were written."""
    place = make_place(tmp_path)
    place.fs.chunk_bytes = 10
    pieces = 0

    def fill_up(kind: str, path: str) -> None:
        nonlocal pieces
        pieces += kind == "writev"
        if kind == "writev" and pieces > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place.fs.before = fill_up

    with pytest.raises(NoRoom):
        place.files.write(identity(), payload())
    place.fs.before = None
    assert below(tmp_path) == [LOCK]
