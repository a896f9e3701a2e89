"""A file that is hashed while it comes, in whatever pieces, proves what it proves at once."""

from __future__ import annotations

import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given

from omlx.cache.block_file import HostTensor, TensorDigests, Unreadable, decode
from tests.cache.test_block_file import FILE, IDENTITY, LENGTH, TENSORS, WANTED


def read_in_pieces(file: bytes | bytearray, ends: list[int]) -> tuple[HostTensor, ...]:
    """``ends``: how much of the file is there each time."""
    digests, data = TensorDigests(len(FILE)), memoryview(file)
    for end in (*sorted(ends), len(file)):
        digests.update(data[:end])
    return decode(IDENTITY, WANTED, data, digests)


ENDS = st.lists(st.integers(0, len(FILE)), max_size=8)


@given(ENDS)
def test_a_file_that_comes_in_pieces_is_read_as_one(ends: list[int]) -> None:
    found = read_in_pieces(FILE, ends)

    assert [bytes(t.data) for t in found] == [bytes(t.data) for t in TENSORS]


@given(ENDS, st.integers(8 * (8 + LENGTH), 8 * len(FILE) - 1))
def test_a_flipped_bit_in_a_piece_is_always_a_miss(ends: list[int], bit: int) -> None:
    damaged = bytearray(FILE)
    damaged[bit // 8] ^= 1 << bit % 8

    with pytest.raises(Unreadable, match="checksum"):
        read_in_pieces(damaged, ends)


@given(ENDS, st.integers(0, len(FILE) - 1))
def test_a_file_that_grew_shorter_while_it_came_is_a_miss(ends: list[int], kept: int) -> None:
    with pytest.raises(Unreadable):
        read_in_pieces(FILE[:kept], [min(end, kept) for end in ends])


def test_a_file_that_was_not_seen_to_its_end_is_a_miss() -> None:
    digests = TensorDigests(len(FILE))
    digests.update(memoryview(FILE)[:-1])

    with pytest.raises(Unreadable, match=r"kv0\.values does not match"):
        decode(IDENTITY, WANTED, memoryview(FILE), digests)


@pytest.mark.parametrize("start", [b"", bytes(8), b"\xff" * 100, struct.pack("<Q", 8) + b"[" * 90])
def test_what_has_no_header_of_ours_has_no_digests(start: bytes) -> None:
    digests = TensorDigests(len(start))
    digests.update(memoryview(start))

    assert digests.get("kv0.keys") is None
