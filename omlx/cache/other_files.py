"""Files that the served model can't use: of other models, of other formats. The first to go.

Nobody reads them while this server runs, so the order in which they go is the one of their last
use by whoever did, and is found once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeVar

from omlx.cache.blocks import BlockHash

Name = TypeVar("Name")


class OtherFiles:
    """By their paths under the root."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._used_at: dict[str, float] = {}
        self._named: dict[BlockHash, str] = {}
        self._parents: dict[str, BlockHash] = {}
        self._in_order = True

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, path: str) -> bool:
        return path in self._sizes

    def add(
        self,
        path: str,
        nbytes: int,
        used_at: float,
        block_hash: BlockHash | None,
        parent: BlockHash | None,
    ) -> None:
        """Count a file. Without names, of a format that is not known, it stands alone."""
        self.discard(path)
        self._sizes[path] = nbytes
        self._used_at[path] = used_at
        if block_hash is not None and parent is not None:
            self._named[block_hash] = path
            self._parents[path] = parent
        self.total_bytes += nbytes
        self._in_order = False

    def discard(self, path: str) -> int:
        """Stop counting a file; returns its bytes, 0 when it is unknown."""
        nbytes = self._sizes.pop(path, 0)
        self.total_bytes -= nbytes
        self._used_at.pop(path, None)
        self._parents.pop(path, None)
        return nbytes

    def give_up(self, nbytes: int) -> list[str]:
        """Paths of files to remove, of at least so many bytes together or all, off the books."""
        self._put_in_order()
        paths: list[str] = []
        while nbytes > 0 and self._sizes:
            path = next(iter(self._sizes))
            nbytes -= self.discard(path)
            paths.append(path)
        return paths

    def check(self) -> None:
        """Assert what this class promises about its own state. O(files)."""
        assert self.total_bytes == sum(self._sizes.values())
        assert self._used_at.keys() == self._sizes.keys()

    def _put_in_order(self) -> None:
        if self._in_order:
            return
        parents = {
            path: self._named[parent]
            for path, parent in self._parents.items()
            if parent in self._named
        }
        for path in removal_order(self._used_at, parents):
            self._sizes.move_to_end(path)
        self._in_order = True


def removal_order(used_at: Mapping[Name, float], parents: Mapping[Name, Name]) -> list[Name]:
    """From the first to be removed to the last: least recently used first, leaf before parent.

    A chain is as recent as its most recent file. Only the order of the times counts, so clocks
    that were wrong do no harm.
    """
    kept: dict[Name, None] = {}  # from the last to be removed to the first
    for leaf in sorted(used_at, key=lambda name: used_at[name], reverse=True):
        chain: list[Name] = []
        name: Name | None = leaf
        while name is not None and name in used_at and name not in kept:
            chain.append(name)
            name = parents.get(name)
        kept.update(dict.fromkeys(reversed(chain)))
    return list(reversed(kept))
