"""One cache directory, one server; a dead one is no obstacle, and a lost root is noticed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from omlx.disk.directory import CacheDirectoryLocked, CacheDirectoryUnusable
from omlx.disk.layout import LOCK
from tests.disk.faulty import (
    FaultyFileSystem,
    acquired,
    below,
    block_files,
    bytes_of,
    identity,
    payload,
)
from tests.found import found_in


def test_a_second_server_is_kept_out_and_told_by_whom(tmp_path: Path) -> None:
    """B50."""
    first = acquired(tmp_path / "cache")

    with pytest.raises(CacheDirectoryLocked, match=f"used by process {os.getpid()}"):
        acquired(tmp_path / "cache")

    first.release()
    acquired(tmp_path / "cache").release()


def test_a_server_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    """B50."""
    script = (
        "import sys, time; from pathlib import Path; from omlx.disk.directory import *;"
        "d = CacheDirectory(Path(sys.argv[1])); d.acquire(); print('held', flush=True);"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(CacheDirectoryLocked, match=f"used by process {other.pid}"):
            acquired(tmp_path)
        other.send_signal(signal.SIGKILL)
        other.wait()

    acquired(tmp_path).release()


def test_what_a_dead_server_wrote_into_the_lock_does_not_matter(tmp_path: Path) -> None:
    """B50: the kernel knows who holds it, not the number in the file."""
    (tmp_path / LOCK).write_text("1234567\n")

    acquired(tmp_path).release()

    assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_lock_full_of_something_else_is_not_repeated_to_people(tmp_path: Path) -> None:
    acquired(tmp_path)
    (tmp_path / LOCK).write_text("\x1b[2J own\n")

    with pytest.raises(CacheDirectoryLocked, match="used by process unknown"):
        acquired(tmp_path)


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CacheDirectoryUnusable, match="file/cache can't be used"):
        acquired(tmp_path / "file" / "cache")


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_lock_that_is_no_file_is_not_used(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    root = tmp_path / "root"
    root.mkdir()
    match kind:
        case "link":
            (root / LOCK).symlink_to(outside)
        case "folder":
            (root / LOCK).mkdir()
        case _:
            os.mkfifo(root / LOCK)

    with pytest.raises(CacheDirectoryUnusable, match="can't be used"):
        acquired(root)
    assert outside.read_text() == "theirs"


def test_a_file_system_without_locks_is_unusable_and_not_locked(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    fs.watch(code=errno.ENOLCK, always=["flock"])

    with pytest.raises(CacheDirectoryUnusable, match="No locks available"):
        acquired(tmp_path, fs)


# ── the root is lost while we serve ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["removed", "renamed", "emptied"])
def test_a_root_that_is_gone_is_made_anew_for_us_alone(tmp_path: Path, how: str) -> None:
    """B49: the next block has its file, the cache hears of it, and others are still kept out."""
    root = tmp_path / "root"
    directory = acquired(root)
    files = block_files(directory)
    files.write(identity(0), payload())
    assert files.generation == 0
    match how:
        case "removed":
            shutil.rmtree(root)
        case "renamed":
            root.rename(tmp_path / "elsewhere")
        case _:
            for path in root.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(FileNotFoundError):
        files.read(identity(0))

    files.write(identity(1), payload(1))
    files.write(identity(2), payload(2))

    assert files.generation == 1
    assert bytes_of(files.read(identity(1))) == bytes_of(payload(1))
    assert [found.identity for found in found_in(files)] != []
    if how != "emptied":
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
    with pytest.raises(CacheDirectoryLocked):
        acquired(root)
    directory.release()
    acquired(root).release()


def test_listing_makes_it_anew_too(tmp_path: Path) -> None:
    files = block_files(acquired(tmp_path / "root"))
    shutil.rmtree(tmp_path / "root")

    files.prepare()

    assert files.generation == 1
    assert list(found_in(files)) == []


def test_a_root_that_another_server_has_taken_is_not_written(tmp_path: Path) -> None:
    """B50."""
    files = block_files(acquired(tmp_path / "root"))
    shutil.rmtree(tmp_path / "root")
    other = acquired(tmp_path / "root")

    for _ in range(2):
        with pytest.raises(OSError, match=f"used by process {os.getpid()}") as caught:
            files.write(identity(), payload())
        assert caught.value.errno == errno.EBUSY
    assert below(tmp_path / "root") == [LOCK]

    other.release()
    assert files.write(identity(), payload())


class Volumes(FaultyFileSystem):
    """Folders in ``foreign`` are on another device than they really are."""

    foreign = ""

    def _on(self, path: str, status: os.stat_result) -> os.stat_result:
        if self.foreign and path.startswith(self.foreign):
            values = list(status)
            values[2] = status.st_dev + 1
            return os.stat_result(values)
        return status

    def stat(self, path: str) -> os.stat_result:
        return self._on(path, super().stat(path))

    def lstat(self, path: str) -> os.stat_result:
        return self._on(path, super().lstat(path))


@pytest.mark.parametrize("mount_point", ["root itself", "the folder above"])
def test_an_unmounted_volumes_mount_point_is_never_written_into(
    tmp_path: Path, mount_point: str
) -> None:
    """K7: the folder that is left belongs to the volume below, which may be the system's."""
    fs = Volumes()
    root = tmp_path / "mnt" / "root"
    files = block_files(acquired(root, fs))
    root.rename(tmp_path / "unmounted")
    if mount_point == "root itself":
        root.mkdir()
    fs.foreign = str(tmp_path / "mnt")
    left = sorted((tmp_path / "mnt").rglob("*"))

    for act in (lambda: files.write(identity(), payload()), files.prepare):
        with pytest.raises(OSError, match="another volume is in the place of"):
            act()
    assert sorted((tmp_path / "mnt").rglob("*")) == left
    assert files.generation == 0

    fs.foreign = ""  # mounted again, with everything on it
    if root.exists():
        root.rmdir()
    (tmp_path / "unmounted").rename(root)
    assert files.write(identity(), payload())
    assert files.generation == 0


def test_a_root_whose_parent_is_gone_is_not_made(tmp_path: Path) -> None:
    files = block_files(acquired(tmp_path / "above" / "root"))
    shutil.rmtree(tmp_path / "above")

    with pytest.raises(FileNotFoundError):
        files.write(identity(), payload())
    assert below(tmp_path) == []
