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

A header has one spelling, ours: so no key occurs twice, and no number is there that we don't write.

A reader checks, in this order: the header's length against a cap, the format, the spelling, the
structure, the file's size against the header, the identity (name, parent, tokens, namespace), each
tensor's checksum. A file that fails any check is a miss with a reason, never an error. The checksum
makes an fsync unnecessary: a file that a power cut left with zeros or half its bytes is not read.
A whole file is read in ``block_tensors``.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import xxhash

from omlx.cache.blocks import BlockHash, PackedTokens
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

STATE_PREFIX = "gdn."
"""Begins the names of a checkpoint's tensors."""

_DIMENSIONS_MAX = 8
_REASON_MAX = 200


class Unreadable(Exception):
    """Not a whole, intact block file of this format for this block.

    The text is short and printable, whatever the file holds: it goes to the log.
    """

    def __init__(self, reason: str) -> None:
        reason = reason if len(reason) <= _REASON_MAX else f"{reason[:_REASON_MAX]}..."
        super().__init__(reason if reason.isprintable() else ascii(reason))


class OtherFormat(Unreadable):
    """A file of ours, but of another version of this format."""


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
    known_finite: bool = field(default=False, compare=False)
    """It was looked at, and holds no infinity and no NaN. False says nothing."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Outline:
    """What a file says it is: enough to be listed, too little to be used."""

    identity: Identity
    carries: Place | None
    """Of a block: the checkpoint that is embedded in its file."""
    metadata: Mapping[str, str]
    length: int
    """Bytes before the first tensor."""


@dataclass(frozen=True, slots=True)
class Header:
    identity: Identity
    carries: Place | None
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
            "checksums": orjson.dumps(
                {t.name: xxhash.xxh3_128_hexdigest(t.data) for t in tensors}
            ).decode(),
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
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)  # the tensors start aligned
    return LENGTH.pack(len(text)) + text


def decode_header(start: bytes | memoryview, file_size: int) -> Header:
    """Read a header from the file's first bytes. Raises Unreadable, naming the failed check.

    ``start`` may be longer than the header; when it is shorter than the header says, the caller
    has read too little or the file is torn, and that is Unreadable too.
    """
    text, entries = _parse(start)
    try:
        spelling = orjson.dumps(entries)
    except TypeError:  # it is nested deeper than it could have been written
        spelling = b""
    if spelling != text.rstrip(b" "):
        raise Unreadable("the header is damaged: it is not spelled as we spell it")
    outline = _outline(entries.pop("__metadata__"), len(text))
    try:
        tensors = tuple(_entry(name, entry) for name, entry in entries.items())
        checksums = orjson.loads(outline.metadata["checksums"])
        if not isinstance(checksums, dict):
            raise ValueError("the checksums are no table")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"the header is damaged: {error!r}") from None
    header = Header(
        outline.identity, outline.carries, tensors, checksums, outline.metadata, outline.length
    )
    _check_layout(header, file_size)
    return header


def decode_outline(start: bytes | memoryview, file_size: int) -> Outline:
    """Read from a file's first bytes who it is, and that none of it is missing.

    Half the work of ``decode_header``, with its errors: of the tensors only the last one's end is
    looked at. The others are checked when the file is read.
    """
    text, entries = _parse(start)
    outline = _outline(entries.pop("__metadata__"), len(text))
    try:
        end = next(reversed(entries.values()))["data_offsets"][1] if entries else 0
    except (KeyError, TypeError, IndexError) as error:
        raise Unreadable(f"the header is damaged: {error!r}") from None
    if type(end) is not int or outline.length + end != file_size:
        raise Unreadable(f"the file has {file_size} bytes, its header says otherwise")
    return outline


def _parse(start: bytes | memoryview) -> tuple[bytes, dict[str, Any]]:
    """The header's text, and what it says; its format is ours."""
    if len(start) < LENGTH.size:
        raise Unreadable(f"{len(start)} bytes are too few for a header")
    (length,) = LENGTH.unpack_from(start)
    if length > HEADER_MAX:
        raise Unreadable(f"a header of {length} bytes, more than {HEADER_MAX}")
    if LENGTH.size + length > len(start):
        raise Unreadable(f"the file ends within its header of {length} bytes")
    text = bytes(start[LENGTH.size : LENGTH.size + length])
    try:
        entries = orjson.loads(text)
        form = entries["__metadata__"]["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"the header is damaged: {error!r}") from None
    if form != FORMAT:
        raise OtherFormat(f"format {form!r}, want {FORMAT!r}")
    return text, entries


def _outline(metadata: dict[str, str], length: int) -> Outline:
    try:
        if set(map(type, metadata.values())) != {str}:
            raise ValueError("metadata that is no text")
        tokens = PackedTokens(base64.b64decode(metadata["token_ids"], validate=True))
        identity = Identity(
            metadata["namespace"],
            BlockHash(bytes.fromhex(metadata["block_hash"])),
            BlockHash(bytes.fromhex(metadata["parent_hash"])),
            tokens,
            Place[metadata["place"]] if "place" in metadata else None,
        )
        carries = Place[metadata["carries"]] if "carries" in metadata else None
        count = metadata["token_count"]
        if not len(identity.block_hash) == len(identity.parent) == 32:
            raise ValueError("a name that is no digest")
        if carries is not None and identity.place is not None:
            raise ValueError("a checkpoint that carries one")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Unreadable(f"the header is damaged: {error!r}") from None
    if count != str(len(tokens) // 4) or len(tokens) % 4:
        raise Unreadable(f"{len(tokens)} bytes of token ids, the header says {count} tokens")
    return Outline(identity, carries, metadata, LENGTH.size + length)


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...], int, int]:
    dtype, size = _NAMES[entry["dtype"]]
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if len(shape) > _DIMENSIONS_MAX or len(entry) != 3:
        raise ValueError(f"{name} has more than a shape")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name} has a size that is no count")
    if stop - start != math.prod(shape) * size:
        raise ValueError(f"{name} takes {stop - start} bytes, not those of its shape {shape}")
    return name, dtype, shape, start, stop


def _check_layout(header: Header, file_size: int) -> None:
    position = 0
    for name, _, _, start, stop in header.tensors:
        if start != position:
            raise Unreadable(f"{name} starts at {start}, want {position}")
        position = stop
    if header.length + position != file_size:
        raise Unreadable(f"the file has {file_size} bytes, want {header.length + position}")
