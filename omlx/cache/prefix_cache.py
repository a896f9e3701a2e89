"""The longest prefix that was ever computed, exact to the token, across both tiers.

Blocks form a tree: a node's name is the chain hash of its tokens behind its parent. A prompt is
followed down full block by full block. Where the next full block is unknown, the children of the
last node are compared token by token, and the common part of the best one is used as well, so a
partial tail and a conversation that diverges in the middle of a block are reused to the token.

    readable   in RAM, or in a file: a look-up can find it
    pending    on its way to a file; readable only if it is in RAM too

Nothing here sees an array, a file or a clock. Answers name blocks; the engine and the disk do
the rest and report back (``seal``, ``written``, ``lost``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from omlx.cache.blocks import (
    BlockHash,
    BlockId,
    PackedTokens,
    chain_hash,
    num_tokens,
    root_hash,
    state_hash,
)
from omlx.cache.checkpoints import Mark, Place, thin
from omlx.cache.eviction import EvictionOrder, LruOrder
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.pending import Pending
from omlx.cache.prefix_tree import Found, Node, PrefixTree
from omlx.cache.stats import CacheStats
from omlx.cache.tickets import (
    BlockRef,
    Grant,
    Reason,
    ReuseEnded,
    StoreTicket,
    StoreWish,
    WriteTicket,
)

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
        initial_blocks: int = 256,
        max_blocks: int = 1 << 20,
        order: Callable[[], EvictionOrder] = LruOrder,
    ) -> None:
        assert block_size > 0
        self.namespace = namespace
        self.block_size = block_size
        self.bytes_per_token = bytes_per_token
        self.checkpoint_bytes = checkpoint_bytes
        self.pending_limit_bytes = pending_limit_bytes
        self.block_writes = Pending(max(1, pending_limit_bytes))
        self.checkpoint_writes = Pending(gdn_pending_limit_bytes)
        self.writable = ssd_limit_bytes > 0
        """False while the cold tier can't be written: off, full or broken."""
        self.stats = CacheStats()
        self.pool = PagedCacheManager(
            limit_bytes=hot_limit_bytes,
            initial_blocks=initial_blocks,
            max_blocks=max_blocks,
            on_block_hash_dropped=self._hot_dropped,
            order=order,
        )
        self.ledger = PagedSSDCacheManager(ssd_limit_bytes)
        self._tree = PrefixTree(block_size)
        self._filling: dict[BlockHash, StoreTicket | None] = {}
        """Blocks to be sealed, by their tickets; None for a cold one that is being promoted."""
        self._dirty: OrderedDict[BlockHash, None] = OrderedDict()
        self._roots: set[BlockHash] = set()
        self._early: dict[BlockHash, int | None] = {}
        """What the writer reported before the ticket was sealed: bytes, or None for a failure."""
        self._deletes: dict[BlockHash, None] = {}
        """Files to be removed. None of these is written before that."""

    # ── look-up ──────────────────────────────────────────────────────────────────────────────

    def look_up(self, tokens: PackedTokens, salt: str = "") -> Grant:
        """Hold the longest usable prefix of a prompt, at most all but its last token.

        At least one prompt token must be computed, or there is nothing to sample from.
        """
        root = root_hash(self.namespace, salt)
        self._roots.add(root)
        known = self._tree.find(root, tokens)
        found, checkpoint = self._at_checkpoint(root, known, tokens)
        path = found.path if checkpoint is None else [*found.path, checkpoint]
        self.ledger.touch([node.block_hash for node in path])
        self.stats.hits += len(found.path)
        self.stats.misses += -(-num_tokens(tokens) // self.block_size) - len(found.path)
        self.stats.gdn_checkpoint_loads += checkpoint is not None
        # Hot blocks are held before room is made for cold ones, so that none of them has to go.
        for node in path:
            if node.hot:
                self._hold(node.block_hash)
                self._worth_a_file(node)
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

    def probe(self, tokens: PackedTokens, salt: str = "") -> tuple[int, int, ReuseEnded]:
        """How many tokens a look-up would find in RAM and in files. Changes nothing."""
        root = root_hash(self.namespace, salt)
        found, _ = self._at_checkpoint(root, self._tree.find(root, tokens), tokens)
        ram = ssd = 0
        for index, node in enumerate(found.path):
            last = index == len(found.path) - 1
            take = found.take_last if last else num_tokens(node.tokens)
            ram, ssd = (ram + take, ssd) if node.hot else (ram, ssd + take)
        return ram, ssd, found.ended

    def _at_checkpoint(
        self, root: BlockHash, known: Found, tokens: PackedTokens
    ) -> tuple[Found, Node | None]:
        """What can be continued: all of it, or for recurrent models up to a checkpoint."""
        if not self.checkpoint_bytes:
            return known, None
        position, node = next(self._tree.checkpoints(root, known, tokens), (0, None))
        if position == known.ended.token:
            return known, node
        path = known.path[: -(-position // self.block_size)]
        take_last = position - (len(path) - 1) * self.block_size if path else 0
        return Found(path, take_last, ReuseEnded(Reason.NO_CHECKPOINT, position)), node

    def _refer(self, node: Node, take: int) -> BlockRef:
        place = self.pool.get(node.block_hash) if node.hot else self._place_to_fill(node)
        return BlockRef(
            node.block_hash, node.parent, node.tokens, take, place, not node.hot, node.place
        )

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
        node = self._tree.get(wish.block_hash)
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
        size = self._size_of(wish.tokens, wish.place)
        place = None if hot else self.pool.allocate_block(size, protect=wish.parent)
        write = wish.persist and not known and self._admit_write(wish, self._file_size_of(wish))
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
        size = self._size_of(wish.tokens, wish.place)
        if write and not writing:
            self._end_write(self._file_size_of(wish), wish.place)
            self.stats.pending_stops += 1
        if block_id is not None and not stored:
            self.pool.abandon(block_id)
        if not (stored and block_id is not None) and not writing:
            return
        node = self._tree.get(wish.block_hash)
        if node is None:
            node = Node(
                wish.block_hash, wish.parent, wish.tokens, size, wish.place, persist=wish.persist
            )
            self._tree.nodes[wish.block_hash] = node
        if writing:
            node.pending, node.carries = True, wish.carries
            node.reserved = self._file_size_of(wish)
        if stored and block_id is not None:
            self._make_hot(node, block_id, wish.cost_s)
        if wish.block_hash in self._early:
            nbytes = self._early.pop(wish.block_hash)
            if nbytes is None:
                self.write_failed(wish.block_hash)
            else:
                self.written(wish.block_hash, nbytes)

    def promoted(self, ref: BlockRef, *, stored: bool) -> None:
        """A cold block was restored, and its place filled if it had one; or it was not."""
        if stored:
            self.stats.ssd_restored_bytes += self._size_of(ref.tokens, ref.place)
        if ref.block_id is None:
            return  # there was no place to fill
        del self._filling[ref.block_hash]
        if not stored:
            self.pool.abandon(ref.block_id)
            return
        node = self._tree.get(ref.block_hash)
        if node is None:  # its file was given up while it was read; what hangs on it needs it
            size = self._size_of(ref.tokens, ref.place)
            node = Node(ref.block_hash, ref.parent, ref.tokens, size, ref.place)
            self._tree.nodes[ref.block_hash] = node
        self._make_hot(node, ref.block_id)

    def take_writes(self, most: int) -> list[WriteTicket]:
        """Dirty blocks that can be written now, oldest first, parents before children."""
        tickets: list[WriteTicket] = []
        for block_hash in list(self._dirty):
            node = self._tree.nodes[block_hash]
            size = node.size
            if len(tickets) == most or not self.writable:
                break
            if not self._queue_of(node.place).has_room(size) or not self._persisted(node.parent):
                continue
            if block_hash in self._deletes or not self._reserve(node.parent, size, node.place):
                continue
            del self._dirty[block_hash]
            block_id = self.pool.get(block_hash)
            assert block_id is not None, "a dirty block is in RAM"
            node.pending, node.reserved = True, size
            tickets.append(WriteTicket(block_id, block_hash, node.parent, node.tokens, node.place))
        return tickets

    def _make_hot(self, node: Node, block_id: BlockId, cost_s: float = 0.0) -> None:
        node.hot = True
        self._tree.show(node)
        self._worth_a_file(node)
        if node.place is None:
            self._reclaim_superseded(node, hot=True)
        elif node.place is Place.TURN:
            self._thin(node)
        # A lowered limit may drop it at once.
        self.pool.seal(block_id, node.block_hash, node.parent, cost_s)

    def _want(self, node: Node, wish: StoreWish) -> None:
        """A known block was computed again: it may be worth a file now, or worth one again."""
        node.doomed = False
        node.persist = node.persist or wish.persist
        self._worth_a_file(node)

    def _worth_a_file(self, node: Node) -> None:
        """A block in RAM is in use. If it has no file, or had to give it up, it gets one."""
        if node.hot and node.persist and not node.ssd and not node.pending:
            self._dirty[node.block_hash] = None

    def _reachable(self, parent: BlockHash) -> bool:
        return parent in self._roots or parent in self._tree.nodes or parent in self._filling

    # ── the cold tier's side ─────────────────────────────────────────────────────────────────

    def found(
        self,
        block_hash: BlockHash,
        parent: BlockHash,
        tokens: PackedTokens,
        n: int,
        place: Place | None = None,
        carries: Place | None = None,
    ) -> None:
        """A file of ``n`` bytes was found at start, or came unexpectedly."""
        size = self._size_of(tokens, place)
        node = self._tree.nodes.setdefault(
            block_hash, Node(block_hash, parent, tokens, size, place)
        )
        if not node.ssd:
            node.ssd = True
            self._dirty.pop(block_hash, None)
            node.carries = carries
            self.ledger.add(block_hash, n, parent)
            self._tree.show(node)
            self._show_embedded(node)

    def order_files(self, used_at: Mapping[BlockHash, float]) -> None:
        """Take over the order in which files were last used."""
        self.ledger.order(used_at, {name: node.parent for name, node in self._tree.nodes.items()})

    def written(self, block_hash: BlockHash, nbytes: int) -> bool:
        """A pending block has its file, of ``nbytes``. False when we did not wait for it."""
        node = self._pending_node(block_hash, nbytes)
        if node is None:
            return block_hash in self._early
        self._end_write(node.reserved, node.place)
        node.pending = False
        self.ledger.discard(block_hash)  # a file without its checkpoint was replaced
        node.ssd = True
        self.stats.ssd_written_bytes += nbytes
        self.ledger.add(block_hash, nbytes, node.parent)
        self._tree.show(node)
        self._show_embedded(node)
        if node.doomed or not self._persisted(node.parent):
            # It was cleared, or its parent's file had to go: what is persisted is a prefix.
            node.doomed = False
            self.evict_file(block_hash)
        elif node.place is None:
            self._reclaim_superseded(node, hot=False)
        # Its header comes on top of what was reserved, and the limit may be a lower one by now.
        self.set_ssd_limit(self.ledger.limit_bytes)
        return True

    def write_failed(self, block_hash: BlockHash) -> None:
        """A pending block has no file. It stays dirty if it is in RAM, and is offered again."""
        node = self._pending_node(block_hash, None)
        if node is None:
            return
        self._end_write(node.reserved, node.place)
        node.pending = node.doomed = False
        if not node.ssd:
            node.carries = None
        if node.hot:
            self._dirty[block_hash] = None
        self._tree.drop_if_gone(node)

    @property
    def pending(self) -> tuple[BlockHash, ...]:
        """Blocks on their way to a file."""
        return tuple(name for name, node in self._tree.nodes.items() if node.pending)

    def writes_passed(self, block_hashes: Iterable[BlockHash]) -> None:
        """The writer is past these: those of them that are pending still have failed unheard.

        Whether there is a file, of this write or a former one, nobody knows; it is removed.
        """
        for block_hash in block_hashes:
            node = self._tree.get(block_hash)
            if node is not None and node.pending:
                self.write_failed(block_hash)
                self.evict_file(block_hash)

    def _pending_node(self, block_hash: BlockHash, report: int | None) -> Node | None:
        """The node a report of the writer is about; the writer can be faster than the seal."""
        node = self._tree.get(block_hash)
        if node is not None and node.pending:
            return node
        ticket = self._filling.get(block_hash)
        if ticket is not None and ticket.write:
            self._early[block_hash] = report
        return None

    def lost(self, block_hash: BlockHash, *, corrupt: bool) -> None:
        """A file could not be read: it is gone, or it was removed because it is damaged."""
        self.stats.corrupt_blocks += corrupt
        node = self._tree.get(block_hash)
        if node is not None and node.place is not None:
            self.stats.gdn_checkpoint_walkbacks += 1
            self.stats.gdn_decode_failures += corrupt
            if node.embedded:
                self.evict_file(chain_hash(node.parent, node.tokens))
        if node is not None and node.ssd and node.hot and node.persist and not node.pending:
            self._dirty[block_hash] = None
        self._file_removed(block_hash)

    def evict_file(self, block_hash: BlockHash) -> None:
        """Give up a file on purpose; it is among ``take_deletes``.

        A copy in RAM does not become dirty, or it would be written again and push out the next.
        """
        self._file_removed(block_hash)
        self._deletes[block_hash] = None

    def take_deletes(self) -> tuple[BlockHash, ...]:
        """Names of files to remove. Forgets them."""
        deletes = tuple(self._deletes)
        self._deletes.clear()
        return deletes

    def keep_deletes(self, block_hashes: Iterable[BlockHash]) -> None:
        """Nobody could be told to remove these: they stay among ``take_deletes``."""
        self._deletes.update(dict.fromkeys(block_hashes))

    def set_ssd_limit(self, limit_bytes: int) -> None:
        for block_hash in self.ledger.set_limit(limit_bytes):
            self.stats.evictions_ssd += 1
            self.evict_file(block_hash)

    def _admit_write(self, wish: StoreWish, size: int) -> bool:
        """Reserve room to write a block or checkpoint behind its parent.

        What is persisted of a chain is always a prefix of it, so the parent must have its file
        or be on its way to it.
        """
        if not self.writable or not self._persisted(wish.parent):
            return False
        if wish.block_hash in self._deletes:
            return False
        if not self._queue_of(wish.place).has_room(size):
            self.stats.pending_stops += 1
            return False
        return self._reserve(wish.parent, size, wish.place)

    def _reserve(self, parent: BlockHash, size: int, place: Place | None) -> bool:
        victims = self.ledger.reserve(size, protect=parent)
        if victims is None:
            return False
        for victim in victims:
            self.stats.evictions_ssd += 1
            self.evict_file(victim)
        self._queue_of(place).begin(size)
        return True

    def _queue_of(self, place: Place | None) -> Pending:
        return self.block_writes if place is None else self.checkpoint_writes

    def _persisted(self, parent: BlockHash) -> bool:
        """Whether a block behind ``parent`` would extend what is, or soon is, in files."""
        node, ticket = self._tree.get(parent), self._filling.get(parent)
        return (
            parent in self._roots
            or (node is not None and (node.ssd or node.pending))
            or (ticket is not None and ticket.write)
        )

    def _end_write(self, size: int, place: Place | None) -> None:
        self._queue_of(place).end(size)
        self.ledger.settle(size)

    @property
    def pending_bytes(self) -> int:
        """Of blocks and checkpoints that wait to be written."""
        return self.block_writes.nbytes + self.checkpoint_writes.nbytes

    # ── keeping the tree ─────────────────────────────────────────────────────────────────────

    def clear(self, *, hot: bool, ssd: bool) -> int:
        """Forget what nobody holds; returns how many blocks lost their last copy or a copy."""
        count = self.pool.clear() if hot else 0
        if ssd:
            for node in list(self._tree.nodes.values()):
                node.doomed = node.pending
                if node.ssd:
                    self.evict_file(node.block_hash)
                    count += 1
        return count

    def start_over(self) -> None:
        """Every payload in RAM is gone, and so is whoever held or filled blocks: files are left."""
        for block_hash, nbytes in self._early.items():
            ticket = self._filling[block_hash]
            if nbytes is not None and ticket is not None:
                wish = ticket.wish
                self.found(block_hash, wish.parent, wish.tokens, nbytes, wish.place, wish.carries)
        self._filling.clear()
        self._early.clear()
        self._dirty.clear()
        self.pool.start_over()
        for node in list(self._tree.nodes.values()):
            node.hot = False
            self._tree.drop_if_gone(node)
        # Writes that are under way go on; what was only permitted is not written any more.
        for queue, checkpoints in ((self.block_writes, False), (self.checkpoint_writes, True)):
            under_way = sum(
                node.reserved
                for node in self._tree.nodes.values()
                if node.pending and (node.place is not None) is checkpoints
            )
            self.ledger.settle(queue.nbytes - under_way)
            queue.end(queue.nbytes - under_way)
        self.set_ssd_limit(self.ledger.limit_bytes)

    def touch(self, chain: Iterable[BlockHash]) -> None:
        """A sequence ended: its chain, from head to tail, was in use until now."""
        chain = list(chain)
        self.pool.touch(chain)
        self.ledger.touch(chain)

    @property
    def num_checkpoints(self) -> int:
        return sum(node.place is not None for node in self._tree.nodes.values())

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    def check(self) -> None:
        """Assert what this class promises about its own state. O(blocks): for tests and idle."""
        self.pool.check()
        self.ledger.check()
        for name, node in self._tree.nodes.items():
            assert node.hot == (self.pool.get(name) is not None), "the indexes disagree"
            counted = name in self.ledger or node.embedded
            assert node.ssd == counted, "the ledger disagrees"
        self._tree.check()
        for name in self._dirty:
            node = self._tree.nodes[name]
            assert node.hot and not node.ssd and not node.pending
        assert 0 <= self.pending_bytes == self.ledger.reserved_bytes

    def _reclaim_superseded(self, node: Node, *, hot: bool) -> None:
        """Give up tails that ``node`` starts with: in RAM, or their files once it has its own."""
        for shorter in self._tree.shorter(node):
            if hot and shorter.hot:
                self._dirty.pop(shorter.block_hash, None)
                self.pool.evict_block_permanently(shorter.block_hash)
            if not hot and shorter.ssd and shorter.carries is None:
                self.evict_file(shorter.block_hash)

    def _hot_dropped(self, block_hash: BlockHash) -> None:
        node = self._tree.nodes[block_hash]
        node.hot = False
        self._dirty.pop(block_hash, None)
        if not node.ssd and not node.pending:
            self.stats.evictions_ram += 1
        self._gone_if_unreadable(node)

    def _file_removed(self, block_hash: BlockHash) -> None:
        self.ledger.discard(block_hash)
        node = self._tree.get(block_hash)
        if node is None or not node.ssd:
            return
        node.ssd = False
        if node.carries is not None:
            node.carries = None
            state = self._tree.get(state_hash(node.parent, node.tokens))
            if state is not None and state.embedded:
                state.ssd = state.embedded = False
                self._tree.drop_if_gone(state)
        node.embedded = False
        self._gone_if_unreadable(node)

    def _gone_if_unreadable(self, node: Node) -> None:
        """A block that can't be read takes along the checkpoints that only it led to."""
        self._tree.drop_if_gone(node)
        if node.place is None and not node.readable:
            for checkpoint in self._tree.stranded(node):
                self._give_up(checkpoint)

    def _thin(self, newest: Node) -> None:
        """Let go of the checkpoints of a chain that its newest one makes not worth their room."""
        along = self._tree.along(newest)
        marks = {
            Mark(position, node.place if node.place is not None else Place.LATTICE): node
            for position, node in along
        }
        for mark in thin(list(marks)):
            if marks[mark] is not newest:
                self._give_up(marks[mark])

    def _give_up(self, node: Node) -> None:
        self._dirty.pop(node.block_hash, None)
        if node.hot:
            self.pool.evict_block_permanently(node.block_hash)
        if node.ssd:
            self.evict_file(node.block_hash)

    def _show_embedded(self, node: Node) -> None:
        """A block's file brings the checkpoint at its end along."""
        if node.carries is None:
            return
        name = state_hash(node.parent, node.tokens)
        state = self._tree.nodes.setdefault(
            name,
            Node(
                name, node.parent, node.tokens, self.checkpoint_bytes, node.carries, persist=False
            ),
        )
        if not state.ssd:
            state.ssd = state.embedded = True
            self._tree.show(state)

    def _covered(self, wish: StoreWish) -> bool:
        return self._tree.covers(wish.parent, wish.block_hash, wish.tokens)

    def _file_size_of(self, wish: StoreWish) -> int:
        embedded = self.checkpoint_bytes if wish.carries is not None else 0
        return self._size_of(wish.tokens, wish.place) + embedded

    def _size_of(self, tokens: PackedTokens, place: Place | None) -> int:
        if place is not None:
            return self.checkpoint_bytes
        return num_tokens(tokens) * self.bytes_per_token
