"""Whatever happens to a block file on disk, we read back the right bytes or a miss."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from safetensors import safe_open

from omlx.cache.block_file import (
    DTYPES,
    HEADER_MAX,
    HostTensor,
    Identity,
    OtherFormat,
    Unreadable,
    decode_header,
    decode_outline,
    encode_header,
)
from omlx.cache.block_tensors import decode
from omlx.cache.blocks import chain_hash, pack_tokens, root_hash

ROOT = root_hash("tiny")
TOKENS = pack_tokens([1, 2, 3])
IDENTITY = Identity("tiny", chain_hash(ROOT, TOKENS), ROOT, TOKENS)
SIZES = {dtype: size for dtype, (_, size) in DTYPES.items()}


def tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> HostTensor:
    count = int(np.prod(shape)) * SIZES[dtype]
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return HostTensor(name, dtype, shape, memoryview(data.tobytes()))


TENSORS = (
    tensor("kv0.keys", "bfloat16", (2, 1, 3, 4)),
    tensor("kv0.values", "float32", (2, 1, 3, 2), seed=1),
)
WANTED = [(t.name, t.dtype, t.shape) for t in TENSORS]


def encode(tensors: tuple[HostTensor, ...] = TENSORS, identity: Identity = IDENTITY) -> bytes:
    header = encode_header(identity, tensors, block_size=3, layer_kinds="kv,kv")
    return header + b"".join(t.data for t in tensors)


def read(file: bytes | bytearray, identity: Identity = IDENTITY) -> tuple[HostTensor, ...]:
    return decode(identity, WANTED, memoryview(file))


FILE = encode()
LENGTH = struct.unpack_from("<Q", FILE)[0]


def with_header(change: Any) -> bytes:
    """The file with its JSON changed by ``change``, and everything else as it would be then."""
    entries = json.loads(FILE[8 : 8 + LENGTH])
    change(entries)
    text = json.dumps(entries, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + FILE[8 + LENGTH :]


# ── what was written is read ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("shape", [(1,), (2, 1, 3, 4), (0, 4), ()])
def test_a_tensor_comes_back_byte_for_byte_in_its_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    """B28: bfloat16 and float16 have equally many bytes and are not each other."""
    written = tensor("kv0.keys", dtype, shape)

    (found,) = decode(IDENTITY, [("kv0.keys", dtype, shape)], memoryview(encode((written,))))

    assert (found.name, found.dtype, found.shape) == ("kv0.keys", dtype, shape)
    assert bytes(found.data) == bytes(written.data)


def test_the_bits_of_a_bfloat16_survive() -> None:
    """B28: signed zero, a denormal, the largest one, infinity and a NaN with its payload."""
    bits = np.array([0x8000, 0x0001, 0x7F7F, 0x7F80, 0x7FC1], np.uint16)
    written = HostTensor("kv0.keys", "bfloat16", (5,), memoryview(bits.tobytes()))

    (found,) = decode(IDENTITY, [("kv0.keys", "bfloat16", (5,))], memoryview(encode((written,))))

    assert np.frombuffer(found.data, np.uint16).tolist() == bits.tolist()


def test_tensors_come_back_in_the_order_that_is_asked_for() -> None:
    found = decode(IDENTITY, WANTED[::-1], memoryview(FILE))

    assert [t.name for t in found] == ["kv0.values", "kv0.keys"]
    assert [bytes(t.data) for t in found] == [bytes(t.data) for t in TENSORS[::-1]]


def test_the_header_alone_tells_whose_file_it_is() -> None:
    header = decode_header(FILE[: 8 + LENGTH], len(FILE))

    assert header.identity == IDENTITY
    assert header.length == 8 + LENGTH
    assert [entry[0] for entry in header.tensors] == [t.name for t in TENSORS]


def test_tensors_start_aligned() -> None:
    assert (8 + LENGTH) % 8 == 0


def test_everybody_can_read_it(tmp_path: Path) -> None:
    """It is a safetensors file, and nothing of it is ours alone."""
    path = tmp_path / "block.safetensors"
    values = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    path.write_bytes(encode((HostTensor("a", "float32", (1, 2, 3), memoryview(values.data)),)))

    with safe_open(path, "np") as opened:
        assert list(opened.keys()) == ["a"]
        assert np.array_equal(opened.get_tensor("a"), values)
        metadata = opened.metadata()
    assert metadata["block_hash"] == IDENTITY.block_hash.hex()
    assert metadata["token_count"] == "3"
    assert metadata["layer_kinds"] == "kv,kv"
    assert metadata["block_size"] == "3"


# ── damage ───────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, len(FILE) - 1))
def test_a_torn_write_is_a_miss(kept: int) -> None:
    with pytest.raises(Unreadable):
        read(FILE[:kept])


@given(st.binary(min_size=1, max_size=16))
def test_a_file_with_something_behind_it_is_a_miss(more: bytes) -> None:
    with pytest.raises(Unreadable, match="bytes, want"):
        read(FILE + more)


@given(st.integers(0, 8 * len(FILE) - 1))
def test_a_flipped_bit_is_a_miss_or_makes_no_difference(bit: int) -> None:
    damaged = bytearray(FILE)
    damaged[bit // 8] ^= 1 << bit % 8

    try:
        found = read(damaged)
    except Unreadable:
        return

    # Only what nobody reads back may be damaged unseen: the padding and what is for people.
    assert 8 <= bit // 8 < 8 + LENGTH
    assert [bytes(t.data) for t in found] == [bytes(t.data) for t in TENSORS]


@given(st.integers(8 * (8 + LENGTH), 8 * len(FILE) - 1))
def test_a_flipped_bit_in_a_tensor_is_always_a_miss(bit: int) -> None:
    damaged = bytearray(FILE)
    damaged[bit // 8] ^= 1 << bit % 8

    with pytest.raises(Unreadable, match="checksum"):
        read(damaged)


@given(st.integers(0, len(FILE)), st.integers(0, len(FILE)))
def test_zeros_in_place_of_a_part_are_a_miss(one: int, other: int) -> None:
    """B46: the name was on disk before the bytes were."""
    start, stop = sorted((one, other))
    damaged = FILE[:start] + bytes(stop - start) + FILE[stop:]

    if damaged != FILE:
        with pytest.raises(Unreadable):
            read(damaged)


def test_a_file_of_zeros_is_a_miss() -> None:
    """B46."""
    with pytest.raises(Unreadable):
        read(bytes(len(FILE)))


@given(st.binary(max_size=64))
def test_any_bytes_are_a_miss(content: bytes) -> None:
    with pytest.raises(Unreadable):
        read(content)


@pytest.mark.parametrize("length", [HEADER_MAX + 1, 2**60, 2**64 - 1])
def test_a_header_that_says_it_is_enormous_is_not_believed(length: int) -> None:
    with pytest.raises(Unreadable, match="more than"):
        read(struct.pack("<Q", length) + FILE[8:])


def test_a_header_that_goes_beyond_the_file_is_a_miss() -> None:
    with pytest.raises(Unreadable, match="within its header"):
        read(struct.pack("<Q", len(FILE)) + FILE[8:])


# ── headers that lie ─────────────────────────────────────────────────────────────────────────


def set_entry(name: str, field: str, value: object) -> Any:
    return lambda entries: entries[name].__setitem__(field, value)


LIES: dict[str, tuple[Any, str]] = {
    "no metadata": (lambda e: e.pop("__metadata__"), "header is damaged"),
    "metadata is a list": (lambda e: e.__setitem__("__metadata__", []), "header is damaged"),
    "another format": (set_entry("__metadata__", "format", "2"), "format '2'"),
    "tokens are no base64": (set_entry("__metadata__", "token_ids", "?"), "header is damaged"),
    "a hash is no hex": (set_entry("__metadata__", "block_hash", "xy"), "header is damaged"),
    "count of tokens": (set_entry("__metadata__", "token_count", "4"), "says 4"),
    "count is no number": (set_entry("__metadata__", "token_count", "3.5"), "says 3.5"),
    "checksums are no JSON": (set_entry("__metadata__", "checksums", "{"), "header is damaged"),
    "checksums are a list": (set_entry("__metadata__", "checksums", "[]"), "header is damaged"),
    "no checksums": (set_entry("__metadata__", "checksums", "{}"), "checksum"),
    "no such dtype": (set_entry("kv0.keys", "dtype", "F7"), "header is damaged"),
    "another dtype of one size": (set_entry("kv0.keys", "dtype", "F16"), "is float16"),
    "another shape of one size": (set_entry("kv0.keys", "shape", [2, 1, 4, 3]), "want bfloat16"),
    "negative dimensions": (set_entry("kv0.keys", "shape", [-2, -1, 3, 4]), "header is damaged"),
    "a shape of another size": (set_entry("kv0.keys", "shape", [2**60]), "header is damaged"),
    "backwards": (set_entry("kv0.keys", "data_offsets", [48, 0]), "header is damaged"),
    "before its place": (set_entry("kv0.keys", "data_offsets", [-48, 0]), "no count"),
    "a negative end": (set_entry("kv0.values", "data_offsets", [48, -96]), "no count"),
    "beyond any number": (set_entry("kv0.keys", "data_offsets", [0, 10**30]), "header is damaged"),
    "a size with a fraction": (set_entry("kv0.keys", "shape", [2, 1, 3, 4.0]), "no count"),
    "a size that is a truth": (set_entry("kv0.keys", "shape", [2, True, 3, 4]), "no count"),
    "dimensions without end": (set_entry("kv0.keys", "shape", [2**62] * 9), "more than a shape"),
    "a field that we don't write": (set_entry("kv0.keys", "x", 1), "more than a shape"),
    "a name that is no digest": (set_entry("__metadata__", "parent_hash", "00"), "no digest"),
    "metadata that is no text": (set_entry("__metadata__", "namespace", 1), "no text"),
    "carries who knows what": (set_entry("__metadata__", "carries", "NOWHERE"), "NOWHERE"),
    "lies who knows where": (set_entry("__metadata__", "place", "NOWHERE"), "NOWHERE"),
    "a checkpoint that carries one": (
        lambda e: e["__metadata__"].update(place="LAST", carries="LAST"),
        "that carries one",
    ),
    "a hole": (set_entry("kv0.values", "data_offsets", [56, 104]), "starts at 56"),
    "an overlap": (set_entry("kv0.values", "data_offsets", [40, 88]), "starts at 40"),
    "one tensor missing": (lambda e: e.pop("kv0.values"), "bytes, want"),
    "one tensor too many": (
        lambda e: e.__setitem__("x", {"dtype": "F32", "shape": [0], "data_offsets": [96, 96]}),
        "holds tensors",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_a_miss_that_says_why(lie: str) -> None:
    change, reason = LIES[lie]

    with pytest.raises(Unreadable, match=reason):
        read(with_header(change))


def with_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + FILE[8 + LENGTH :]


TEXT = FILE[8 : 8 + LENGTH].rstrip(b" ")
FORGED = {
    "nested deeper than a stack": b"[" * 500_000,
    "nested within a tensor": TEXT.replace(b"[2,1,3,4]", b"[" * 1000 + b"]" * 1000),
    "nested within the checksums": TEXT.replace(
        b'"checksums":"', b'"checksums":"' + b"[" * 100_000
    ),
    "no UTF-8": TEXT.replace(b"tiny", b"\xff\xfe\xfd\xfc"),
    "half a surrogate pair": TEXT.replace(b"tiny", b"\\ud800"),
    "a constant that is no JSON": TEXT.replace(b"[2,1,3,4]", b"[2,1,3,NaN]"),
    "infinity": TEXT.replace(b"[2,1,3,4]", b"[2,1,3,Infinity]"),
    "a key twice": TEXT.replace(b'"kv0.keys":{', b'"kv0.keys":{"dtype":"F32",'),
    "a tensor twice": TEXT.replace(b'"kv0.keys":', b'"kv0.keys":1,"kv0.keys":'),
    "a number of a thousand digits": TEXT.replace(b"[2,1,3,4]", b"[2,1,3," + b"4" * 1000 + b"]"),
    "something behind it": TEXT + b"{}",
    "nothing": b"",
    "a number": b"3",
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_header_is_a_miss_and_nothing_worse(forgery: str) -> None:
    text = FORGED[forgery]
    assert text != TEXT

    with pytest.raises(Unreadable) as caught:
        read(with_text(text))

    assert len(str(caught.value)) < 300


def test_what_a_header_says_forges_no_line_of_the_log() -> None:
    lie = set_entry("__metadata__", "format", "2\nERROR all is lost\x1b[2J" + "x" * 10_000)

    with pytest.raises(Unreadable) as caught:
        read(with_header(lie))

    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("lie", ["another format", "tokens are no base64", "count of tokens"])
def test_the_outline_tells_the_same_lies_apart(lie: str) -> None:
    change, reason = LIES[lie]
    file = with_header(change)

    with pytest.raises(Unreadable, match=reason):
        decode_outline(file, len(file))


def test_the_outline_knows_whose_file_it_is_and_that_it_is_whole() -> None:
    assert decode_outline(FILE[: 8 + LENGTH], len(FILE)).identity == IDENTITY
    with pytest.raises(Unreadable, match="says otherwise"):
        decode_outline(FILE[: 8 + LENGTH], len(FILE) - 1)


def test_another_version_of_the_format_is_no_damage() -> None:
    with pytest.raises(OtherFormat):
        read(with_header(set_entry("__metadata__", "format", "4")))


def test_only_the_lies_make_the_difference() -> None:
    assert len(read(with_header(lambda entries: None))) == 2


# ── another block's file ─────────────────────────────────────────────────────────────────────

OTHER_TOKENS = pack_tokens([1, 2, 4])
OTHERS = {
    "namespace": replace(IDENTITY, namespace="tinier"),
    "tokens": replace(IDENTITY, tokens=OTHER_TOKENS),
    "parent": replace(IDENTITY, parent=root_hash("tiny", "salt")),
    "block_hash": replace(IDENTITY, block_hash=chain_hash(ROOT, OTHER_TOKENS)),
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_blocks_file_is_a_miss_that_says_why(field: str) -> None:
    """B29: a file that was renamed, or belongs to another model, is not what was asked for."""
    with pytest.raises(Unreadable, match=f"another block: {field}"):
        read(FILE, OTHERS[field])


@pytest.mark.parametrize("field", ["tokens", "parent", "block_hash"])
def test_a_file_that_agrees_with_a_wrong_name_is_a_miss(field: str) -> None:
    """B29: even when the index was wrong in the same way, the name must be the tokens' hash."""
    wrong = OTHERS[field]

    with pytest.raises(Unreadable, match="not the hash of its tokens"):
        read(encode(identity=wrong), wrong)
