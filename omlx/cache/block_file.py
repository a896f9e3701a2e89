"""The form of a block on disk: a safetensors file that proves what it is. Pure: bytes in, out.

    bytes                     field
    0..8                      length of the header, u64 little-endian
    8..8+length               JSON: each tensor's dtype, shape, data_offsets; "__metadata__"
    ..                        the tensors, back to back, in the order of the header

``__metadata__``, all strings:

    format                    "3"
    namespace                 fingerprint of everything that determines the bytes
    block_hash, parent_hash   hex, see ``blocks.chain_hash``
    token_count, token_ids    how many; base64 of little-endian uint32
    block_size, layer_kinds   of the model that wrote it, for people who look
    checksums                 JSON: tensor name -> xxh3-128 of its bytes, hex

A checkpoint's file has the same form and more metadata, see ``checkpoint_file``.

A reader checks, in this order: the file's size against the header, the header's length against
a cap, the structure, the identity (name, parent, tokens, namespace), each tensor's checksum.
A file that fails any check is a miss with a reason, never an error. The checksum makes an fsync
unnecessary: a file that a power cut left with zeros or half its bytes is one that is not read.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from omlx.cache.blocks import BlockHash, PackedTokens, chain_hash
from omlx.cache.checkpoints import Place

FORMAT = "3"
HEADER_MAX = 1 << 20
"""A header is about 2 kB; a length beyond this is damage, and nothing is allocated for it."""

LENGTH = struct.Struct("<Q")
DTYPES = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
}
_NAMES = {short: (name, size) for name, (short, size) in DTYPES.items()}


class Unreadable(Exception):
    """Not a whole, intact block file of this format for this block."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file must prove to be."""

    namespace: str
    block_hash: BlockHash
    parent: BlockHash
    tokens: PackedTokens
    place: Place | None = None
    """Of a checkpoint; None: a block."""


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory: ``data`` is contiguous, row-major, one byte an item."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Header:
    identity: Identity
    tensors: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    """(name, dtype, shape, first byte, byte after the last), counted from the header's end."""
    checksums: Mapping[str, str]
    metadata: Mapping[str, str]
    length: int
    """Bytes before the first tensor."""


