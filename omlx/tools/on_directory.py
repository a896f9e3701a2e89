"""``omlx cache`` on a directory. Nothing is locked to look, so a running server's can be looked at.

What removes files takes the lock first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from omlx.disk.directory import CacheDirectory, CacheDirectoryLocked, CacheDirectoryUnusable
from omlx.disk.layout import BLOCKS, is_namespace_name
from omlx.disk.verify import Verified, verify
from omlx.settings import Loaded
from omlx.tools.cache_files import (
    DirectoryStats,
    as_json,
    clear,
    collect_stats,
    list_files,
    measure,
)
from omlx.tools.dialogue import FOUND_BAD, LOCKED, Refused, agreed
from omlx.tools.show import Progress, age_text, print_json, show_verified, size_text, table


def on_directory(arguments: argparse.Namespace, loaded: Loaded) -> int:
    root = loaded.settings.ssd_cache_dir
    if not root.is_dir():
        raise Refused(f"there is no cache directory {root} ({loaded.sources['ssd_cache_dir']})")
    if not is_namespace_name(getattr(arguments, "namespace", None) or "0" * 16):
        raise Refused("--namespace wants 16 hex digits, as omlx cache stats shows them")
    directory = CacheDirectory(root)
    try:
        match arguments.action:
            case "stats":
                return _stats(directory, arguments.json)
            case "verify":
                return _verify(directory, arguments)
            case "ls":
                return _ls(directory, arguments)
            case _:
                return _clear(directory, arguments)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise Refused(f"the cache directory {root} can't be read: {error.strerror}") from None


@contextmanager
def _locked(directory: CacheDirectory) -> Iterator[None]:
    """Keep servers out. Raises Refused when one is there."""
    # The lock is a file that is made here: not in a folder that was never a cache.
    if not Path(directory.root, BLOCKS).is_dir():
        raise Refused(f"{directory.root} is no cache directory: it has no folder {BLOCKS}")
    try:
        directory.acquire()
    except CacheDirectoryLocked as error:
        raise Refused(f"{error}, or ask that server with --url", LOCKED) from None
    except CacheDirectoryUnusable as error:
        raise Refused(str(error)) from None
    try:
        yield
    finally:
        directory.release()


def _stats(directory: CacheDirectory, in_json: bool) -> int:
    stats = collect_stats(directory)
    if in_json:
        print_json(asdict(stats))
    else:
        _show_stats(stats)
    return 0


def _show_stats(stats: DirectoryStats) -> None:
    now = time.time()
    print(stats.directory)
    if stats.namespaces:
        headings = ("namespace", "layers", "tokens", "files", "blocks", "states", "bytes")
        rows = [
            (
                one.namespace,
                one.layers or "?",
                str(one.tokens),
                str(one.files),
                str(one.blocks),
                str(one.checkpoints),
                size_text(one.bytes),
                age_text(one.newest_use, now),
                age_text(one.oldest_use, now),
            )
            for one in stats.namespaces
        ]
        table((*headings, "used", "oldest"), rows, left=2)
    print(f"{stats.files} files of ours, {size_text(stats.bytes)}")
    for label, files, nbytes in (
        (
            "of another format version",
            sum(one.incompatible_files for one in stats.namespaces),
            sum(one.incompatible_bytes for one in stats.namespaces),
        ),
        (
            "temporaries, being written or left by a crash",
            sum(one.temporary_files for one in stats.namespaces),
            sum(one.temporary_bytes for one in stats.namespaces),
        ),
        ("not ours, never touched", stats.foreign_files, stats.foreign_bytes),
    ):
        if files:
            print(f"{files} {label}, {size_text(nbytes)}")
    broken = sum(one.unreadable_files for one in stats.namespaces)
    if broken:
        print(f"{broken} with a header that can't be read; omlx cache verify says why")
    if stats.skipped:
        print(f"{stats.skipped} could not be looked at")
    print(f"{size_text(stats.free_bytes)} free on the volume")


def _ls(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    listed = list_files(directory, arguments.namespace)
    if arguments.json:
        print_json({"files": as_json(listed)})
        return 0
    now = time.time()
    rows = [
        (
            one.namespace,
            one.hash[:12],
            f"{one.kind}+state" if one.embedded else one.kind,
            one.parent[:12],
            str(one.tokens),
            size_text(one.bytes),
            age_text(one.used_at, now),
        )
        for one in listed
    ]
    table(("namespace", "hash", "kind", "parent", "tokens", "bytes", "used"), rows, left=4)
    return 0


def _verify(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    progress = Progress()

    def say(so_far: Verified) -> None:
        progress.say(f"{so_far.files} files, {size_text(so_far.nbytes)}")

    try:
        if arguments.remove:
            with _locked(directory):
                verified = verify(directory, on_file=say, remove=True)
        else:
            verified = verify(directory, on_file=say)
    finally:
        progress.end()
    result = verified.as_json()
    if arguments.json:
        print_json(result)
    else:
        show_verified(result)
    return FOUND_BAD if verified.corrupt or verified.unreadable else 0


def _clear(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    with _locked(directory):
        files, nbytes = measure(directory, arguments.namespace)
        of = f" of namespace {arguments.namespace}" if arguments.namespace else ""
        what = f"{files} cache files{of}, {size_text(nbytes)}, from {directory.root}"
        if files and not agreed(arguments, f"Remove {what}?"):
            return 0
        freed = clear(directory, arguments.namespace)
    if arguments.json:
        print_json(asdict(freed))
    else:
        print(f"removed {freed.files} files, {size_text(freed.bytes)}")
        if freed.failed:
            print(f"{freed.failed} could not be removed")
    return FOUND_BAD if freed.failed else 0
