"""Read every cache file wholly and say which are damaged, for whatever model they were written.

One file is read at a time, and nothing is marked as used, so it may run beside a server.

    corrupt        its bytes are not what was written; a server would take it for a miss
    unreadable     the system can't read it, which says nothing about its bytes
    incompatible   of another version of the format, and not looked into
    unreachable    sound, and no chain of sound files leads to it from the beginning of a prompt
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from omlx.cache.block_file import OtherFormat, Unreadable
from omlx.cache.blocks import BlockHash, root_hash
from omlx.cache.inspection import inspect
from omlx.disk.directory import CacheDirectory
from omlx.disk.survey import Entry, Kind, Survey
from omlx.disk.whole_files import NotAFile

FILE_MAX = 4 << 30
"""No block is larger. A longer file is damage, and no memory is taken for it."""

LISTED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class BadFile:
    file: str
    """Relative to the root."""
    reason: str


@dataclass(slots=True)
class Verified:
    files: int = 0
    nbytes: int = 0
    corrupt: list[BadFile] = field(default_factory=list)
    removed: int = 0
    """How many of the corrupt ones."""
    unreadable: list[BadFile] = field(default_factory=list)
    incompatible: int = 0
    orphans: list[BadFile] = field(default_factory=list)
    """Sound, but what they hang on has no sound file."""
    unreachable: int = 0
    """The orphans, and what hangs on them."""
    skipped: int = 0
    """Folders, and files, that could not be looked at."""
    complete: bool = True
    """False: it was stopped."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """At most LISTED_MAX files of a kind by name; the counts are of all."""
        return {
            "files": self.files,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "corrupt": [asdict(bad) for bad in self.corrupt[:LISTED_MAX]],
            "corrupt_files": len(self.corrupt),
            "removed": self.removed,
            "unreadable": [asdict(bad) for bad in self.unreadable[:LISTED_MAX]],
            "unreadable_files": len(self.unreadable),
            "incompatible_files": self.incompatible,
            "orphans": [asdict(bad) for bad in self.orphans[:LISTED_MAX]],
            "unreachable_files": self.unreachable,
            "skipped": self.skipped,
            "complete": self.complete,
        }


def never() -> bool:
    return False


def verify(
    directory: CacheDirectory,
    *,
    stopped: Callable[[], bool] = never,
    on_file: Callable[[Verified], None] = lambda _so_far: None,
    remove: bool = False,
) -> Verified:
    """Verify everything under the root; with ``remove``, corrupt files go.

    ``stopped`` is asked before each file. Raises OSError when the root can't be listed.
    """
    return _Verification(directory, remove).run(stopped, on_file)


class _Verification:
    def __init__(self, directory: CacheDirectory, remove: bool) -> None:
        self._fs = directory.fs
        self._survey = Survey(directory)
        self._remove = remove
        self._buffer = memoryview(b"")
        self._result = Verified()
        self._children: defaultdict[BlockHash, list[BlockHash]] = defaultdict(list)
        self._paths: dict[BlockHash, tuple[str, BlockHash]] = {}
        """(path, parent) of each sound file."""
        self._namespaces: set[str] = set()

    def run(self, stopped: Callable[[], bool], on_file: Callable[[Verified], None]) -> Verified:
        result = self._result
        started = time.perf_counter()
        for entry in self._survey.entries():
            if entry.kind not in (Kind.BLOCK, Kind.CHECKPOINT):
                continue
            if stopped():
                result.complete = False
                break
            self._look_at(entry)
            on_file(result)
        else:
            self._find_orphans()
        result.skipped = self._survey.skipped
        result.seconds = time.perf_counter() - started
        return result

    def _look_at(self, entry: Entry) -> None:
        result = self._result
        try:
            fd, status = self._survey.files.open(entry.path)
        except FileNotFoundError:
            return  # it was removed meanwhile
        except NotAFile:
            return  # replaced meanwhile by what is not ours
        except OSError as error:
            result.unreadable.append(BadFile(entry.path, error.strerror or "unreadable"))
            return
        try:
            result.files += 1
            outline = inspect(entry.named, self._read(fd, status.st_size))
        except OtherFormat:
            result.incompatible += 1
        except Unreadable as damage:
            result.corrupt.append(BadFile(entry.path, str(damage)))
            if self._remove:
                result.removed += self._survey.files.remove_damaged(entry.path, status)
        except OSError as error:
            result.unreadable.append(BadFile(entry.path, error.strerror or "unreadable"))
        else:
            name, parent = outline.identity.block_hash, outline.identity.parent
            self._paths[name] = entry.path, parent
            self._children[parent].append(name)
            self._namespaces.add(entry.namespace)
        finally:
            with suppress(OSError):
                self._fs.close(fd)

    def _read(self, fd: int, size: int) -> memoryview:
        """The whole file, in memory that the next one is read into."""
        if size > FILE_MAX:
            raise Unreadable(f"the file has {size} bytes, far more than a block")
        if size > len(self._buffer):
            self._buffer = np.empty(size, np.uint8).data
        data = self._buffer[:size]
        count = self._survey.files.fill(fd, data)
        self._result.nbytes += count
        return data[:count]

    def _find_orphans(self) -> None:
        reached: set[BlockHash] = set()
        ahead = [root_hash(namespace) for namespace in self._namespaces]
        while ahead:
            for name in self._children.get(ahead.pop(), ()):
                reached.add(name)
                ahead.append(name)
        for name, (path, parent) in self._paths.items():
            if name in reached:
                continue
            self._result.unreachable += 1
            if parent not in self._paths:
                # A prompt with a cache_salt begins under a name that nobody else can know.
                reason = (
                    f"there is no sound file of its parent {parent.hex()[:12]}: unreachable, "
                    "unless a prompt with a cache_salt begins here"
                )
                self._result.orphans.append(BadFile(path, reason))
