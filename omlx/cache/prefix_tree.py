"""The tree of everything that can be found: blocks, and the checkpoints that stand between them.

A node's name is the chain hash of its tokens behind its parent. The children of a node are kept
sorted by their tokens, so the one that shares most with a prompt is a neighbour of where the
prompt's own tokens would stand.

    readable   in RAM, in a file, or with the writer: a look-up can find it
    pending    on its way to a file

A checkpoint (a recurrent state) hangs under the same parent as the block that ends where it was
taken, and names the tokens between: it fits a prompt that has exactly these.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from omlx.cache.blocks import (
    BlockHash,
    PackedTokens,
    chain_hash,
    num_common,
    num_tokens,
    slice_tokens,
)
from omlx.cache.checkpoints import Place
from omlx.cache.tickets import Reason, ReuseEnded

GHOSTS = 8192
"""Names of evicted blocks that are remembered, to say "evicted" rather than "no block"."""


@dataclass(slots=True, eq=False)
class Node:
    block_hash: BlockHash
    parent: BlockHash
    tokens: PackedTokens
    size: int
    """Bytes of its payload in RAM."""
    place: Place | None = None
    """Of a checkpoint: why it is kept. None: a block."""
    carries: Place | None = None
    """Of a block: its file holds the checkpoint at its end as well."""
    embedded: bool = False
    """Of a checkpoint: what ``ssd`` says is the file of the block that ends with it."""
    reserved: int = 0
    """Bytes set aside for the file that is on its way."""
    hot: bool = False
    ssd: bool = False
    pending: bool = False
    queued: bool = False
    """Pending, and the writer can be asked for it. Of a checkpoint: its block is."""
    persist: bool = True
    sighted: bool = True
    """It was asked for twice, where only that is worth a file."""
    doomed: bool = False
    """Pending when the files were cleared: its own is removed as soon as it is there."""
    used_at: float | None = None
    """Unix seconds of its last use, to be shown; nothing is decided by it."""

    @property
    def readable(self) -> bool:
        return self.hot or self.ssd or self.queued


@dataclass(frozen=True, slots=True)
class Found:
    """The longest readable prefix of a prompt."""

    path: list[Node]
    take_last: int
    """How many tokens of the last node are used."""
    ended: ReuseEnded


Children = dict[BlockHash, list[tuple[PackedTokens, BlockHash]]]


class PrefixTree:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: dict[BlockHash, Node] = {}
        self._blocks: Children = {}
        self._checkpoints: Children = {}
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()

    def get(self, block_hash: BlockHash) -> Node | None:
        return self.nodes.get(block_hash)

    # ── finding ──────────────────────────────────────────────────────────────────────────────

    def find(self, root: BlockHash, tokens: PackedTokens) -> Found:
        """Follow a prompt down, at most to its last token but one. Changes nothing."""
        usable = num_tokens(tokens) - 1
        path: list[Node] = []
        position, parent, take = 0, root, 0
        evicted = False
        while usable - position >= self.block_size:
            block = slice_tokens(tokens, position, position + self.block_size)
            name = chain_hash(parent, block)
            node = self.nodes.get(name)
            if node is None or not node.readable or node.tokens != block:
                evicted = name in self._ghosts
                break
            path.append(node)
            position, parent, take = position + self.block_size, name, self.block_size
        if position == usable:
            return Found(path, take, ReuseEnded(Reason.FULL, position))
        rest = slice_tokens(tokens, position, min(usable, position + self.block_size))
        best, common = self._best_child(parent, rest)
        if best is not None:
            path.append(best)
            position, take = position + common, common
        if position == usable:
            reason = Reason.FULL
        elif evicted:
            reason = Reason.EVICTED
        elif best is None:
            reason = Reason.DIVERGED if parent in self._blocks else Reason.NO_BLOCK
        else:
            reason = Reason.DIVERGED if common < num_tokens(best.tokens) else Reason.NO_BLOCK
        return Found(path, take, ReuseEnded(reason, position))

    def checkpoints(
        self, root: BlockHash, found: Found, tokens: PackedTokens
    ) -> Iterator[tuple[int, Node]]:
        """(position, checkpoint) of those that fit, within what was found, deepest first."""
        parents = [root, *(node.block_hash for node in found.path)]
        matched = found.ended.token
        for depth in range(matched // self.block_size, -1, -1):
            start = depth * self.block_size
            if depth >= len(parents):
                continue
            ahead = slice_tokens(tokens, start, min(matched, start + self.block_size))
            fitting = [
                (num_tokens(names), self.nodes[name])
                for names, name in self._checkpoints.get(parents[depth], ())
                if ahead.startswith(names)
            ]
            for count, node in sorted(fitting, key=lambda item: -item[0]):
                yield start + count, node

    def _best_child(self, parent: BlockHash, tokens: PackedTokens) -> tuple[Node | None, int]:
        """The child that shares the most leading tokens, and how many.

        Of two that share as many, one that is in RAM: an end that is also in a file of its own
        need not be read while a longer one holds it.
        """
        children = self._blocks.get(parent)
        if not children:
            return None, 0
        index = bisect_left(children, (tokens, b""))
        best: Node | None = None
        most = 0
        for names, name in children[max(0, index - 1) : index + 2]:
            common, node = num_common(names, tokens), self.nodes[name]
            warmer = best is not None and node.hot and not best.hot
            if common > most or (common == most and warmer):
                best, most = node, common
        return best, most

    def children(self, parent: BlockHash) -> list[Node]:
        """What can be found directly behind a node: blocks, then checkpoints."""
        siblings = (*self._blocks.get(parent, ()), *self._checkpoints.get(parent, ()))
        return [self.nodes[name] for _, name in siblings]

    def covers(self, parent: BlockHash, block_hash: BlockHash, tokens: PackedTokens) -> bool:
        """Whether a longer block beside this one starts with the same tokens."""
        children = self._blocks.get(parent, ())
        index = bisect_left(children, (tokens, b""))
        if index < len(children) and children[index][1] == block_hash:
            return False
        return self._reaches(parent, tokens)

    def shorter(self, node: Node) -> list[Node]:
        """The blocks beside ``node`` that it starts with."""
        children = self._blocks.get(node.parent, [])
        index = bisect_left(children, (node.tokens, node.block_hash)) - 1
        found: list[Node] = []
        while index >= 0 and node.tokens.startswith(children[index][0]):
            found.append(self.nodes[children[index][1]])
            index -= 1
        return found

    def along(self, checkpoint: Node) -> list[tuple[int, Node]]:
        """(position, checkpoint) of every checkpoint of the chain that ends with this one."""
        levels: list[tuple[BlockHash, PackedTokens]] = []
        node: Node | None = checkpoint
        while node is not None:
            levels.append((node.parent, node.tokens))
            node = self.nodes.get(node.parent)
        found: list[tuple[int, Node]] = []
        for depth, (parent, tokens) in enumerate(reversed(levels)):
            for names, name in self._checkpoints.get(parent, ()):
                if tokens.startswith(names):
                    position = depth * self.block_size + num_tokens(names)
                    found.append((position, self.nodes[name]))
        return found

    def stranded(self, gone: Node) -> list[Node]:
        """Checkpoints that no block reaches any more, now that ``gone`` is no longer readable."""
        return [
            self.nodes[name]
            for names, name in self._checkpoints.get(gone.parent, ())
            if gone.tokens.startswith(names) and not self._reaches(gone.parent, names)
        ]

    def _reaches(self, parent: BlockHash, tokens: PackedTokens) -> bool:
        children = self._blocks.get(parent, ())
        index = bisect_left(children, (tokens, b""))
        return index < len(children) and children[index][0].startswith(tokens)

    # ── changing ─────────────────────────────────────────────────────────────────────────────

    def show(self, node: Node) -> None:
        """Let a readable node be found."""
        children = self._siblings(node).setdefault(node.parent, [])
        entry = (node.tokens, node.block_hash)
        index = bisect_left(children, entry)
        if index == len(children) or children[index] != entry:
            insort(children, entry)
        self._ghosts.pop(node.block_hash, None)

    def drop_if_gone(self, node: Node) -> None:
        """Take a node out that has no copy left; a pending one stays known."""
        if node.readable:
            return
        siblings = self._siblings(node)
        children = siblings.get(node.parent, [])
        entry = (node.tokens, node.block_hash)
        index = bisect_left(children, entry)
        if index < len(children) and children[index] == entry:
            del children[index]
        if not children:
            siblings.pop(node.parent, None)
        self._ghosts[node.block_hash] = None
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
        if not node.pending:
            del self.nodes[node.block_hash]

    def check(self) -> None:
        """Assert what this class promises about its own state. O(nodes)."""
        for name, node in self.nodes.items():
            assert node.readable or node.pending, "a node without any copy"
            shown = (node.tokens, name) in self._siblings(node).get(node.parent, [])
            assert shown == node.readable, "what is readable can be found, and nothing else"
        shown = sum(map(len, [*self._blocks.values(), *self._checkpoints.values()]))
        assert shown == sum(node.readable for node in self.nodes.values())

    def _siblings(self, node: Node) -> Children:
        return self._blocks if node.place is None else self._checkpoints
