"""The tensors of a whole block file, once it has proved what it is. Pure: bytes in, views out.

What takes a pass over the bytes is done piece by piece while they come: see ``TensorChecks``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from contextlib import suppress

import numpy as np
import xxhash

from omlx.cache.block_file import (
    DTYPES,
    HEADER_MAX,
    LENGTH,
    STATE_PREFIX,
    Header,
    HostTensor,
    Identity,
    Unreadable,
    decode_header,
)
from omlx.cache.blocks import chain_hash
from omlx.cache.finite import all_finite


class TensorChecks:
    """All that takes a pass over a file's bytes, done while it is read.

    That is the xxh3-128 of each tensor, and for the float32 states of a checkpoint whether all are
    finite. A piece that was just read is in the core's cache still; a pass over the whole file
    afterwards would fetch it from memory again. Where the header is none that we wrote, nothing is
    looked at: whoever reads the header then says why.
    """

    def __init__(self, file_size: int) -> None:
        self.file_size = file_size
        self.header: Header | None = None
        self._hexdigests: dict[str, str] = {}
        self._finite: set[str] = set()
        """Names of float32 states; those of which not all was seen included."""
        self._ahead: deque[tuple[str, int, int]] | None = None
        """(name, byte after its last in the file, bytes of an item) of each tensor to come."""
        self._hash = xxhash.xxh3_128()
        self._seen = 0
        """Bytes of the file."""

    def update(self, data: memoryview) -> None:
        """Look at what is new in ``data``: the file from its start as far as it was read."""
        if self._ahead is None:
            self._begin(data)
        while self._ahead:
            name, stop, itemsize = self._ahead[0]
            end = min(stop, len(data))
            end -= (end - stop) % itemsize  # whole items, however the file was cut
            if end > self._seen:
                new = data[self._seen : end]
                self._hash.update(new)
                if name in self._finite and not all_finite(np.frombuffer(new, np.float32)):
                    self._finite.discard(name)
                self._seen = end
            if end < stop:
                break
            self._hexdigests[name] = self._hash.hexdigest()
            self._hash.reset()
            self._ahead.popleft()

    def digest(self, name: str) -> str | None:
        """Of a tensor, in hex; None when not all of it was seen."""
        return self._hexdigests.get(name)

    def known_finite(self, name: str) -> bool:
        """Whether all of a tensor was seen and looked at, and has no infinity and no NaN."""
        return name in self._finite and name in self._hexdigests

    def _begin(self, data: memoryview) -> None:
        if len(data) < LENGTH.size:
            return
        length = LENGTH.size + LENGTH.unpack_from(data)[0]
        if len(data) < length <= LENGTH.size + HEADER_MAX:
            return
        self._ahead = deque()
        with suppress(Unreadable):
            self.header = header = decode_header(data, self.file_size)
            self._seen = header.length
            for name, dtype, _, _, stop in header.tensors:
                self._ahead.append((name, header.length + stop, DTYPES[dtype][1]))
                if dtype == "float32" and name.startswith(STATE_PREFIX):
                    self._finite.add(name)


def decode(
    expected: Identity,
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    data: memoryview,
    checks: TensorChecks | None = None,
) -> tuple[HostTensor, ...]:
    """The tensors of a whole file: views into ``data``. Raises Unreadable.

    ``tensors``: (name, dtype, shape) of each tensor that the model's layout wants.
    ``checks``: of all of ``data``, when it was looked at as it came.
    """
    header = read_header(expected, data, checks)
    if chain_hash(expected.parent, expected.tokens) != expected.block_hash:
        raise Unreadable("its name is not the hash of its tokens")
    # States that are embedded in a block's file are not the block's: see ``checkpoint_file``.
    found = {
        name: (dtype, shape)
        for name, dtype, shape, _, _ in header.tensors
        if header.carries is None or not name.startswith(STATE_PREFIX)
    }
    wanted = {name: (dtype, shape) for name, dtype, shape in tensors}
    if found.keys() != wanted.keys():
        raise Unreadable(f"holds tensors {sorted(found)}, want {sorted(wanted)}")
    for name, (dtype, shape) in wanted.items():
        if found[name] != (dtype, shape):
            raise Unreadable(f"{name} is {found[name][0]}{found[name][1]}, want {dtype}{shape}")
    verified = read_tensors(header, data, wanted, checks)
    return tuple(verified[name] for name in wanted)


def read_header(expected: Identity, data: memoryview, checks: TensorChecks | None = None) -> Header:
    """The header of a whole file that is what it is expected to be. Raises Unreadable."""
    header = checks.header if checks is not None and checks.file_size == len(data) else None
    if header is None:
        header = decode_header(data, len(data))
    if header.identity != expected:
        raise Unreadable(f"holds another block: {_difference(header.identity, expected)}")
    return header


def read_tensors(
    header: Header, data: memoryview, names: Container[str], checks: TensorChecks | None = None
) -> dict[str, HostTensor]:
    """Tensors of a whole file by their names, checksums verified. Raises Unreadable."""
    tensors: dict[str, HostTensor] = {}
    for name, dtype, shape, start, stop in header.tensors:
        if name not in names:
            continue
        payload = data[header.length + start : header.length + stop]
        found = xxhash.xxh3_128_hexdigest(payload) if checks is None else checks.digest(name)
        if found is None or found != header.checksums.get(name):
            raise Unreadable(f"{name} does not match its checksum")
        finite = checks is not None and checks.known_finite(name)
        tensors[name] = HostTensor(name, dtype, shape, payload, finite)
    return tensors


def _difference(found: Identity, expected: Identity) -> str:
    for field in ("namespace", "block_hash", "parent", "tokens", "place"):
        if getattr(found, field) != getattr(expected, field):
            return field
    return "nothing"
