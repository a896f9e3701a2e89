"""The cache folder: what volume it is on, who has it, how fast it is. Leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import sys
import time
from pathlib import Path

import psutil

from omlx.disk.layout import LOCK
from omlx.doctor.facts import LEFT_FREE_BYTES, MEASURED_BYTES, Disk

_CHUNK_BYTES = 4_000_000
_F_NOCACHE = 48  # of macOS; fcntl has no name for it on other systems


def look_at_disk(root: Path) -> Disk:
    """Facts of ``root``. Makes no folder; the measured file has no name while it is written."""
    exists = root.is_dir()
    folder = root if exists else existing_parent(root)
    try:
        status = os.statvfs(folder)
        mode = stat.S_IMODE(root.stat().st_mode) if exists else None
    except OSError as error:
        return Disk(root, exists, folder, False, None, "", 0, 0, error=error.strerror or str(error))
    free = status.f_bavail * status.f_frsize
    writable = os.access(folder, os.W_OK | os.X_OK)
    write = read = None
    fault = ""
    if root.exists() and not exists:
        writable, fault = False, "it is no folder"
    elif writable and free >= LEFT_FREE_BYTES:
        try:
            write, read = measure(folder)
        except OSError as error:
            fault = error.strerror or str(error)
    return Disk(
        root,
        exists,
        folder,
        writable,
        mode,
        filesystem_of(folder),
        status.f_blocks * status.f_frsize,
        free,
        holder_of(root),
        write,
        read,
        fault,
    )


def existing_parent(path: Path) -> Path:
    """The deepest folder of ``path`` that is there."""
    for folder in path.parents:
        if folder.is_dir():
            return folder
    return Path("/")


def measure(folder: Path) -> tuple[float, float]:
    """(bytes written a second, bytes read a second), from the disk and not from a cache of it.

    Raises OSError, as when the volume is full.
    """
    path = folder / f".omlx-doctor-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    chunk = secrets.token_bytes(_CHUNK_BYTES)  # some volumes compress
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()  # so it is gone however this process ends
        if sys.platform == "darwin":
            fcntl.fcntl(fd, _F_NOCACHE, 1)
        start = time.perf_counter()
        for _ in range(MEASURED_BYTES // _CHUNK_BYTES):
            _write_all(fd, chunk)
        os.fsync(fd)
        write_s = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(_CHUNK_BYTES)
        start = time.perf_counter()
        for place in range(0, MEASURED_BYTES, _CHUNK_BYTES):
            os.preadv(fd, [buffer], place)
        read_s = time.perf_counter() - start
    finally:
        os.close(fd)
    return MEASURED_BYTES / write_s, MEASURED_BYTES / read_s


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def filesystem_of(folder: Path) -> str:
    """The type of the file system that ``folder`` lies in, in lower case; empty if unknown."""
    there = folder.resolve()
    best, name = -1, ""
    for part in psutil.disk_partitions(all=True):
        mount = Path(part.mountpoint)
        # Of two mounts in one place the later one is seen.
        if (mount == there or mount in there.parents) and len(mount.parts) >= best:
            best, name = len(mount.parts), part.fstype
    return name.lower()


def holder_of(root: Path) -> int | None:
    """The process that has the cache folder; 0 when its number can't be read; None: nobody has.

    Asks for a shared lock and lets go of it at once: a server that starts in that instant is
    refused, as by any other server.
    """
    try:
        fd = os.open(root / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(fd, 32).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() else 0
    except OSError:
        return None
    finally:
        os.close(fd)
    return None
