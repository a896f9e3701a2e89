"""A cache directory with real files in it: chains of blocks and checkpoints of a tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from omlx.cache.block_file import HostTensor, Identity, encode_header
from omlx.cache.blocks import BlockHash, chain_hash, pack_tokens, root_hash, state_hash
from omlx.cache.checkpoint_file import encode_states
from omlx.cache.checkpoints import Place
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig, StateSpec
from omlx.core.plan import HostBlock
from omlx.disk.block_files import BlockFiles
from omlx.disk.directory import CacheDirectory

BLOCK_SIZE = 4
NAMESPACE, OTHER_NAMESPACE = "0123456789abcdef", "fedcba9876543210"
STATES = (
    StateSpec("gdn.1.0", (3, 10), "float32"),
    StateSpec("gdn.1.1", (2, 5, 6), "float32"),
)
CONFIG = ModelCacheConfig(
    (
        LayerConfig(LayerKind.KV, kv_heads=1, key_dim=2, value_dim=2, dtype="float16"),
        LayerConfig(LayerKind.RECURRENT, states=STATES),
    )
)


def block_payload(seed: int = 0, count: int = BLOCK_SIZE) -> HostBlock:
    return tuple(
        HostTensor(
            spec.name, spec.dtype, spec.shape(count), memoryview(bytes([seed % 256]) * 4 * count)
        )
        for spec in CONFIG.tensors
    )


def states_payload(seed: int = 0) -> HostBlock:
    random = np.random.default_rng(seed)
    return tuple(
        HostTensor(
            spec.name,
            spec.dtype,
            spec.shape,
            memoryview(random.standard_normal(spec.shape).astype(np.float32).tobytes()),
        )
        for spec in STATES
    )


class CacheFiles:
    """Writes files of one namespace, as a server would."""

    def __init__(self, root: Path, namespace: str = NAMESPACE, codec: str = "int8") -> None:
        root.mkdir(0o700, exist_ok=True)
        self.root = root
        self.namespace = namespace
        self.files = BlockFiles(CacheDirectory(root), namespace, CONFIG, BLOCK_SIZE, codec)

    def block(self, parent: BlockHash, seed: int, *, embedded: bool = False) -> BlockHash:
        tokens = pack_tokens([seed] * BLOCK_SIZE)
        name = chain_hash(parent, tokens)
        identity = Identity(self.namespace, name, parent, tokens)
        if embedded:
            payload = (*block_payload(seed), *states_payload(seed))
            self.files.write(identity, payload, Place.TURN)
        else:
            self.files.write(identity, block_payload(seed))
        return name

    def chain(self, length: int, seed: int = 0, salt: str = "") -> list[BlockHash]:
        """Blocks behind each other, from the beginning of a prompt."""
        names = [root_hash(self.namespace, salt)]
        for number in range(length):
            names.append(self.block(names[-1], seed + number))
        return names[1:]

    def checkpoint(self, parent: BlockHash, seed: int = 0) -> BlockHash:
        identity = self.checkpoint_identity(parent, seed)
        self.files.write(identity, states_payload(seed))
        return identity.block_hash

    def checkpoint_identity(self, parent: BlockHash, seed: int = 0) -> Identity:
        tokens = pack_tokens([seed] * 3)
        return Identity(self.namespace, state_hash(parent, tokens), parent, tokens, Place.LAST)

    def path(self, name: BlockHash, *, checkpoint: bool = False) -> Path:
        return self.files.path(name, checkpoint=checkpoint)


def checkpoint_with(state: HostTensor, identity: Identity) -> bytes:
    """A checkpoint's file that is sound but for what it holds as the first state."""
    assert identity.place is not None
    raw = states_payload()
    tensors, more = encode_states("fp32", identity, identity.place, raw, STATES)
    damaged = [state if tensor.name == state.name else tensor for tensor in tensors]
    header = encode_header(
        identity, damaged, block_size=BLOCK_SIZE, layer_kinds="kv,recurrent", more=more
    )
    return header + b"".join(bytes(tensor.data) for tensor in damaged)


def of_format(path: Path, form: str) -> None:
    """Make a file one of another version of the format."""
    content = path.read_bytes()
    was = b'"format":"3"'
    assert was in content
    path.write_bytes(content.replace(was, f'"format":"{form}"'.encode()))


def with_nan(state: HostTensor) -> HostTensor:
    values = np.frombuffer(state.data, np.float32).copy()
    values[0] = np.nan
    return replace(state, data=memoryview(values.tobytes()))
