"""Block files on a real disk: for us alone, whole or not at all, and found again."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlx.cache.block_file import Unreadable
from omlx.disk.block_files import BlockFiles
from omlx.disk.layout import BLOCKS, LOCK
from tests.disk.faulty import (
    NAMESPACE,
    OTHER,
    FaultyFileSystem,
    acquired,
    below,
    block_files,
    bytes_of,
    identity,
    payload,
)
from tests.found import found_in


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return block_files(acquired(tmp_path))


def test_what_was_written_is_read_and_listed(files: BlockFiles) -> None:
    size = files.write(identity(), payload())

    assert bytes_of(files.read(identity())) == bytes_of(payload())
    (found,) = found_in(files)
    assert (found.identity, found.nbytes) == (identity(), size)
    assert files.path(identity().block_hash).stat().st_size == size


def test_the_path_is_made_of_digests_alone(files: BlockFiles, tmp_path: Path) -> None:
    """B41."""
    files.write(identity(), payload())

    name = identity().block_hash.hex()
    assert below(tmp_path) == [f"{BLOCKS}/{NAMESPACE}/{name[:2]}/{name}.safetensors", LOCK]


def test_nobody_else_may_look(files: BlockFiles, tmp_path: Path) -> None:
    """B53: whatever the umask, and after the folder was removed under a running server as well."""
    files.write(identity(0), payload())
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    files.write(identity(1), payload())

    for path in tmp_path.rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_what_is_moved_in_small_pieces_is_whole(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    files = block_files(acquired(tmp_path, fs))
    fs.chunk_bytes = 7

    size = files.write(identity(), payload())

    assert files.path(identity().block_hash).stat().st_size == size
    assert bytes_of(files.read(identity())) == bytes_of(payload())
    assert [found.nbytes for found in found_in(files)] == [size]


def test_a_block_is_replaced_at_once(files: BlockFiles) -> None:
    files.write(identity(), payload(0))
    files.write(identity(), payload(7))

    assert bytes(files.read(identity())[0].data) == bytes(payload(7)[0].data)


def test_removing_what_is_gone_does_nothing(files: BlockFiles) -> None:
    files.write(identity(), payload())

    files.remove(identity().block_hash)
    files.remove(identity().block_hash)

    assert list(found_in(files)) == []
    with pytest.raises(FileNotFoundError):
        files.read(identity())


def test_reading_makes_a_file_recent(files: BlockFiles) -> None:
    """B59: the order survives a restart."""
    files.write(identity(), payload())
    os.utime(files.path(identity().block_hash), (1.0, 1.0))

    files.read(identity())

    (found,) = found_in(files)
    assert abs(found.used_at - time.time()) < 60


# ── damage ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"\xff" * 4096])
def test_a_file_of_rubbish_is_a_miss_and_goes_at_the_next_start(
    files: BlockFiles, content: bytes
) -> None:
    """B46."""
    files.write(identity(), payload())
    files.path(identity().block_hash).write_bytes(content)

    with pytest.raises(Unreadable):
        files.read(identity())
    assert list(found_in(files)) == []
    assert not files.path(identity().block_hash).exists()


def test_nothing_is_read_of_a_file_that_is_far_too_long(files: BlockFiles) -> None:
    files.write(identity(), payload())
    os.truncate(files.path(identity().block_hash), 1 << 40)

    with pytest.raises(Unreadable, match="far more than the block"):
        files.read(identity())


def test_a_file_under_another_blocks_name_goes(files: BlockFiles) -> None:
    """B29."""
    files.write(identity(0), payload())
    target = files.path(identity(1).block_hash)
    target.parent.mkdir(exist_ok=True)
    files.path(identity(0).block_hash).rename(target)

    with pytest.raises(Unreadable, match="another block"):
        files.read(identity(1))
    assert list(found_in(files)) == []
    assert not target.exists()


# ── neighbours ───────────────────────────────────────────────────────────────────────────────


def test_another_models_files_are_left_alone(tmp_path: Path) -> None:
    """B43."""
    directory = acquired(tmp_path)
    files, other = block_files(directory), block_files(directory, OTHER)
    other.write(identity(0, OTHER), payload())
    files.write(identity(0), payload())

    assert [found.identity for found in found_in(files)] == [identity(0)]
    assert [found.identity for found in found_in(other)] == [identity(0, OTHER)]


def test_a_folder_that_others_may_look_into_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B53: it is the user's, so it is not changed."""
    loose = tmp_path / "our cache"
    (loose / BLOCKS / NAMESPACE).mkdir(parents=True)
    loose.chmod(0o755)

    with caplog.at_level(logging.WARNING):
        directory = acquired(loose)
        block_files(directory)
        block_files(directory)

    (warning,) = caplog.messages
    assert f"{loose} has mode 755; to close it: chmod -R go= '{loose}'" in warning
    assert stat.S_IMODE(loose.stat().st_mode) == 0o755


def test_a_loose_folder_below_a_tight_root_is_named_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / BLOCKS).mkdir(mode=0o770)

    with caplog.at_level(logging.WARNING):
        block_files(acquired(tmp_path))

    (warning,) = caplog.messages
    assert f"{tmp_path / BLOCKS} has mode 770" in warning
