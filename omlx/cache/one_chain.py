"""One prompt's chain: where each of its blocks is, and forgetting all that hangs on its root.

For a self-test, which stores a prompt of its own under a salt of its own and leaves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from omlx.cache.blocks import BlockHash, BlockId, PackedTokens, num_tokens, root_hash
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.cache.prefix_tree import Node
from omlx.cache.tickets import BlockRef


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Of a block, or of a checkpoint when ``ref.place`` says so."""

    ref: BlockRef
    """As a reader of its file needs it."""
    block_id: BlockId | None
    """Its place in RAM; None: it is not there."""
    filed: bool
    """It has a file."""
    coming: bool
    """It has none yet, and will get one."""


def find_chain(
    cache: BlockAwarePrefixCache, tokens: PackedTokens, salt: str
) -> tuple[Whereabouts, ...]:
    """Every block that ``tokens`` begin with, then their checkpoints, deepest first.

    Changes and counts nothing.
    """
    root = root_hash(cache.namespace, salt)
    found = cache.tree.find(root, tokens)
    checkpoints = [node for _, node in cache.tree.checkpoints(root, found, tokens)]
    return tuple(_where(cache, node) for node in [*found.path, *checkpoints])


def _where(cache: BlockAwarePrefixCache, node: Node) -> Whereabouts:
    ref = BlockRef(
        node.block_hash,
        node.parent,
        node.tokens,
        num_tokens(node.tokens),
        None,
        cold=True,
        place=node.place,
        queued=node.queued and not node.ssd,
    )
    return Whereabouts(
        ref,
        cache.pool.get(node.block_hash) if node.hot else None,
        node.ssd,
        cache.files.is_coming(node.block_hash),
    )


def forget_chain(cache: BlockAwarePrefixCache, salt: str) -> None:
    """Give up everything under the root of ``salt``, in both tiers; what is held stays."""
    below: list[Node] = []
    parents = [root_hash(cache.namespace, salt)]
    children: dict[BlockHash, list[Node]] = {}
    for node in cache.tree.nodes.values():
        children.setdefault(node.parent, []).append(node)
    for parent in parents:  # grows as it goes
        below += children.get(parent, [])
        parents += [node.block_hash for node in children.get(parent, [])]
    evictions = cache.stats.evictions_ram
    for node in reversed(below):  # what hangs on a block goes before it
        node.doomed, queued = node.pending, node.queued
        cache.files.give_up(node)
        if queued:
            cache.files.file_gone(node.block_hash)
    cache.stats.evictions_ram = evictions  # nothing had to make room for anything