def encode_header(
    identity: Identity,
    tensors: Sequence[HostTensor],
    *,
    block_size: int,
    layer_kinds: str,
    more: Mapping[str, str] | None = None,
) -> bytes:
    """Everything before the tensors' bytes, which follow it in the given order."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "namespace": identity.namespace,
            "block_hash": identity.block_hash.hex(),
            "parent_hash": identity.parent.hex(),
            "token_count": str(len(identity.tokens) // 4),
            "token_ids": base64.b64encode(identity.tokens).decode(),
            "block_size": str(block_size),
            "layer_kinds": layer_kinds,
            "checksums": json.dumps({t.name: xxhash.xxh3_128_hexdigest(t.data) for t in tensors}),
            **(more or {}),
        }
    }
    position = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start aligned
    return LENGTH.pack(len(text)) + text


def decode_header(start: bytes | memoryview, file_size: int) -> Header:
    """Read a header from the file's first bytes. Raises Unreadable, naming the failed check.

    ``start`` may be longer than the header; when it is shorter than the header says, the caller
    has read too little or the file is torn, and that is Unreadable too.
    """
    if len(start) < LENGTH.size:
        raise Unreadable(f"{len(start)} bytes are too few for a header")
    (length,) = LENGTH.unpack_from(start)
    if length > HEADER_MAX:
        raise Unreadable(f"a header of {length} bytes, more than {HEADER_MAX}")
    if LENGTH.size + length > len(start):
        raise Unreadable(f"the file ends within its header of {length} bytes")
    try:
        entries = json.loads(bytes(start[LENGTH.size : LENGTH.size + length]))
        metadata = entries.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise Unreadable(f"format {metadata['format']!r}, want {FORMAT!r}")
        tokens = PackedTokens(base64.b64decode(metadata["token_ids"], validate=True))
        identity = Identity(
            metadata["namespace"],
            BlockHash(bytes.fromhex(metadata["block_hash"])),
            BlockHash(bytes.fromhex(metadata["parent_hash"])),
            tokens,
            Place[metadata["place"]] if "place" in metadata else None,
        )
        tensors = tuple(_entry(name, entry) for name, entry in entries.items())
        checksums = {str(k): str(v) for k, v in json.loads(metadata["checksums"]).items()}
        count = int(metadata["token_count"])
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise Unreadable(f"the header is damaged: {error!r}") from None
    if count * 4 != len(tokens):
        raise Unreadable(f"{len(tokens) // 4} token ids, the header says {count}")
    header = Header(identity, tensors, checksums, metadata, LENGTH.size + length)
    _check_layout(header, file_size)
    return header


def decode(
    expected: Identity,
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    data: memoryview,
) -> tuple[HostTensor, ...]:
    """The tensors of a whole file: views into ``data``. Raises Unreadable.

    ``tensors``: (name, dtype, shape) of each tensor that the model's layout wants.
    """
    header = read_header(expected, data)
    if chain_hash(expected.parent, expected.tokens) != expected.block_hash:
        raise Unreadable("its name is not the hash of its tokens")
    # States that are embedded in a block's file are not the block's: see ``checkpoint_file``.
    found = {
        name: (dtype, shape)
        for name, dtype, shape, _, _ in header.tensors
        if not ("carries" in header.metadata and name.startswith("gdn."))
    }
    wanted = {name: (dtype, shape) for name, dtype, shape in tensors}
    if found.keys() != wanted.keys():
        raise Unreadable(f"holds tensors {sorted(found)}, want {sorted(wanted)}")
    for name, (dtype, shape) in wanted.items():
        if found[name] != (dtype, shape):
            raise Unreadable(f"{name} is {found[name][0]}{found[name][1]}, want {dtype}{shape}")
    verified = read_tensors(header, data, wanted)
    return tuple(verified[name] for name in wanted)


def read_header(expected: Identity, data: memoryview) -> Header:
    """The header of a whole file that is what it is expected to be. Raises Unreadable."""
    header = decode_header(data, len(data))
    if header.identity != expected:
        raise Unreadable(f"holds another block: {_difference(header.identity, expected)}")
    return header


def read_tensors(header: Header, data: memoryview, names: Container[str]) -> dict[str, HostTensor]:
    """Tensors of a whole file by their names, checksums verified. Raises Unreadable."""
    tensors: dict[str, HostTensor] = {}
    for name, dtype, shape, start, stop in header.tensors:
        if name not in names:
            continue
        payload = data[header.length + start : header.length + stop]
        if xxhash.xxh3_128_hexdigest(payload) != header.checksums.get(name):
            raise Unreadable(f"{name} does not match its checksum")
        tensors[name] = HostTensor(name, dtype, shape, payload)
    return tensors


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...], int, int]:
    dtype, size = _NAMES[entry["dtype"]]
    shape = tuple(int(n) for n in entry["shape"])
    start, stop = (int(n) for n in entry["data_offsets"])
    items = 1
    for n in shape:
        if n < 0:
            raise ValueError(f"{name} has a negative dimension")
        items *= n
    if stop - start != items * size:
        raise ValueError(f"{name} takes {stop - start} bytes, its shape needs {items * size}")
    return name, dtype, shape, start, stop


def _check_layout(header: Header, file_size: int) -> None:
    position = 0
    for name, _, _, start, stop in header.tensors:
        if start != position:
            raise Unreadable(f"{name} starts at {start}, want {position}")
        position = stop
    if header.length + position != file_size:
        raise Unreadable(f"the file has {file_size} bytes, want {header.length + position}")


def _difference(found: Identity, expected: Identity) -> str:
    for field in ("namespace", "block_hash", "parent", "tokens", "place"):
        if getattr(found, field) != getattr(expected, field):
            return field
    return "nothing"
