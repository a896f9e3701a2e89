"""What lies in a cache directory, and clearing it. Numbers only; nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from omlx.cache.block_file import OtherFormat, Outline, Unreadable
from omlx.cache.blocks import BlockHash, num_tokens
from omlx.cache.inspection import layers_of
from omlx.cache.other_files import removal_order
from omlx.disk.directory import CacheDirectory
from omlx.disk.survey import Entry, Kind, Survey

OURS = (Kind.BLOCK, Kind.CHECKPOINT, Kind.TEMPORARY)


@dataclass(slots=True)
class NamespaceStats:
    """The files of one namespace: of one model, in one form, with one block size."""

    namespace: str
    layers: str = ""
    """Of the model that wrote it, in words; empty when no header says it."""
    block_size: int | None = None
    codecs: list[str] = field(default_factory=list)
    """What its checkpoints are written with."""
    files: int = 0
    blocks: int = 0
    checkpoints: int = 0
    """In files of their own, and embedded in those of blocks."""
    tokens: int = 0
    """Of its blocks."""
    bytes: int = 0
    oldest_use: float | None = None
    """Unix seconds, as ``newest_use``."""
    newest_use: float | None = None
    incompatible_files: int = 0
    """Of another version of the format."""
    incompatible_bytes: int = 0
    unreadable_files: int = 0
    """Whose header is damaged or can't be read."""
    temporary_files: int = 0
    temporary_bytes: int = 0


@dataclass(slots=True)
class DirectoryStats:
    directory: str
    namespaces: list[NamespaceStats]
    files: int
    bytes: int
    """Of every file that is ours, temporaries among them."""
    foreign_files: int
    foreign_bytes: int
    total_bytes: int
    """Everything under the directory, the lock too."""
    free_bytes: int
    """Of the volume."""
    skipped: int
    """Folders, and files, that could not be looked at."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One file. The names are those of its JSON."""

    namespace: str
    hash: str
    kind: str
    tokens: int
    bytes: int
    used_at: float
    parent: str
    embedded: bool
    """Of a block: its file holds the checkpoint at its end as well."""


@dataclass(slots=True)
class Freed:
    files: int = 0
    bytes: int = 0
    folders: int = 0
    failed: int = 0
    """Files that the system did not let go of."""
    foreign_files: int = 0
    """Left alone."""


def collect_stats(directory: CacheDirectory) -> DirectoryStats:
    """Go through every header. Raises OSError when the directory can't be listed."""
    survey = Survey(directory)
    by_name: dict[str, NamespaceStats] = {}
    foreign_files = foreign_bytes = total_bytes = 0
    for entry in survey.entries():
        total_bytes += entry.nbytes
        if entry.kind is Kind.FOREIGN:
            foreign_files += 1
            foreign_bytes += entry.nbytes
        elif entry.kind in OURS:
            found = by_name.setdefault(entry.namespace, NamespaceStats(entry.namespace))
            _count(found, entry, survey)
    namespaces = sorted(by_name.values(), key=lambda found: -found.bytes)
    return DirectoryStats(
        directory=directory.root,
        namespaces=namespaces,
        files=sum(found.files + found.temporary_files for found in namespaces),
        bytes=sum(found.bytes + found.temporary_bytes for found in namespaces),
        foreign_files=foreign_files,
        foreign_bytes=foreign_bytes,
        total_bytes=total_bytes,
        free_bytes=directory.fs.free_bytes(directory.root),
        skipped=survey.skipped,
    )


def _count(found: NamespaceStats, entry: Entry, survey: Survey) -> None:
    if entry.kind is Kind.TEMPORARY:
        found.temporary_files += 1
        found.temporary_bytes += entry.nbytes
        return
    found.files += 1
    found.bytes += entry.nbytes
    found.oldest_use = min(found.oldest_use or entry.used_at, entry.used_at)
    found.newest_use = max(found.newest_use or entry.used_at, entry.used_at)
    try:
        outline = survey.outline(entry)
    except OtherFormat:
        found.incompatible_files += 1
        found.incompatible_bytes += entry.nbytes
        return
    except (Unreadable, OSError):
        found.unreadable_files += 1
        return
    if entry.kind is Kind.BLOCK:
        found.blocks += 1
        found.tokens += num_tokens(outline.identity.tokens)
        found.checkpoints += outline.carries is not None
    else:
        found.checkpoints += 1
    _describe(found, outline)


def _describe(found: NamespaceStats, outline: Outline) -> None:
    metadata = outline.metadata
    found.layers = found.layers or layers_of(metadata)
    size = metadata.get("block_size", "")
    if found.block_size is None and size.isdecimal():
        found.block_size = int(size)
    codec = metadata.get("codec")
    if codec is not None and codec not in found.codecs:
        found.codecs.append(codec)


def list_files(directory: CacheDirectory, namespace: str | None = None) -> list[Listed]:
    """Every file whose header can be read: the chain that was used last first, head before tail.

    Raises OSError when the directory can't be listed.
    """
    survey = Survey(directory)
    found: dict[BlockHash, Listed] = {}
    used_at: dict[BlockHash, float] = {}
    parents: dict[BlockHash, BlockHash] = {}
    for entry in _ours(survey, namespace):
        if entry.kind is Kind.TEMPORARY:
            continue
        try:
            outline = survey.outline(entry)
        except (Unreadable, OSError):
            continue  # verify says what is wrong with it
        identity = outline.identity
        used_at[identity.block_hash] = entry.used_at
        parents[identity.block_hash] = identity.parent
        found[identity.block_hash] = Listed(
            entry.namespace,
            identity.block_hash.hex(),
            entry.kind.value,
            num_tokens(identity.tokens),
            entry.nbytes,
            entry.used_at,
            identity.parent.hex(),
            outline.carries is not None,
        )
    return [found[name] for name in reversed(removal_order(used_at, parents))]


def measure(directory: CacheDirectory, namespace: str | None = None) -> tuple[int, int]:
    """Files, and bytes of them, that ``clear`` would remove."""
    sizes = [entry.nbytes for entry in _ours(Survey(directory), namespace)]
    return len(sizes), sum(sizes)


def clear(directory: CacheDirectory, namespace: str | None = None) -> Freed:
    """Remove the files that are ours, then the folders of ours that are empty.

    The directory must be locked by us: then every temporary is dead. Raises OSError when the
    directory can't be listed.
    """
    survey = Survey(directory)
    freed = Freed()
    for entry in survey.entries():
        if entry.kind is Kind.FOREIGN:
            freed.foreign_files += 1
        if entry.kind not in OURS or namespace not in (None, entry.namespace):
            continue
        try:
            survey.files.remove(entry.path)
        except OSError:
            freed.failed += 1
        else:
            freed.files += 1
            freed.bytes += entry.nbytes
    for folder in reversed(survey.folders):
        if _is_of(folder, namespace):
            with suppress(OSError):  # it is not empty
                directory.fs.rmdir(f"{directory.root}/{folder}")
                freed.folders += 1
    return freed


def as_json(listed: Iterable[Listed]) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in Listed.__slots__} for one in listed]


def _ours(survey: Survey, namespace: str | None) -> Iterator[Entry]:
    for entry in survey.entries():
        if entry.kind in OURS and namespace in (None, entry.namespace):
            yield entry


def _is_of(folder: str, namespace: str | None) -> bool:
    """Whether a folder of ours may go: those of one namespace, or all of them."""
    parts = folder.split("/")
    return namespace is None or (len(parts) > 1 and parts[1] == namespace)
