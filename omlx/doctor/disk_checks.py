"""What a cache folder's facts mean. Pure."""

from __future__ import annotations

from omlx.budget import gigabytes
from omlx.doctor.facts import LEFT_FREE_BYTES, Disk, Port
from omlx.doctor.finding import Finding, ok, problem, warning

# fmt: off
NETWORK = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afpfs", "webdav", "davfs",
    "sshfs", "9p", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "afs", "s3fs", "gcsfuse",
    "rclone",
})
# fmt: on
IN_RAM = frozenset({"tmpfs", "ramfs"})
READ_MIN, WRITE_MIN = 100e6, 50e6
"""Bytes a second: slower disks are worth a warning."""


def check_disk(disk: Disk, limit_bytes: int, floor_bytes: int, *, named: bool) -> list[Finding]:
    """``limit_bytes`` 0: the SSD tier is off. ``named``: the user chose the folder."""
    area = "disk"
    if not limit_bytes:
        text = "the SSD tier is off; nothing is kept over a restart"
        return [ok(area, text)]
    found = _check_access(disk, named=named)
    if found:
        return found
    there = "" if disk.exists else ", made at the first start"
    kind = disk.filesystem or "unknown file system"
    found.append(
        ok(
            area,
            f"{disk.root} ({kind}{there}): {gigabytes(disk.free_bytes)} of "
            f"{gigabytes(disk.volume_bytes)} free; the cache takes at most "
            f"{gigabytes(limit_bytes)} and leaves {gigabytes(floor_bytes)}",
        )
    )
    found += _check_room(disk, limit_bytes, floor_bytes)
    found += _check_kind(disk)
    found += _check_speed(disk)
    if disk.mode is not None and disk.mode & 0o077:
        text = f"others may look into {disk.root} (mode {disk.mode:03o}), and files name prompts"
        found.append(warning(area, text, f"chmod -R go= {disk.root}"))
    return found


def _check_access(disk: Disk, *, named: bool) -> list[Finding]:
    if disk.writable:
        return []
    why = disk.error or "this user may not write there"
    text = f"{disk.root} can't be used: {why}"
    if not disk.exists and disk.measured_in != disk.root and not disk.error:
        text = f"{disk.root} can't be made: this user may not write in {disk.measured_in}"
    if named:
        return [problem("disk", text, "let this user write there, or name another folder")]
    advice = "name a folder with --ssd-cache-dir, or set OMLX_HOME to a writable one"
    return [warning("disk", f"{text}; the SSD tier would be off", advice)]


def _check_room(disk: Disk, limit_bytes: int, floor_bytes: int) -> list[Finding]:
    advice = "make room, or set ssd_cache_dir to another volume"
    if disk.free_bytes < LEFT_FREE_BYTES:
        text = f"the volume is full: {gigabytes(disk.free_bytes)} free"
        return [problem("disk", text, advice)]
    if disk.free_bytes <= floor_bytes:
        text = (
            f"{gigabytes(disk.free_bytes)} are free, and writing stops at "
            f"{gigabytes(floor_bytes)} (ssd_free_space_floor): nothing will be written"
        )
        return [warning("disk", text, advice)]
    return []


def _check_kind(disk: Disk) -> list[Finding]:
    kind = disk.filesystem.removeprefix("fuse.").removeprefix("fuseblk.")
    if kind in NETWORK:
        text = f"{kind} is a network file system: reads are slow and locks may not hold"
        return [warning("disk", text, "set ssd_cache_dir to a local disk")]
    if kind in IN_RAM:
        text = f"{kind} is memory: it is gone after a reboot and takes RAM twice"
        return [warning("disk", text, "set ssd_cache_dir to a disk")]
    if kind == "overlay":
        text = "the folder is inside a container and is gone with it"
        return [warning("disk", text, "mount a volume there")]
    return []


def _check_speed(disk: Disk) -> list[Finding]:
    if disk.write_bytes_per_s is None or disk.read_bytes_per_s is None:
        if disk.error:
            text = f"writing there failed: {disk.error}"
            return [problem("disk", text, "mend the disk, or name another folder")]
        return []
    write, read = disk.write_bytes_per_s, disk.read_bytes_per_s
    text = f"{write / 1e6:,.0f} MB/s written, {read / 1e6:,.0f} MB/s read"
    if read < READ_MIN or write < WRITE_MIN:
        advice = "set ssd_cache_dir to a faster disk, or measure again when it is idle"
        return [warning("disk", f"slow: {text}", advice)]
    return [ok("disk", text)]


def check_lock(disk: Disk, port: Port) -> list[Finding]:
    """Whether another server has the folder, and whether it is the one on our port."""
    if disk.holder is None:
        return []
    who = f"process {disk.holder}" if disk.holder else "another process"
    if port.answer == "omlx":
        return [ok("disk", f"in use by {who}, a server that runs")]
    text = f"in use by {who}, which is not a server on port {port.port}"
    return [problem("disk", text, "stop it, or name another folder with --ssd-cache-dir")]
