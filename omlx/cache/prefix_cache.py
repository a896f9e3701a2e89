"""The longest prefix that was ever computed, exact to the token, across both tiers.

Blocks form a tree: a node's name is the chain hash of its tokens behind its parent. A prompt is
followed down full block by full block. Where the next full block is unknown, the children of the
last node are compared token by token, and the common part of the best one is used as well, so a
partial tail and a conversation that diverges in the middle of a block are reused to the token.

    readable   in RAM, in a file, or with the writer: a look-up can find it
    pending    on its way to a file

Nothing here sees an array, a file or a clock. Answers name blocks; the engine and the disk do
the rest and report back (``seal``, ``written``, ``lost``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from omlx.cache.block_sizes import BlockSizes
from omlx.cache.blocks import (
    BlockHash,
    BlockId,
    PackedTokens,
    num_tokens,
    root_hash,
)
from omlx.cache.checkpoints import Mark, Place, thin
from omlx.cache.cold_tier import ColdTier, WritePolicy
from omlx.cache.eviction import EvictionOrder, LruOrder
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.persisted import PersistedBlocks
from omlx.cache.prefix_tree import Found, Node, PrefixTree
from omlx.cache.stats import CacheStats
from omlx.cache.tickets import (
    BlockRef,
    Grant,
    Reason,
    ReuseEnded,
    StoreTicket,
    StoreWish,
)
from omlx.cache.tree_view import TreeView, view

BRANCH_GAIN = 16
"""Tokens that a checkpoint where two prompts part must save the third; one weighs as much as
thousands of tokens of KV, and prompts often share a few tokens by chance."""


class BlockAwarePrefixCache:
    """Owns both tiers' books. Bytes of a block are ``bytes_per_token`` times its tokens.

    ``checkpoint_bytes`` above 0: the model has recurrent layers, so a prefix can be continued only
    from a checkpoint, and its blocks count only as far as the deepest one that fits.
    """

    def __init__(
        self,
        *,
        namespace: str,
        block_size: int,
        bytes_per_token: int,
        hot_limit_bytes: int,
        ssd_limit_bytes: int,
        pending_limit_bytes: int,
        gdn_pending_limit_bytes: int = 512_000_000,
        checkpoint_bytes: int = 0,
        header_bytes: int = 0,
        initial_blocks: int = 256,
        max_blocks: int = 1 << 20,
        write_policy: WritePolicy = WritePolicy.BEHIND,
        order: Callable[[], EvictionOrder] = LruOrder,
    ) -> None:
        assert block_size > 0
        self.namespace = namespace
        self.block_size = block_size
        self.checkpoint_bytes = checkpoint_bytes
        self.stats = CacheStats()
        self.pool = PagedCacheManager(
            limit_bytes=hot_limit_bytes,
            initial_blocks=initial_blocks,
            max_blocks=max_blocks,
            on_block_hash_dropped=self._hot_dropped,
            order=order,
        )
        self._sizes = BlockSizes(bytes_per_token, checkpoint_bytes, header_bytes)
        self.tree = PrefixTree(block_size)
        self._filling: dict[BlockHash, StoreTicket | None] = {}
        """Blocks to be sealed, by their tickets; None for a cold one that is being promoted."""
        self._roots: set[BlockHash] = set()
        self.cold = ColdTier(
            limit_bytes=ssd_limit_bytes,
            pending_limit_bytes=pending_limit_bytes,
            gdn_pending_limit_bytes=gdn_pending_limit_bytes,
            policy=write_policy,
            stats=self.stats,
            on_file_gone=lambda block_hash: self.files.file_gone(block_hash),
        )
        self.set_policy(write_policy)
        self.files = PersistedBlocks(
            self.tree,
            self.pool,
            self.cold,
            self.stats,
            self._sizes,
            self._filling,
            self._roots,
        )
        self._superseding = False
        self.now: float | None = None
        """Unix seconds, as the owner tells: when something is used now. It is only shown."""

    def set_policy(self, policy: WritePolicy) -> None:
        """What gets a file from now on. Without RAM to keep it in, what gets none is lost."""
        self.cold.policy = policy
        self.cold.patient = policy is WritePolicy.THROUGH or self.pool.set_bytes == 0

    # ── look-up ──────────────────────────────────────────────────────────────────────────────

    def look_up(self, tokens: PackedTokens, salt: str = "") -> Grant:
        """Hold the longest usable prefix of a prompt, at most all but its last token.

        At least one prompt token must be computed, or there is nothing to sample from.
        """
        root = root_hash(self.namespace, salt)
        self._roots.add(root)
        known = self.tree.find(root, tokens)
        found, checkpoint = self._at_checkpoint(root, known, tokens)
        path = found.path if checkpoint is None else [*found.path, checkpoint]
        self.cold.ledger.touch([node.block_hash for node in path])
        self.stats.hits += len(found.path)
        self.stats.misses += -(-num_tokens(tokens) // self.block_size) - len(found.path)
        self.stats.gdn_checkpoint_loads += checkpoint is not None
        # Hot blocks are held before room is made for cold ones, so that none of them has to go.
        for node in path:
            node.sighted = True
            node.used_at = self.now
            if node.hot:
                self._hold(node.block_hash)
                self.files.in_use(node)
        blocks: list[BlockRef] = []
        for index, node in enumerate(found.path):
            size = num_tokens(node.tokens)
            take = found.take_last if index == len(found.path) - 1 else size
            blocks.append(self._refer(node, take))
            # The rest of the block is about to be written differently: its data is copied.
            self.stats.cow_copies += take < size
        state = None if checkpoint is None else self._refer(checkpoint, 0)
        self.stats.shared_blocks = max(self.stats.shared_blocks, self.pool.num_shared)
        gain = known.ended.token - found.ended.token
        branch = known.ended.token if gain >= BRANCH_GAIN else None
        return Grant(root, tuple(blocks), found.ended, state, branch)

    def size_of(self, tokens: PackedTokens, place: Place | None) -> int:
        """Bytes in RAM of a block, or of a checkpoint."""
        return self._sizes.in_ram(tokens, place)

    def probe(self, tokens: PackedTokens, salt: str = "") -> tuple[int, int, ReuseEnded]:
        """How many tokens a look-up would find in RAM and in files. Changes nothing."""
        root = root_hash(self.namespace, salt)
        found, _ = self._at_checkpoint(root, self.tree.find(root, tokens), tokens)
        ram = ssd = 0
        for index, node in enumerate(found.path):
            last = index == len(found.path) - 1
            take = found.take_last if last else num_tokens(node.tokens)
            ram, ssd = (ram + take, ssd) if node.hot else (ram, ssd + take)
        return ram, ssd, found.ended

    def cold_of(self, tokens: PackedTokens, salt: str = "") -> tuple[tuple[BlockRef, int], ...]:
        """What a look-up would have read, with its bytes in RAM. Changes nothing.

        In the order of ``Grant.cold``: the checkpoint first.
        """
        root = root_hash(self.namespace, salt)
        found, checkpoint = self._at_checkpoint(root, self.tree.find(root, tokens), tokens)
        path = found.path if checkpoint is None else [checkpoint, *found.path]
        return tuple(
            (_ref(node, num_tokens(node.tokens), None), node.size) for node in path if not node.hot
        )

    def _at_checkpoint(
        self, root: BlockHash, known: Found, tokens: PackedTokens
    ) -> tuple[Found, Node | None]:
        """What can be continued: all of it, or for recurrent models up to a checkpoint."""
        if not self.checkpoint_bytes:
            return known, None
        position, node = next(self.tree.checkpoints(root, known, tokens), (0, None))
        if position == known.ended.token:
            return known, node
        path = known.path[: -(-position // self.block_size)]
        take_last = position - (len(path) - 1) * self.block_size if path else 0
        return Found(path, take_last, ReuseEnded(Reason.NO_CHECKPOINT, position)), node

    def _refer(self, node: Node, take: int) -> BlockRef:
        place = self.pool.get(node.block_hash) if node.hot else self._place_to_fill(node)
        return _ref(node, take, place)

    def _hold(self, block_hash: BlockHash) -> None:
        block_id = self.pool.get(block_hash)
        assert block_id is not None, "a hot node has a place in the pool"
        acquired = self.pool.acquire_cached_block(block_id, block_hash)
        assert acquired, "the pool's index and ours never disagree"

    def _place_to_fill(self, node: Node) -> BlockId | None:
        if node.block_hash in self._filling:
            return None  # another restore is filling it already
        place = self.pool.allocate_block(node.size, protect=node.parent)
        if place is not None:
            self._filling[node.block_hash] = None
        return place

    # ── storing ──────────────────────────────────────────────────────────────────────────────

    def store(self, wish: StoreWish) -> StoreTicket | None:
        """Permit a computed block to be stored. None: it is there already, or has no place."""
        node = self.tree.get(wish.block_hash)
        if node is not None:
            self._want(node, wish)
        if wish.block_hash in self._filling or (node is not None and node.pending):
            return None
        hot = node is not None and node.hot
        known = node is not None and node.ssd and (wish.carries is None or node.carries is not None)
        if (hot and (known or wish.carries is None)) or not self._reachable(wish.parent):
            return None
        if wish.place is None and wish.carries is None and self._covered(wish):
            return None
        size = self._sizes.in_ram(wish.tokens, wish.place)
        place = None if hot else self.pool.allocate_block(size, protect=wish.parent)
        sighted = self.cold.sighted(wish.block_hash) or node is not None
        write = wish.persist and sighted and not known and self.files.admit(wish)
        if place is None and not write:
            return None
        ticket = self._filling[wish.block_hash] = StoreTicket(wish, place, write)
        return ticket

    def seal(
        self, wish: StoreWish, block_id: BlockId | None, *, stored: bool, writing: bool, write: bool
    ) -> None:
        """A ticket's end: ``stored`` in RAM, and ``writing`` if the writer took it.

        ``write`` is what the ticket said, so that a write that did not come about gives its room
        back.
        """
        del self._filling[wish.block_hash]
        size = self._sizes.in_ram(wish.tokens, wish.place)
        if write and not writing:
            self.files.not_begun(wish)
        if block_id is not None and not stored:
            self.pool.abandon(block_id)
        if not (stored and block_id is not None) and not writing:
            return
        node = self.tree.get(wish.block_hash)
        if node is None:
            node = Node(
                wish.block_hash, wish.parent, wish.tokens, size, wish.place, persist=wish.persist
            )
            node.sighted = write or self.cold.policy is not WritePolicy.SELECTIVE
            self.tree.nodes[wish.block_hash] = node
        node.used_at = self.now
        if writing:
            self.files.begin(node, wish)
        if stored and block_id is not None:
            self._make_hot(node, block_id, wish.cost_s)
        self.files.sealed(wish.block_hash)

    def promoted(self, ref: BlockRef, *, stored: bool) -> None:
        """A cold block was restored, and its place filled if it had one; or it was not."""
        if stored:
            self.stats.ssd_restored_bytes += self._sizes.in_ram(ref.tokens, ref.place)
        if ref.block_id is None:
            return  # there was no place to fill
        del self._filling[ref.block_hash]
        if not stored:
            self.pool.abandon(ref.block_id)
            return
        node = self.tree.get(ref.block_hash)
        if node is None:  # its file was given up while it was read; what hangs on it needs it
            size = self._sizes.in_ram(ref.tokens, ref.place)
            node = Node(ref.block_hash, ref.parent, ref.tokens, size, ref.place)
            self.tree.nodes[ref.block_hash] = node
        self._make_hot(node, ref.block_id)

    def _make_hot(self, node: Node, block_id: BlockId, cost_s: float = 0.0) -> None:
        node.hot = True
        self.tree.show(node)
        self.files.in_use(node)
        if node.place is None:
            self._reclaim_superseded(node)
        elif node.place is Place.TURN:
            self._thin(node)
        # A lowered limit may drop it at once.
        self.pool.seal(block_id, node.block_hash, node.parent, cost_s)

    def _want(self, node: Node, wish: StoreWish) -> None:
        """A known block was computed again: it may be worth a file now, or worth one again."""
        node.doomed = False
        node.sighted = True
        node.persist = node.persist or wish.persist
        self.files.in_use(node)

    def _reachable(self, parent: BlockHash) -> bool:
        return parent in self._roots or parent in self.tree.nodes or parent in self._filling

    # ── keeping the tree ─────────────────────────────────────────────────────────────────────

    def clear(self, *, hot: bool, ssd: bool) -> int:
        """Forget what nobody holds; returns how many blocks lost their last copy or a copy.

        What is dirty gets its file before it leaves RAM, unless files are cleared as well or
        can't be written now.
        """
        count = 0
        if hot:
            count += self.pool.clear(keep=set() if ssd else self.files.keep_until_written())
        if ssd:
            count += self.files.clear()
        return count

    def start_over(self) -> None:
        """Every payload in RAM is gone, and so is whoever held or filled blocks: files are left."""
        self.files.start_over()
        self._filling.clear()
        self.pool.start_over()
        for node in list(self.tree.nodes.values()):
            node.hot = False
            self.tree.drop_if_gone(node)
        if self.cold.writable:  # else not everything is counted, and whoever counts sees to it
            self.cold.set_limit(self.cold.ledger.limit_bytes)

    def touch(self, chain: Iterable[BlockHash]) -> None:
        """A sequence ended: its chain, from head to tail, was in use until now."""
        chain = list(chain)
        for block_hash in chain:
            node = self.tree.get(block_hash)
            if node is not None:
                node.used_at = self.now
        self.pool.touch(chain)
        self.cold.ledger.touch(chain)

    def view(self, *, depth: int, most: int) -> TreeView:
        """What can be found, for people who look. Changes nothing."""
        return view(self.tree, self.pool, depth=depth, most=most)

    @property
    def num_checkpoints(self) -> int:
        return sum(node.place is not None for node in self.tree.nodes.values())

    def check(self) -> None:
        """Assert what this class promises about its own state. O(blocks): for tests and idle."""
        self.pool.check()
        for name, node in self.tree.nodes.items():
            assert node.hot == (self.pool.get(name) is not None), "the indexes disagree"
        self.tree.check()
        self.files.check()

    def _reclaim_superseded(self, node: Node) -> None:
        """Give up tails in RAM that ``node`` starts with."""
        for shorter in self.tree.shorter(node):
            if shorter.hot:
                self.files.not_worth_a_file(shorter)
                self._superseding = True
                self.pool.evict_block_permanently(shorter.block_hash)
                self._superseding = False

    def _hot_dropped(self, block_hash: BlockHash) -> None:
        node = self.tree.nodes[block_hash]
        node.hot = False
        self.files.left_ram(node)
        if not node.ssd and not node.pending and not self._superseding:
            self.stats.evictions_ram += 1
        self.files.gone_if_unreadable(node)

    def _thin(self, newest: Node) -> None:
        """Let go of the checkpoints of a chain that its newest one makes not worth their room."""
        along = self.tree.along(newest)
        marks = {
            Mark(position, node.place if node.place is not None else Place.LATTICE): node
            for position, node in along
        }
        for mark in thin(list(marks)):
            if marks[mark] is not newest:
                self.files.give_up(marks[mark])

    def _covered(self, wish: StoreWish) -> bool:
        return self.tree.covers(wish.parent, wish.block_hash, wish.tokens)


def _ref(node: Node, take: int, block_id: BlockId | None) -> BlockRef:
    return BlockRef(
        node.block_hash,
        node.parent,
        node.tokens,
        take,
        block_id,
        cold=not node.hot,
        place=node.place,
        queued=node.queued and not node.ssd,
    )
