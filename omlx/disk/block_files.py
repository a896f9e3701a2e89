"""The block files of one namespace: made, read, listed and removed.

What a file must prove is decided in ``cache.block_file``; how a file is whole or not there, and why
nothing is fsynced, in ``whole_files``; which names are ours in ``layout``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from omlx.cache.block_file import (
    HEADER_MAX,
    LENGTH,
    HostTensor,
    Identity,
    Unreadable,
    encode_header,
)
from omlx.cache.block_tensors import decode
from omlx.cache.blocks import BlockHash, chain_hash
from omlx.cache.checkpoint_file import decode_embedded, decode_states, encode_states
from omlx.cache.checkpoints import Place
from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.core.plan import HostBlock
from omlx.disk.census import CensusSlice, take_census
from omlx.disk.directory import CacheDirectory
from omlx.disk.layout import BLOCKS, block_path, is_block_path
from omlx.disk.verify import Verified, verify
from omlx.disk.whole_files import WholeFiles

InThread = Callable[..., Awaitable[Any]]
"""``await in_thread(function, *args)`` calls it where waiting for a disk holds nobody up."""


_PROBE = memoryview(bytes(4096))


class Files(Protocol):
    """What the reader and the writer use of BlockFiles."""

    namespace: str

    @property
    def generation(self) -> int: ...

    def configure(self, codec: str | None, floor_bytes: int | None) -> tuple[str, int]: ...

    def prepare(self) -> None: ...

    def check(self, *, write: bool) -> None: ...

    def write(
        self, identity: Identity, tensors: HostBlock, carries: Place | None = None, /
    ) -> int: ...

    def read(self, expected: Identity, /) -> HostBlock: ...

    def remove(self, block_hash: BlockHash, /) -> None: ...

    def discard(self, path: str, /) -> None: ...

    def census(self) -> Iterator[CensusSlice]: ...

    def verify(self, stopped: Callable[[], bool], /) -> Verified: ...


class BlockFiles:
    """The files of one namespace under one root. ``read`` and ``write`` may run side by side."""

    def __init__(
        self,
        directory: CacheDirectory,
        namespace: str,
        config: ModelCacheConfig,
        block_size: int,
        codec: str = "fp32",
        floor_bytes: int = 0,
    ) -> None:
        """``floor_bytes``: free space of the volume that is never written into; 0: none."""
        self.namespace = namespace
        self.codec = codec
        """What checkpoints are written with; each is read by its own metadata."""
        self._directory = directory
        self._files = WholeFiles(directory, floor_bytes)
        self._config = config
        self._block_size = block_size
        self._layer_kinds = ",".join(layer.kind for layer in config.layers)

    @property
    def generation(self) -> int:
        """Grows when the root was gone and was made anew: files that were known are lost."""
        return self._directory.generation

    def configure(
        self, codec: str | None = None, floor_bytes: int | None = None
    ) -> tuple[str, int]:
        """How the next files are written; None leaves it. Returns (codec, floor) as they are."""
        if codec is not None:
            self.codec = codec
        if floor_bytes is not None:
            self._files.floor_bytes = floor_bytes
        return self.codec, self._files.floor_bytes

    def prepare(self) -> None:
        """Make the namespace's folder; warn when others may look into it. Raises OSError."""
        base = f"{BLOCKS}/{self.namespace}"
        self._files.make_folder(base)
        self._directory.warn_if_open([BLOCKS, base])

    def check(self, *, write: bool) -> None:
        """Find out whether files can be written now; with ``write`` by writing and removing one.

        Raises NoRoom or another OSError. What a kill leaves of it is a damaged file, and goes.
        """
        self.prepare()
        self._files.ask_for(_PROBE.nbytes)
        if write:
            path = self._name(BlockHash(bytes(32)))
            self._files.write(path, [_PROBE])
            self._files.remove(path)

    def path(self, block_hash: BlockHash, *, checkpoint: bool = False) -> Path:
        return Path(self._directory.root, self._name(block_hash, checkpoint))

    def write(self, identity: Identity, tensors: HostBlock, carries: Place | None = None) -> int:
        """Make the block's file; returns its bytes.

        Raises codecs.NotFinite, NoRoom, Obstructed or another OSError, and leaves nothing behind.
        """
        more: dict[str, str] = {}
        place = carries if identity.place is None else identity.place
        if place is not None:
            states = self._config.states
            block, raw = tensors[: -len(states)], tensors[-len(states) :]
            encoded, more = encode_states(self.codec, identity, place, raw, states)
            tensors = (*block, *encoded)
        header = encode_header(
            identity,
            tensors,
            block_size=self._block_size,
            layer_kinds=self._layer_kinds,
            more=more,
        )
        path = self._name(identity.block_hash, identity.place is not None)
        return self._files.write(path, [memoryview(header), *(t.data for t in tensors)])

    def read(self, expected: Identity) -> tuple[HostTensor, ...]:
        """The tensors, verified and decoded.

        Raises Unreadable: what has the name is not this block, and was removed if it was a damaged
        file; or OSError, which says nothing about the file.
        """
        count = len(expected.tokens) // 4
        checkpoint = expected.place is not None
        payload_bytes = count * self._config.bytes_per_token + self._config.checkpoint_bytes
        most = payload_bytes + HEADER_MAX + LENGTH.size
        path = self._name(expected.block_hash, checkpoint)
        try:
            data, status, checks = self._files.read(path, most)
        except FileNotFoundError:
            if not checkpoint:
                raise
            # Not removed when its states are damaged: the block's own tensors may be sound.
            carrier = self._name(chain_hash(expected.parent, expected.tokens))
            data, _, checks = self._files.read(carrier, most)
            return decode_embedded(expected, data, self._config.states, checks)
        try:
            if checkpoint:
                return decode_states(expected, data, self._config.states, checks)
            wanted = [(spec.name, spec.dtype, spec.shape(count)) for spec in self._config.tensors]
            return decode(expected, wanted, data, checks)
        except Unreadable:
            self._files.remove_damaged(path, status)
            raise

    def remove(self, block_hash: BlockHash) -> None:
        """Harmless when it is gone already. Raises OSError."""
        self._files.remove(self._name(block_hash))
        self._files.remove(self._name(block_hash, checkpoint=True))

    def discard(self, path: str) -> None:
        """Remove a file that the census found among the others. Raises OSError."""
        assert is_block_path(path), "nothing is removed that has no block's name"
        self._files.remove(path)

    def census(self) -> Iterator[CensusSlice]:
        """Go through everything under the root; see ``census``. Raises OSError."""
        return take_census(self._directory, self._files, self.namespace)

    def verify(self, stopped: Callable[[], bool]) -> Verified:
        """Read and check everything under the root; changes nothing. Raises OSError."""
        return verify(self._directory, stopped=stopped)

    def _name(self, block_hash: BlockHash, checkpoint: bool = False) -> str:
        return block_path(self.namespace, block_hash, checkpoint=checkpoint)
