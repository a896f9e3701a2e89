"""A file that is hashed while it comes, in whatever pieces, proves what it proves at once."""

from __future__ import annotations

import struct
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from omlx.cache.block_file import HostTensor, Unreadable, decode_header
from omlx.cache.block_tensors import TensorChecks, decode
from omlx.cache.checkpoint_file import decode_states
from tests.cache import test_checkpoint_file as checkpoint
from tests.cache.test_block_file import FILE, IDENTITY, LENGTH, TENSORS, WANTED


def read_in_pieces(file: bytes | bytearray, ends: list[int]) -> tuple[HostTensor, ...]:
    """``ends``: how much of the file is there each time."""
    checks, data = TensorChecks(len(FILE)), memoryview(file)
    for end in (*sorted(ends), len(file)):
        checks.update(data[:end])
    return decode(IDENTITY, WANTED, data, checks)


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
    checks = TensorChecks(len(FILE))
    checks.update(memoryview(FILE)[:-1])

    with pytest.raises(Unreadable, match=r"kv0\.values does not match"):
        decode(IDENTITY, WANTED, memoryview(FILE), checks)


CHECKPOINT = checkpoint.file_of(checkpoint.stored("fp32"))
STATES = [t for t in decode_header(CHECKPOINT, len(CHECKPOINT)).tensors if t[1] == "float32"]
FIRST = decode_header(CHECKPOINT, len(CHECKPOINT)).length


def read_states(file: bytes, ends: list[int]) -> tuple[HostTensor, ...]:
    checks, data = TensorChecks(len(file)), memoryview(file)
    for end in (*sorted(ends), len(file)):
        checks.update(data[:end])
    return decode_states(checkpoint.IDENTITY, data, checkpoint.SPECS, checks)


@given(st.lists(st.integers(0, len(CHECKPOINT)), max_size=8))
def test_states_that_come_in_pieces_are_known_to_be_finite(ends: list[int]) -> None:
    found = read_states(CHECKPOINT, ends)

    assert [bytes(t.data) for t in found] == [bytes(t.data) for t in checkpoint.STATES]
    assert all(t.known_finite for t in found if t.dtype == "float32")


@given(
    st.lists(st.integers(0, len(CHECKPOINT)), max_size=8),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.data(),
)
def test_a_state_that_is_not_finite_is_a_miss_in_whatever_pieces(
    ends: list[int], value: float, data: st.DataObject
) -> None:
    """B17: though its checksum is right."""
    name, _, _, start, stop = data.draw(st.sampled_from(STATES), "tensor")
    item = data.draw(st.integers(0, (stop - start) // 4 - 1), "item")
    tensors, more = checkpoint.stored("fp32")
    spoiled: list[HostTensor] = []
    for tensor in tensors:
        content = bytearray(tensor.data)
        if tensor.name == name:
            struct.pack_into("<f", content, 4 * item, value)
        spoiled.append(replace(tensor, data=memoryview(content)))

    with pytest.raises(Unreadable, match="not finite"):
        read_states(checkpoint.file_of((spoiled, more)), ends)


def test_a_state_that_was_not_seen_to_its_end_is_not_known_to_be_finite() -> None:
    name, _, _, _, stop = STATES[-1]
    checks = TensorChecks(len(CHECKPOINT))

    checks.update(memoryview(CHECKPOINT)[: FIRST + stop - 1])
    assert not checks.known_finite(name)
    checks.update(memoryview(CHECKPOINT)[: FIRST + stop])
    assert checks.known_finite(name)


@pytest.mark.parametrize("start", [b"", bytes(8), b"\xff" * 100, struct.pack("<Q", 8) + b"[" * 90])
def test_what_has_no_header_of_ours_has_no_checks(start: bytes) -> None:
    checks = TensorChecks(len(start))
    checks.update(memoryview(start))

    assert checks.digest("kv0.keys") is None
