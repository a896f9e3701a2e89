"""The prefix tree as people look at it: a bounded part of it, parents before children."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from omlx.cache.blocks import BlockHash, num_tokens
from omlx.cache.checkpoints import Place
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.prefix_tree import Node, PrefixTree


@dataclass(frozen=True, slots=True)
class NodeView:
    """A block or a checkpoint that a look-up can find."""

    block_hash: BlockHash
    parent: BlockHash
    num_tokens: int
    """Of a checkpoint: from its parent block's end to where it was taken."""
    nbytes: int
    """In RAM."""
    hot: bool
    ssd: bool
    """Neither: it left RAM and waits for its file."""
    place: Place | None
    """Of a checkpoint: why it is kept."""
    block: BlockHash | None
    """Of a checkpoint: the one in which it was taken, if that can be found."""
    refs: int
    """Who holds its place in RAM now."""
    used_at: float | None
    """Unix seconds of its last use."""

    @property
    def is_checkpoint(self) -> bool:
        return self.place is not None


@dataclass(frozen=True, slots=True)
class TreeView:
    nodes: tuple[NodeView, ...]
    left_out: int
    """Deeper than asked for, or beyond what was asked for."""


def view(tree: PrefixTree, pool: PagedCacheManager, *, depth: int, most: int) -> TreeView:
    """At most ``most`` nodes of the first ``depth`` blocks of every chain, by level.

    Of each level, chains that were used last come first. O(nodes).
    """
    assert depth > 0 and most > 0
    readable = [node for node in tree.nodes.values() if node.readable]
    heads = [node for node in readable if node.parent not in tree.nodes]
    ahead = deque((1, node) for node in _newest_first(heads))
    seen: list[NodeView] = []
    while ahead and len(seen) < most:
        level, node = ahead.popleft()
        seen.append(_view_of(node, tree, pool))
        if level < depth:
            children = _newest_first(tree.children(node.block_hash))
            ahead.extend((level + 1, child) for child in children)
    return TreeView(tuple(seen), len(readable) - len(seen))


def _newest_first(nodes: list[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.used_at or 0.0, reverse=True)


def _view_of(node: Node, tree: PrefixTree, pool: PagedCacheManager) -> NodeView:
    return NodeView(
        node.block_hash,
        node.parent,
        num_tokens(node.tokens),
        node.size,
        node.hot,
        node.ssd,
        node.place,
        None if node.place is None else _block_around(node, tree),
        pool.num_holders(node.block_hash),
        node.used_at,
    )


def _block_around(checkpoint: Node, tree: PrefixTree) -> BlockHash | None:
    """A block behind the same parent that begins with the checkpoint's tokens."""
    for node in tree.children(checkpoint.parent):
        if node.place is None and node.tokens.startswith(checkpoint.tokens):
            return node.block_hash
    return None
