"""Everything around the prefix cache, as simple as it can be: who computes, RAM, writer and disk.

The world remembers of each block the tokens it was really computed from, in whose salt. It keeps
to the contracts: seals come in the order of the tickets, the writer works in the order of what it
was given, and a block is not written when its parent was refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from omlx.cache.blocks import (
    BlockHash,
    BlockId,
    PackedTokens,
    chain_hash,
    pack_tokens,
    root_hash,
)
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.cache.tickets import BlockRef, Grant, Reason, StoreTicket, StoreWish

NAMESPACE = "tiny"
BYTES_PER_TOKEN = 4
HEADER_BYTES = 1

Content = tuple[str, tuple[int, ...]]
"""A salt, and every token from the first one to the end of the block."""


@dataclass(frozen=True)
class Block:
    name: BlockHash
    parent: BlockHash
    tokens: PackedTokens
    content: Content


@dataclass(eq=False)
class Sequence:
    """A prompt, what was computed of it and its continuation, and what was asked to be stored."""

    salt: str
    tokens: list[int]
    grant: Grant
    computed: int = 0
    restored: bool = False
    chain: list[BlockHash] = field(default_factory=list)


@dataclass(eq=False)
class Ticket:
    """A store that was permitted, on its way through the engine."""

    ticket: StoreTicket
    block: Block
    stored: bool = False
    writing: bool = False
    exported: bool = False


class World:
    def __init__(self, block_size: int, hot: int, ssd: int, pending: int) -> None:
        """Limits in full blocks."""
        self.block_size = block_size
        self.block_bytes = block_size * BYTES_PER_TOKEN
        self.limits = (hot, ssd, pending)
        self.disk: dict[BlockHash, Block] = {}
        self.damaged: set[BlockHash] = set()
        self.begin()

    def begin(self) -> None:
        """A process starts: RAM is empty, the disk is as it was left."""
        hot, ssd, pending = (limit * self.block_bytes for limit in self.limits)
        self.cache = BlockAwarePrefixCache(
            namespace=NAMESPACE,
            block_size=self.block_size,
            bytes_per_token=BYTES_PER_TOKEN,
            hot_limit_bytes=hot,
            ssd_limit_bytes=ssd,
            pending_limit_bytes=pending,
            initial_blocks=1,
        )
        self.ram: dict[BlockId, Block] = {}
        self.sequences: list[Sequence] = []
        self.tickets: deque[Ticket] = deque()
        self.to_writer: deque[Block | BlockHash] = deque()  # a block to write, a name to delete
        self.missing: set[BlockHash] = set()
        self.known: dict[BlockHash, Block] = {}
        # Names whose file once was lost by accident.
        self.broken = {b.parent for b in self.disk.values() if b.parent not in self.disk}
        for block in self.disk.values():
            self.known[block.name] = block
            self.cache.files.found(block.name, block.parent, block.tokens, self.file_bytes(block))
        self.cache.files.order_files({name: 0.0 for name in self.disk})
        self.cache.cold.set_limit(ssd)

    @staticmethod
    def file_bytes(block: Block) -> int:
        return len(block.tokens) // 4 * BYTES_PER_TOKEN + HEADER_BYTES

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def reusable(self, salt: str, tokens: list[int]) -> int:
        """The specification of a look-up: what is readable with all that comes before it."""
        readable = {block.name: block for block in self.readable()}
        best = 0
        for block in readable.values():
            ancestor = block
            while ancestor.parent in readable:
                ancestor = readable[ancestor.parent]
            whole = ancestor.parent == root_hash(NAMESPACE, block.content[0])
            if whole and block.content[0] == salt:
                best = max(best, common(block.content[1], tokens))
        return min(best, len(tokens) - 1)

    def readable(self) -> list[Block]:
        """What is sealed in RAM, has a file that was reported, or is known to be on its way."""
        hot = [b for i, b in self.ram.items() if self.cache.pool.get(b.name) == i]
        files = [b for b in self.known.values() if b.name in self.cache.cold.ledger]
        return hot + files + [b for b in self.known.values() if self.is_queued(b.name)]

    def is_queued(self, name: BlockHash) -> bool:
        node = self.cache.tree.get(name)
        return node is not None and node.queued

    def with_the_writer(self, name: BlockHash) -> Block | None:
        jobs = [job for job in self.to_writer if isinstance(job, Block) and job.name == name]
        return jobs[-1] if jobs else None

    def submit(self, salt: str, tokens: list[int]) -> Sequence:
        expected = self.reusable(salt, tokens)
        probed = self.cache.probe(pack_tokens(tokens), salt)
        grant = self.cache.look_up(pack_tokens(tokens), salt)
        self.settle()
        assert grant.root == root_hash(NAMESPACE, salt)
        assert grant.num_cached == expected, "the longest prefix that can be read, to the token"
        assert grant.ended.token == grant.num_cached
        assert (grant.ended.reason is Reason.FULL) == (grant.num_cached == len(tokens) - 1)
        assert probed[0] == sum(ref.take for ref in grant.blocks if not ref.cold)
        assert probed[1] == sum(ref.take for ref in grant.blocks if ref.cold)
        assert probed[2] == grant.ended
        sequence = Sequence(salt, tokens, grant)
        self.check_grant(sequence)
        self.sequences.append(sequence)
        return sequence

    def check_grant(self, sequence: Sequence) -> None:
        """Each credited token is the prompt's, behind the prompt's tokens, in the prompt's salt."""
        position, parent = 0, sequence.grant.root
        for index, ref in enumerate(sequence.grant.blocks):
            assert 0 < ref.take <= ref.num_tokens <= self.block_size
            assert ref.parent == parent
            assert ref.block_hash == chain_hash(parent, ref.tokens)
            if index < len(sequence.grant.blocks) - 1:
                assert ref.take == ref.num_tokens == self.block_size, "only the last may be cut"
            if not ref.cold:
                assert ref.block_id is not None
                self.check_read(sequence, ref, position, self.ram[ref.block_id])
            position, parent = position + ref.take, ref.block_hash

    def check_read(self, sequence: Sequence, ref: BlockRef, position: int, block: Block) -> None:
        assert block.name == ref.block_hash
        assert block.tokens == ref.tokens
        salt, content = block.content
        assert salt == sequence.salt, "read across salts"
        assert list(content[: position + ref.take]) == sequence.tokens[: position + ref.take]

    def restore(self, sequence: Sequence, readable: int) -> None:
        """Read cold blocks, at most ``readable`` of them, and give everything back."""
        sequence.restored = True
        blocks, position = sequence.grant.blocks, 0
        releases: list[BlockId] = []
        promoted: list[tuple[BlockRef, bool]] = []
        lost: BlockHash | None = None
        failed = False
        for ref in blocks:
            if ref.cold and not failed:
                block = self.with_the_writer(ref.block_hash) if ref.queued else None
                damaged = block is None and ref.block_hash in self.damaged
                block = block or self.disk.get(ref.block_hash)
                failed = block is None or damaged or readable == 0
                if block is None or damaged:
                    lost = ref.block_hash
                readable -= 1
                if block is not None and not failed:
                    self.check_read(sequence, ref, position, block)
                    if ref.block_id is not None:
                        assert ref.block_id not in self.ram, "a place is dropped before it is used"
                        self.ram[ref.block_id] = block
            elif not ref.cold and not failed:
                assert ref.block_id is not None
                self.check_read(sequence, ref, position, self.ram[ref.block_id])
            if ref.cold:
                promoted.append((ref, not failed))
            elif ref.block_id is not None:
                releases.append(ref.block_id)
            if not failed:
                position += ref.take
                if ref.take == self.block_size:
                    sequence.chain.append(ref.block_hash)
        for ref, stored in reversed(promoted):  # so that a lowered limit takes the leaf first
            self.cache.promoted(ref, stored=stored)
        self.cache.pool.release(releases)
        if lost is not None:
            self.disk.pop(lost, None)
            self.cache.files.lost(lost, corrupt=lost in self.damaged)
            self.damaged.discard(lost)
            self.broken.add(lost)
        self.cache.touch(sequence.grant.chain)
        sequence.computed = position
        self.settle()

    def compute(self, sequence: Sequence, continuation: list[int]) -> None:
        """The rest of the prompt, and then ``continuation``."""
        sequence.tokens += continuation
        sequence.computed = len(sequence.tokens)

    def wish(self, sequence: Sequence, *, tail: bool, persist_tail: bool) -> None:
        """Ask to store what was computed: full blocks, and the tail behind them."""
        self.cache.touch(sequence.chain)
        size, parent = self.block_size, sequence.grant.root
        while True:
            if sequence.chain:
                parent = sequence.chain[-1]
            start = len(sequence.chain) * size
            stop = min(start + size, sequence.computed)
            full = stop - start == size
            if stop == start or not (full or tail):
                return
            packed = pack_tokens(sequence.tokens[start:stop])
            name = chain_hash(parent, packed)
            block = Block(name, parent, packed, (sequence.salt, tuple(sequence.tokens[:stop])))
            ticket = self.cache.store(StoreWish(parent, name, packed, full or persist_tail))
            self.settle()
            if ticket is not None:
                assert ticket.block_id not in self.ram
                self.tickets.append(Ticket(ticket, block))
            if not full:
                return
            sequence.chain.append(name)

    def finish(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.cache.touch(sequence.chain)

    # ── the engine ───────────────────────────────────────────────────────────────────────────

    def export(self, *, good: bool, accepted: bool) -> None:
        """The oldest ticket that has not been: its block is kept in RAM and given to the writer."""
        entry = next((t for t in self.tickets if not t.exported), None)
        if entry is None:
            return
        entry.exported = True
        ticket, block = entry.ticket, entry.block
        if good and ticket.block_id is not None:
            assert ticket.block_id not in self.ram, "a place is dropped before it is used"
            self.ram[ticket.block_id] = block
            entry.stored = True
        shed = {t.block.name for t in self.tickets if t.exported and not t.writing}
        if good and ticket.write and accepted and block.parent not in shed:
            entry.writing = True
            self.to_writer.append(block)

    def seal(self) -> None:
        if self.tickets and self.tickets[0].exported:
            entry = self.tickets.popleft()
            ticket = entry.ticket
            self.known[entry.block.name] = entry.block
            self.cache.seal(
                ticket.wish,
                ticket.block_id,
                stored=entry.stored,
                writing=entry.writing,
                write=ticket.write,
            )
            self.settle()

    # ── the disk ─────────────────────────────────────────────────────────────────────────────

    def take_writes(self, most: int, *, accepted: bool) -> None:
        shed: set[BlockHash] = set()
        for ticket in self.cache.files.take_writes(most):
            block = self.ram[ticket.block_id]
            assert (block.name, block.tokens) == (ticket.block_hash, ticket.tokens)
            if accepted and ticket.parent not in shed:
                self.to_writer.append(block)
            else:
                shed.add(block.name)
        for name in shed:
            self.cache.files.write_failed(name)
        self.settle()

    def write(self, *, good: bool) -> None:
        """The writer does the next thing it was given, and reports it."""
        if not self.to_writer:
            return
        job = self.to_writer.popleft()
        if not isinstance(job, Block):
            self.disk.pop(job, None)
        elif good and job.parent not in self.missing:
            self.missing.discard(job.name)
            self.known[job.name] = job
            self.disk[job.name] = job
            self.damaged.discard(job.name)
            if not self.cache.files.written(job.name, self.file_bytes(job)):
                self.cache.files.found(job.name, job.parent, job.tokens, self.file_bytes(job))
                self.cache.cold.set_limit(self.cache.cold.ledger.limit_bytes)
                self.broken.add(job.parent)  # it may hang in the air, as files found at start may
        else:
            self.missing.add(job.name)
            self.cache.files.write_failed(job.name)
        self.settle()

    def writer_crashes(self) -> None:
        """What it was to do is forgotten, and the cache learns it when it asks."""
        pending = self.cache.files.pending
        self.broken.update(job for job in self.to_writer if not isinstance(job, Block))
        self.to_writer.clear()
        self.missing.clear()
        self.cache.files.writes_passed(pending)
        assert not self.cache.files.pending
        self.settle()

    def start_over(self) -> None:
        self.cache.start_over()
        self.ram.clear()
        self.sequences.clear()
        self.tickets.clear()
        self.settle()

    def damage(self, name: BlockHash, *, vanishes: bool) -> None:
        """Nobody is told; it turns out when the file is read."""
        self.broken.add(name)
        if vanishes:
            del self.disk[name]
        else:
            self.damaged.add(name)

    def clear(self, *, hot: bool, ssd: bool) -> None:
        dirty = self.cache.files.num_dirty
        self.cache.clear(hot=hot, ssd=ssd)
        self.settle()
        if ssd:
            assert len(self.cache.cold.ledger) == 0
        if hot and ssd:
            assert self.cache.pool.num_cached == 0
        if hot:
            assert self.cache.pool.num_cached <= dirty, "what waits for its file, and nothing else"

    def set_hot_limit(self, blocks: int) -> None:
        self.cache.pool.set_limit(blocks * self.block_bytes)
        self.settle()

    def set_ssd_limit(self, blocks: int) -> None:
        self.cache.cold.set_limit(blocks * self.block_bytes)
        self.settle()

    def settle(self) -> None:
        """Carry out what the cache wants gone."""
        cache = self.cache
        for block_id in cache.pool.take_dropped():
            gone = self.ram.pop(block_id, None)
            if gone is not None and cache.pool.get(gone.name) is None:
                self.check_leaf(gone.name)
        self.to_writer.extend(cache.cold.take_deletes().blocks)

    def check_leaf(self, name: BlockHash) -> None:
        """A chain leaves RAM from its leaf, but for what somebody holds.

        A block that has a file, or is about to, still leads to what hangs on it, so it may go
        when a deeper block of its chain was in RAM already while it was restored.
        """
        pool = self.cache.pool
        if name in self.cache.cold.ledger or self.is_pending(name):
            return
        for block_id, block in self.ram.items():
            if block.parent == name and pool.get(block.name) == block_id:
                held = any(
                    ref.block_id == block_id
                    for sequence in self.sequences
                    if not sequence.restored
                    for ref in sequence.grant.blocks
                )
                assert held, "a block was given up before one that hangs on it"

    # ── what always holds ────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        cache = self.cache
        cache.check()
        held = {
            ref.block_id
            for sequence in self.sequences
            if not sequence.restored
            for ref in sequence.grant.blocks
            if ref.block_id is not None
        }
        held |= {t.ticket.block_id for t in self.tickets if t.ticket.block_id is not None}
        assert cache.pool.num_held == len(held), "held by nobody, or given up by nobody"
        assert len(self.ram) <= cache.pool.num_blocks - cache.pool.num_blank
        assert cache.cold.ledger.total_bytes <= cache.cold.ledger.limit_bytes
        _, _, pending = self.limits
        assert cache.cold.pending_bytes <= max(pending * self.block_bytes, self.block_bytes)
        self.check_persisted()

    def check_persisted(self) -> None:
        """What has files of a chain is a prefix of it, but for accidents."""
        for name, block in self.known.items():
            if name in self.cache.cold.ledger and block.parent not in self.broken:
                root = block.parent == root_hash(NAMESPACE, block.content[0])
                assert (
                    root or block.parent in self.cache.cold.ledger or self.is_pending(block.parent)
                )

    def is_pending(self, name: BlockHash) -> bool:
        return name in self.cache.files.pending or any(t.block.name == name for t in self.tickets)


def common(one: tuple[int, ...], other: list[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
