"""A block's name says what is in it and all that comes before; the queue says who goes first."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omlx.cache.blocks import (
    BlockId,
    CacheBlock,
    FreeKVCacheBlockQueue,
    chain_hash,
    num_common,
    num_tokens,
    pack_tokens,
    root_hash,
    slice_tokens,
    unpack_tokens,
)

ROOT = root_hash("tiny")
ids = st.integers(0, 2**32 - 1)
few = st.lists(st.integers(0, 1), max_size=6)


class Queue(RuleBasedStateMachine):
    """The queue against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FreeKVCacheBlockQueue()
        self.model: list[CacheBlock] = []
        self.out = [CacheBlock(BlockId(i)) for i in range(5)]

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        block = self.take(data, self.out)
        self.queue.append(block)
        self.model.append(block)

    @precondition(lambda self: self.out and self.model)
    @rule(data=st.data())
    def insert_before(self, data: st.DataObject) -> None:
        block, index = self.take(data, self.out), data.draw(st.integers(0, len(self.model) - 1))
        self.queue.insert_before(block, self.model[index])
        self.model.insert(index, block)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block = self.take(data, self.model)
        self.queue.remove(block)
        self.out.append(block)

    @staticmethod
    def take(data: st.DataObject, blocks: list[CacheBlock]) -> CacheBlock:
        return blocks.pop(data.draw(st.integers(0, len(blocks) - 1)))

    @invariant()
    def it_is_the_list(self) -> None:
        assert list(self.queue) == self.model
        assert len(self.queue) == len(self.model)
        assert self.queue.front is (self.model[0] if self.model else None)


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_block_is_in_the_queue_once() -> None:
    queue, block, other = FreeKVCacheBlockQueue(), CacheBlock(BlockId(0)), CacheBlock(BlockId(1))
    queue.append(block)

    with pytest.raises(AssertionError, match="in the queue already"):
        queue.append(block)
    with pytest.raises(AssertionError, match="not in the queue"):
        queue.remove(other)
    with pytest.raises(AssertionError, match="must be in the queue"):
        queue.insert_before(CacheBlock(BlockId(2)), other)


def test_the_queue_may_be_emptied_while_it_is_read() -> None:
    queue = FreeKVCacheBlockQueue()
    blocks = [CacheBlock(BlockId(i)) for i in range(3)]
    for block in blocks:
        queue.append(block)

    for block in queue:
        queue.remove(block)

    assert len(queue) == 0


def test_names_are_sha256_over_these_bytes_in_this_order() -> None:
    """Another order is another format: files of the old one must become misses (B29)."""
    root = hashlib.sha256(b"omlx/3\x00" + b"\x04\0\0\0tiny" + b"\x04\0\0\0salt").digest()
    block = b"omlx/3\x01" + root + struct.pack("<I", 3) + struct.pack("<3I", 1, 23, 2**32 - 1)

    assert root_hash("tiny", "salt") == root
    name = chain_hash(root_hash("tiny", "salt"), pack_tokens([1, 23, 2**32 - 1]))
    assert name == hashlib.sha256(block).digest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 23], [12, 3]),
        ([0], [0, 0]),
        ([2**16 + 1], [1, 1]),
        ([1, 2], [2, 1]),
        ([], [0]),
    ],
)
def test_tokens_that_look_alike_have_different_names(one: list[int], other: list[int]) -> None:
    """B29."""
    assert chain_hash(ROOT, pack_tokens(one)) != chain_hash(ROOT, pack_tokens(other))


def test_a_namespace_does_not_run_into_the_salt() -> None:
    """B29."""
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("abc\x04", ""), ("A", "bc")]

    assert len({root_hash(*pair) for pair in pairs}) == len(pairs)


@given(st.text(max_size=3), st.text(max_size=3), st.text(max_size=3), st.text(max_size=3))
def test_roots_are_equal_for_equal_inputs_only(a: str, b: str, c: str, d: str) -> None:
    assert (root_hash(a, b) == root_hash(c, d)) == ((a, b) == (c, d))


def test_a_salt_of_any_text_has_a_root() -> None:
    assert len({root_hash("tiny", salt) for salt in ("", "\0", "\ud800", "é", "e\u0301")}) == 5


def test_equal_blocks_behind_different_prefixes_have_different_names() -> None:
    block = pack_tokens([7, 7])
    behind = {chain_hash(chain_hash(ROOT, pack_tokens(p)), block) for p in ([1, 2], [2, 1], [1])}

    assert len(behind | {chain_hash(ROOT, block)}) == 4


def test_where_a_chain_is_cut_is_part_of_its_name() -> None:
    whole = chain_hash(ROOT, pack_tokens([1, 2, 3, 4]))
    halves = chain_hash(chain_hash(ROOT, pack_tokens([1, 2])), pack_tokens([3, 4]))

    assert whole != halves


@given(few, few, few, few)
def test_chains_are_equal_for_equal_blocks_only(
    a: list[int], b: list[int], c: list[int], d: list[int]
) -> None:
    one, other = (
        chain_hash(chain_hash(ROOT, pack_tokens(first)), pack_tokens(second))
        for first, second in ((a, b), (c, d))
    )

    assert (one == other) == ((a, b) == (c, d))


def test_every_process_gives_the_same_names() -> None:
    """B29: no seed of the process takes part."""
    script = (
        "from omlx.cache.blocks import *;"
        "print(chain_hash(root_hash('tiny', 'salt'), pack_tokens([1, 23])).hex())"
    )

    def name_in_a_process(seed: str | None) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    ours = chain_hash(root_hash("tiny", "salt"), pack_tokens([1, 23])).hex()

    assert {name_in_a_process(seed) for seed in (None, "0", "7")} == {ours}


@given(st.lists(ids, max_size=8))
def test_what_is_packed_is_unpacked(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)

    assert packed == b"".join(struct.pack("<I", token) for token in tokens)
    assert unpack_tokens(packed) == tokens
    assert num_tokens(packed) == len(tokens)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_that_does_not_fit_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


@given(st.lists(ids, max_size=8), st.integers(0, 9), st.integers(0, 9))
def test_a_slice_is_the_slice_of_the_tokens(tokens: list[int], start: int, stop: int) -> None:
    assert unpack_tokens(slice_tokens(pack_tokens(tokens), start, stop)) == tokens[start:stop]


# Tokens that share some of their bytes: a byte that is equal is not yet a token that is.
near = st.lists(st.sampled_from([0, 1, 256, 257, 2**24, 2**24 + 1]), max_size=12)


@given(near, near, near)
def test_common_tokens_are_counted_one_by_one(
    head: list[int], one: list[int], other: list[int]
) -> None:
    pairs = zip(head + one, head + other, strict=False)
    equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    assert num_common(pack_tokens(head + one), pack_tokens(head + other)) == equal
