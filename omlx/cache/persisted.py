"""Which blocks have files, which are on their way to one, and which should get one.

    dirty      in RAM, worth a file, without one
    pending    with the writer, or about to be
    queued     pending, and the writer can be asked for its payload

Files are written, read and removed by the actors; they report here what became of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from omlx.cache.block_sizes import BlockSizes
from omlx.cache.blocks import BlockHash, PackedTokens, chain_hash, state_hash
from omlx.cache.checkpoints import Place
from omlx.cache.cold_tier import ColdTier
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.prefix_tree import Node, PrefixTree
from omlx.cache.stats import CacheStats
from omlx.cache.tickets import StoreTicket, StoreWish, WriteTicket


class PersistedBlocks:
    """Shares the tree and the pool with the prefix cache, which owns them.

    ``permitted`` are the tickets that are not sealed yet, ``roots`` the roots that prompts had.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pool: PagedCacheManager,
        cold: ColdTier,
        stats: CacheStats,
        sizes: BlockSizes,
        permitted: Mapping[BlockHash, StoreTicket | None],
        roots: Collection[BlockHash],
    ) -> None:
        self.cold = cold
        self._tree = tree
        self._pool = pool
        self._stats = stats
        self._sizes = sizes
        self._permitted = permitted
        self._roots = roots
        self._dirty: OrderedDict[BlockHash, None] = OrderedDict()
        self._early: dict[BlockHash, int | None] = {}
        """What the writer reported before the ticket was sealed: bytes, or None for a failure."""
        self._leaving: set[BlockHash] = set()
        """Dirty when RAM was cleared: they leave it as soon as they have a file."""

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    @property
    def pending(self) -> tuple[BlockHash, ...]:
        """Blocks on their way to a file."""
        return tuple(name for name, node in self._tree.nodes.items() if node.pending)

    # ── what gets a file ─────────────────────────────────────────────────────────────────────

    def in_use(self, node: Node) -> None:
        """A block in RAM is in use. If it has no file, or had to give it up, it gets one."""
        self._leaving.discard(node.block_hash)
        worth = node.persist and node.sighted
        if node.hot and worth and not node.ssd and not node.pending:
            self._dirty[node.block_hash] = None

    def admit(self, wish: StoreWish) -> bool:
        """Reserve room to write a block or checkpoint behind its parent.

        What is persisted of a chain is always a prefix of it, so the parent must have its file
        or be on its way to it.
        """
        cold, size = self.cold, self._sizes.in_file(wish)
        if not cold.writable or not self._persisted(wish.parent):
            return False
        if cold.is_to_be_removed(wish.block_hash):
            return False
        if not cold.queue_of(wish.place).has_room(size):
            self._stats.pending_stops += not cold.patient
            return False
        return cold.begin_write(wish.parent, size, wish.place)

    def may_ask_again(self, wish: StoreWish) -> bool:
        """Whether a block that got no ticket only lacks room to wait for its file."""
        cold, node = self.cold, self._tree.get(wish.block_hash)
        known = node is not None and (node.ssd or node.pending)
        return (
            cold.patient
            and cold.writable
            and wish.persist
            and not known
            and self._persisted(wish.parent)
            and not cold.queue_of(wish.place).has_room(self._sizes.in_file(wish))
        )

    def is_coming(self, block_hash: BlockHash) -> bool:
        """Whether a block has no file yet, and will get one."""
        node = self._tree.get(block_hash)
        coming = node is not None and (node.pending or block_hash in self._dirty)
        return coming and self.cold.writable

    def _persisted(self, parent: BlockHash) -> bool:
        """Whether a block behind ``parent`` would extend what is, or soon is, in files."""
        node, ticket = self._tree.get(parent), self._permitted.get(parent)
        return (
            parent in self._roots
            or (node is not None and (node.ssd or node.pending))
            or (ticket is not None and ticket.write)
        )

    def take_writes(self, most: int) -> list[WriteTicket]:
        """Dirty blocks that can be written now, oldest first, parents before children."""
        tickets: list[WriteTicket] = []
        cold = self.cold
        for block_hash in list(self._dirty):
            node = self._tree.nodes[block_hash]
            if len(tickets) == most or not cold.writable:
                break
            if not self._persisted(node.parent) or cold.is_to_be_removed(block_hash):
                continue
            size = node.size + self._sizes.header_bytes
            has_room = cold.queue_of(node.place).has_room(size)
            if not has_room or not cold.begin_write(node.parent, size, node.place):
                continue
            del self._dirty[block_hash]
            block_id = self._pool.get(block_hash)
            assert block_id is not None, "a dirty block is in RAM"
            node.pending, node.reserved = True, size
            self._with_the_writer(node)
            tickets.append(WriteTicket(block_id, block_hash, node.parent, node.tokens, node.place))
        return tickets

    def _with_the_writer(self, node: Node) -> None:
        """Until it has its file, the writer can be asked for what it is to write."""
        node.queued = True
        self._tree.show(node)
        self._show_embedded(node)

    def begin(self, node: Node, wish: StoreWish) -> None:
        """The writer took a block that was computed just now."""
        node.pending, node.carries = True, wish.carries
        node.reserved = self._sizes.in_file(wish)
        self._with_the_writer(node)

    def not_begun(self, wish: StoreWish) -> None:
        """A write that was admitted did not come about."""
        self.cold.end_write(self._sizes.in_file(wish), wish.place)
        self._stats.pending_stops += 1

    def sealed(self, block_hash: BlockHash) -> None:
        """Take up what the writer reported before the block was sealed."""
        if block_hash not in self._early:
            return
        nbytes = self._early.pop(block_hash)
        if nbytes is None:
            self.write_failed(block_hash)
        else:
            self.written(block_hash, nbytes)

    # ── what became of it ────────────────────────────────────────────────────────────────────

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
        size = self._sizes.in_ram(tokens, place)
        node = self._tree.nodes.setdefault(
            block_hash, Node(block_hash, parent, tokens, size, place)
        )
        if not node.ssd:
            node.ssd = True
            self._dirty.pop(block_hash, None)
            node.carries = carries
            self.cold.ledger.add(block_hash, n, parent)
            self._tree.show(node)
            self._show_embedded(node)

    def order_files(self, used_at: Mapping[BlockHash, float]) -> None:
        """Take over the order in which files were last used."""
        self.cold.ledger.order(
            used_at, {name: node.parent for name, node in self._tree.nodes.items()}
        )
        for name, time in used_at.items():
            node = self._tree.get(name)
            if node is not None and node.used_at is None:
                node.used_at = time

    def vanished(self, block_hashes: Iterable[BlockHash]) -> None:
        """Files that are not there any more, although nobody gave them up."""
        for block_hash in block_hashes:
            self.cold.ledger.discard(block_hash)
            self.file_gone(block_hash)
            node = self._tree.get(block_hash)
            if node is not None:
                self.in_use(node)

    def written(self, block_hash: BlockHash, nbytes: int) -> bool:
        """A pending block has its file, of ``nbytes``. False when we did not wait for it."""
        node = self._pending_node(block_hash, nbytes)
        if node is None:
            return block_hash in self._early
        self.cold.end_write(node.reserved, node.place)
        node.pending = node.queued = False
        self.cold.ledger.discard(block_hash)  # a file without its checkpoint was replaced
        node.ssd = True
        self._stats.ssd_written_bytes += nbytes
        self._stats.ssd_written_files += 1
        self.cold.ledger.add(block_hash, nbytes, node.parent)
        self._tree.show(node)
        self._show_embedded(node)
        if node.doomed or not self._persisted(node.parent):
            # It was cleared, or its parent's file had to go: what is persisted is a prefix.
            node.doomed = False
            self.cold.evict(block_hash)
        elif node.place is None:
            for shorter in self._tree.shorter(node):
                if shorter.ssd and shorter.carries is None:
                    self.cold.evict(shorter.block_hash)
        if block_hash in self._leaving and self._pool.evict_block_permanently(block_hash):
            self._leaving.discard(block_hash)
        # Its header comes on top of what was reserved, and the limit may be a lower one by now.
        self.cold.set_limit(self.cold.ledger.limit_bytes)
        return True

    def write_failed(self, block_hash: BlockHash) -> None:
        """A pending block has no file. It stays dirty if it is in RAM, and is offered again."""
        node = self._pending_node(block_hash, None)
        if node is None:
            return
        self.cold.end_write(node.reserved, node.place)
        node.pending = node.queued = node.doomed = False
        if node.carries is not None:
            self._drop_embedded(node)
        if node.hot:
            self._dirty[block_hash] = None
        self.gone_if_unreadable(node)

    def writes_passed(self, block_hashes: Iterable[BlockHash]) -> None:
        """The writer is past these: those of them that are pending still have failed unheard.

        Whether there is a file, of this write or a former one, nobody knows; it is removed.
        """
        for block_hash in block_hashes:
            node = self._tree.get(block_hash)
            if node is not None and node.pending:
                self.write_failed(block_hash)
                self.cold.evict(block_hash)

    def _pending_node(self, block_hash: BlockHash, report: int | None) -> Node | None:
        """The node a report of the writer is about; the writer can be faster than the seal."""
        node = self._tree.get(block_hash)
        if node is not None and node.pending:
            return node
        ticket = self._permitted.get(block_hash)
        if ticket is not None and ticket.write:
            self._early[block_hash] = report
        return None

    def lost(self, block_hash: BlockHash, *, corrupt: bool) -> None:
        """A file could not be read: it is gone, or it was removed because it is damaged."""
        self._stats.corrupt_blocks += corrupt
        node = self._tree.get(block_hash)
        if node is not None and node.place is not None:
            self._stats.gdn_checkpoint_walkbacks += 1
            self._stats.gdn_decode_failures += corrupt
            if node.embedded:
                self.cold.evict(chain_hash(node.parent, node.tokens))
        if node is not None and node.ssd and node.hot and node.persist and not node.pending:
            self._dirty[block_hash] = None
        self.cold.ledger.discard(block_hash)
        self.file_gone(block_hash)

    # ── what loses its file ──────────────────────────────────────────────────────────────────

    def clear(self) -> int:
        """Give up every file, also of other models; returns how many were of this one."""
        self.cold.evict_others()
        count = 0
        for node in list(self._tree.nodes.values()):
            node.doomed = node.pending
            if node.ssd:
                self.cold.evict(node.block_hash)
                count += 1
            elif node.queued:
                self.file_gone(node.block_hash)
        return count

    def keep_until_written(self) -> set[BlockHash]:
        """RAM is cleared: what is dirty and can get a file leaves when it has it.

        That is, all that lead to it have one, or will.
        """
        chosen: set[BlockHash] = set()
        if self.cold.writable:
            for block_hash in self._dirty:
                parent = self._tree.nodes[block_hash].parent
                if parent in chosen or self._persisted(parent):
                    chosen.add(block_hash)
        self._leaving |= chosen
        return chosen

    def left_ram(self, node: Node) -> None:
        self._dirty.pop(node.block_hash, None)
        self._leaving.discard(node.block_hash)

    def not_worth_a_file(self, node: Node) -> None:
        self._dirty.pop(node.block_hash, None)

    def start_over(self) -> None:
        """RAM is empty. Writes that are under way go on; what was only permitted does not."""
        for block_hash, nbytes in self._early.items():
            ticket = self._permitted[block_hash]
            if nbytes is not None and ticket is not None:
                wish = ticket.wish
                self.found(block_hash, wish.parent, wish.tokens, nbytes, wish.place, wish.carries)
        self._early.clear()
        self._dirty.clear()
        self._leaving.clear()
        for checkpoints in (False, True):
            under_way = sum(
                node.reserved
                for node in self._tree.nodes.values()
                if node.pending and (node.place is not None) is checkpoints
            )
            self.cold.only_pending(under_way, checkpoints=checkpoints)

    def file_gone(self, block_hash: BlockHash) -> None:
        """The tree learns it; the ledger knows it already."""
        node = self._tree.get(block_hash)
        if node is None or not (node.ssd or node.queued):
            return
        node.ssd = node.queued = node.embedded = False
        if node.carries is not None:
            self._drop_embedded(node)
        self.gone_if_unreadable(node)

    def _drop_embedded(self, node: Node) -> None:
        """The file that held a checkpoint as well is gone, or never came."""
        node.carries = None
        state = self._tree.get(state_hash(node.parent, node.tokens))
        if state is not None and state.embedded:
            state.ssd = state.queued = state.embedded = False
            self._tree.drop_if_gone(state)

    def gone_if_unreadable(self, node: Node) -> None:
        """A block that can't be read takes along the checkpoints that only it led to."""
        self._tree.drop_if_gone(node)
        if node.place is None and not node.readable:
            for checkpoint in self._tree.stranded(node):
                self.give_up(checkpoint)

    def give_up(self, node: Node) -> None:
        """Let go of every copy, where nobody holds it."""
        self._dirty.pop(node.block_hash, None)
        if node.hot:
            self._pool.evict_block_permanently(node.block_hash)
        if node.ssd:
            self.cold.evict(node.block_hash)

    def _show_embedded(self, node: Node) -> None:
        """A block's file brings the checkpoint at its end along."""
        if node.carries is None:
            return
        name = state_hash(node.parent, node.tokens)
        state = self._tree.nodes.setdefault(
            name,
            Node(
                name,
                node.parent,
                node.tokens,
                self._sizes.checkpoint_bytes,
                node.carries,
                persist=False,
            ),
        )
        if state.embedded or not state.ssd:
            state.embedded, state.ssd, state.queued = True, node.ssd, node.queued
            self._tree.show(state)

    def check(self) -> None:
        """Assert what this class promises about its own state. O(blocks): for tests and idle."""
        self.cold.check()
        for name, node in self._tree.nodes.items():
            assert node.embedded or node.ssd == (name in self.cold.ledger), "the ledger disagrees"
            assert node.embedded or node.pending or not node.queued, "nobody has it"
        for name in self._dirty:
            node = self._tree.nodes[name]
            assert node.hot and not node.ssd and not node.pending
        assert all(self._tree.nodes[name].hot for name in self._leaving)
