"""A checkpoint on disk: recurrent states through a codec, the rest as it is. Pure: bytes in, out.

The file has the form of a block's (``block_file``) under the name of the state. Embedded, the
states lie in the file of the block that ends with them, beside its keys and values. The metadata
also has:

    place        why it is kept: LATTICE, LAST, TURN, BRANCH or SYSTEM ("carries" if embedded)
    position     tokens folded into the state, counted from the parent block's end
    codec        what the recurrent states were written with; for people who look
    states       JSON: name -> codec, codec_version, dtype, shape, by which each is decoded

Each file is decoded by its own metadata and no other. The whole checkpoint is validated before
any of it is used: which states, their shapes and dtypes, codecs, scales, finiteness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from omlx.cache import codecs
from omlx.cache.block_file import (
    STATE_PREFIX,
    Header,
    HostTensor,
    Identity,
    Unreadable,
)
from omlx.cache.block_tensors import TensorChecks, read_header, read_tensors
from omlx.cache.blocks import chain_hash, num_tokens, state_hash
from omlx.cache.checkpoints import Place
from omlx.cache.finite import INFINITY_BITS, all_finite_bits
from omlx.cache.hybrid_cache import StateSpec

RAW = "raw"
"""For states that no codec applies to: convolution tails, in the model's own dtype."""


def is_state(tensor: HostTensor) -> bool:
    """Whether a tensor of a block that carries a checkpoint belongs to the checkpoint."""
    return tensor.name.startswith(STATE_PREFIX)


def encode_states(
    codec: str,
    identity: Identity,
    place: Place,
    tensors: Sequence[HostTensor],
    specs: Sequence[StateSpec],
) -> tuple[list[HostTensor], dict[str, str]]:
    """The tensors of the file and its further metadata. Raises codecs.NotFinite."""
    stored: list[HostTensor] = []
    states: dict[str, dict[str, Any]] = {}
    for tensor, spec in zip(tensors, specs, strict=True):
        if spec.is_recurrent:
            array = np.frombuffer(tensor.data, np.float32).reshape(spec.shape)
            encoded = codecs.encode(codec, spec.name, array)
            stored += encoded.tensors
            states[spec.name] = dict(encoded.metadata)
        else:
            stored.append(tensor)
            states[spec.name] = {"codec": RAW, "dtype": spec.dtype, "shape": list(spec.shape)}
    more = {
        # A block that carries a checkpoint is a block; a checkpoint's own file is none.
        "carries" if identity.place is None else "place": place.name,
        "position": str(num_tokens(identity.tokens)),
        "codec": codec,
        "states": orjson.dumps(states).decode(),
    }
    return stored, more


def decode_states(
    expected: Identity,
    data: memoryview,
    specs: Sequence[StateSpec],
    checks: TensorChecks | None = None,
) -> tuple[HostTensor, ...]:
    """Every state, decoded, in the order of ``specs``. Raises Unreadable.

    ``checks``: of all of ``data``, when it was looked at as it came.
    """
    name = state_hash(expected.parent, expected.tokens)
    if name != expected.block_hash:
        raise Unreadable("its name is not the hash of its tokens")
    header = read_header(expected, data, checks)
    names = {name for name, *_ in header.tensors}
    return _decode_all(header, read_tensors(header, data, names, checks), specs)


def decode_embedded(
    expected: Identity,
    data: memoryview,
    specs: Sequence[StateSpec],
    checks: TensorChecks | None = None,
) -> tuple[HostTensor, ...]:
    """The states of a checkpoint out of the file of the block that ends with it."""
    block = Identity(
        expected.namespace,
        chain_hash(expected.parent, expected.tokens),
        expected.parent,
        expected.tokens,
    )
    header = read_header(block, data, checks)
    names = {name for name, *_ in header.tensors if name.startswith(STATE_PREFIX)}
    return _decode_all(header, read_tensors(header, data, names, checks), specs)


def _decode_all(
    header: Header, tensors: dict[str, HostTensor], specs: Sequence[StateSpec]
) -> tuple[HostTensor, ...]:
    try:
        states = orjson.loads(header.metadata["states"])
        names = {spec.name for spec in specs}
        if not isinstance(states, dict) or states.keys() != names:
            raise Unreadable(f"holds other states than the model's {len(names)}")
        decoded = tuple(_decode(spec, states[spec.name], tensors) for spec in specs)
    except (KeyError, ValueError, TypeError, codecs.Undecodable) as error:
        raise Unreadable(f"a state can't be decoded: {error}") from None
    if tensors:
        raise Unreadable(f"holds tensors that no state needs: {sorted(tensors)}")
    return decoded


def _decode(
    spec: StateSpec, metadata: dict[str, Any], tensors: dict[str, HostTensor]
) -> HostTensor:
    """One state; its tensors are taken out of ``tensors``."""
    codec = metadata["codec"]
    if (metadata["dtype"], tuple(metadata["shape"])) != (spec.dtype, spec.shape):
        raise ValueError(f"{spec.name} is {metadata['dtype']}{metadata['shape']}")
    if (codec == RAW) is spec.is_recurrent:
        raise ValueError(f"{spec.name} was written with {codec}")
    if codec == RAW:
        tensor = tensors.pop(spec.name)
        if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            raise ValueError(f"{spec.name} is stored as {tensor.dtype}{tensor.shape}")
        if not _all_finite(tensor):
            raise ValueError(f"{spec.name} holds values that are not finite")
        return tensor
    stored = [tensors.pop(name) for name, _, _ in codecs.layout(codec, spec.name, spec.shape)]
    state = codecs.decode(spec.name, metadata, stored)
    if np.shares_memory(state, stored[0].data):
        # The file's own bytes, as a part of its buffer: so its holder sees that it holds that.
        return stored[0]
    return HostTensor(spec.name, spec.dtype, spec.shape, _bytes_of(state))


def _all_finite(tensor: HostTensor) -> bool:
    if tensor.known_finite or tensor.dtype not in INFINITY_BITS:
        return True  # integers are
    bits = np.uint32 if tensor.dtype == "float32" else np.uint16
    return all_finite_bits(tensor.dtype, np.frombuffer(tensor.data, bits))


def _bytes_of(state: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(state).view(np.uint8).reshape(-1).data


def encoded_nbytes(codec: str, specs: Sequence[StateSpec]) -> int:
    """Bytes of a checkpoint's tensors on disk."""
    return sum(
        codecs.encoded_nbytes(codec, spec.shape) if spec.is_recurrent else spec.nbytes
        for spec in specs
    )
