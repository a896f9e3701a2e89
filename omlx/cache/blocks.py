"""Blocks of tokens, their names, and the queue that says which one to give up next.

A block's name is a chained hash, so it says what is in the block *and* everything before it:

    root  = SHA-256("omlx/3" 00 | u32 length, namespace | u32 length, salt)
    name  = SHA-256("omlx/3" 01 | parent name, 32 bytes | u32 token count | tokens, u32 each)

    state = SHA-256("omlx/3" 02 | name of the block that ends where the state was taken)

All integers are little-endian. Every field has a fixed width or is prefixed by its length, so
two different inputs never give the same bytes to hash; nothing depends on the process.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes of SHA-256. Two blocks with one hash hold the same KV, prefix included."""

BlockId = NewType("BlockId", int)
"""A place in the pool. Ids are recycled; hashes are not."""

PackedTokens = NewType("PackedTokens", bytes)
"""Token ids, little-endian uint32 each: the form in which they are hashed, compared and stored."""

TOKEN_BYTES = 4
_PREFIX_ROOT = b"omlx/3\x00"
_PREFIX_BLOCK = b"omlx/3\x01"
_PREFIX_STATE = b"omlx/3\x02"
_U32 = struct.Struct("<I")
assert array("I").itemsize == TOKEN_BYTES, "packing relies on 4-byte unsigned ints"


def pack_tokens(tokens: Iterable[int]) -> PackedTokens:
    """Raises OverflowError for an id below 0 or above 2^32 - 1."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return PackedTokens(packed.tobytes())


def unpack_tokens(packed: PackedTokens) -> list[int]:
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def num_tokens(packed: PackedTokens) -> int:
    return len(packed) // TOKEN_BYTES


def slice_tokens(packed: PackedTokens, start: int, stop: int) -> PackedTokens:
    return PackedTokens(packed[start * TOKEN_BYTES : stop * TOKEN_BYTES])


def num_common(a: PackedTokens, b: PackedTokens) -> int:
    """How many leading tokens are equal."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit // TOKEN_BYTES
    low, high = 0, limit  # bytes: a[:low] is equal, a[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low // TOKEN_BYTES


def root_hash(namespace: str, salt: str = "") -> BlockHash:
    """The parent of every first block. Whatever changes KV must be in ``namespace``."""
    parts = [_PREFIX_ROOT]
    for text in (namespace, salt):
        encoded = text.encode("utf-8", "surrogatepass")
        parts += [_U32.pack(len(encoded)), encoded]
    return BlockHash(hashlib.sha256(b"".join(parts)).digest())


def chain_hash(parent: BlockHash, tokens: PackedTokens) -> BlockHash:
    """The name of the block that holds ``tokens`` behind ``parent``.

    >>> root = root_hash("tiny")
    >>> chain_hash(root, pack_tokens([1, 23])) == chain_hash(root, pack_tokens([12, 3]))
    False
    """
    count = _U32.pack(len(tokens) // TOKEN_BYTES)
    return BlockHash(hashlib.sha256(_PREFIX_BLOCK + parent + count + tokens).digest())


def state_hash(parent: BlockHash, tokens: PackedTokens) -> BlockHash:
    """The name of the recurrent state after ``tokens`` behind ``parent``."""
    return BlockHash(hashlib.sha256(_PREFIX_STATE + chain_hash(parent, tokens)).digest())


@dataclass(slots=True, eq=False)
class CacheBlock:
    """One place for a block's payload in the hot tier.

    held      ref_count > 0                    being filled, or read by a restore
    cached    ref_count == 0, has a hash       kept in case the prefix comes back; evictable
    blank     ref_count == 0, no hash          nothing worth keeping
    """

    block_id: BlockId
    ref_count: int = 0
    block_hash: BlockHash | None = None
    nbytes: int = 0
    prev: CacheBlock | None = field(default=None, repr=False)
    next: CacheBlock | None = field(default=None, repr=False)


@dataclass(slots=True)
class BlockTable:
    """The blocks that one sequence holds, in the order of its tokens. Grows at its end only."""

    block_ids: list[BlockId] = field(default_factory=list)

    def append(self, block_id: BlockId) -> None:
        self.block_ids.append(block_id)

    @property
    def last(self) -> BlockId:
        assert self.block_ids, "an empty table has no block to write to"
        return self.block_ids[-1]


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """The payload under ``source`` is to be copied to ``target`` before that is written to."""

    source: BlockId
    target: BlockId


class FreeKVCacheBlockQueue:
    """A doubly linked list of the blocks nobody holds. Its front is the next one to give up.

    A child always stands before its parent, so a chain is given up leaf first: whoever uses a
    chain moves it to the back from its tail to its head, and a new block is put directly before
    its parent. Each operation on one block is O(1).
    """

    def __init__(self) -> None:
        # A fake head and tail spare every operation the test for an end of the list.
        self._head = CacheBlock(BlockId(-1))
        self._tail = CacheBlock(BlockId(-2))
        self._head.next, self._tail.prev = self._tail, self._head
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[CacheBlock]:
        """From the front, the next victim first."""
        block = self._head.next
        while block is not None and block is not self._tail:
            following = block.next
            yield block
            block = following

    @property
    def front(self) -> CacheBlock | None:
        return None if self._length == 0 else self._head.next

    def append(self, block: CacheBlock) -> None:
        """Put at the back: given up last."""
        self._insert(block, before=self._tail)

    def insert_before(self, block: CacheBlock, other: CacheBlock) -> None:
        assert other.next is not None, "the other block must be in the queue"
        self._insert(block, before=other)

    def remove(self, block: CacheBlock) -> None:
        assert block.prev is not None, "the block is not in the queue"
        assert block.next is not None, "the block is not in the queue"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._length -= 1

    def _insert(self, block: CacheBlock, before: CacheBlock) -> None:
        assert block.prev is None, "the block is in the queue already"
        previous = before.prev
        assert previous is not None
        previous.next, block.prev, block.next, before.prev = block, previous, before, block
        self._length += 1
