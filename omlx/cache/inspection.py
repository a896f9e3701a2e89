"""What a file of the cache proves about itself, without the model it belongs to. Pure.

A server holds every file to the layout of its model. Here the file's own header says the layout,
so files of any model can be looked at. What is sound here and was not written by the served model
is still a miss there; what is damaged here is damaged there as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import orjson

from omlx.cache.block_file import (
    STATE_PREFIX,
    Header,
    Identity,
    Outline,
    Unreadable,
    decode_header,
)
from omlx.cache.block_tensors import decode
from omlx.cache.blocks import BlockHash, num_tokens, state_hash
from omlx.cache.checkpoint_file import decode_embedded, decode_states
from omlx.cache.hybrid_cache import StateSpec


@dataclass(frozen=True, slots=True)
class Named:
    """What a file's path says that it is."""

    namespace: str
    block_hash: BlockHash
    is_checkpoint: bool


def check_name(identity: Identity, named: Named) -> None:
    """Raises Unreadable when a header and its file's path don't say the same."""
    if identity.namespace != named.namespace:
        raise Unreadable("it belongs to another namespace than its folder's")
    if identity.block_hash != named.block_hash:
        raise Unreadable("the file's name is not the block's")
    if (identity.place is not None) != named.is_checkpoint:
        raise Unreadable("a block among the checkpoints, or a checkpoint among the blocks")


def inspect(named: Named, data: memoryview) -> Outline:
    """Check a whole file: header, identity, every checksum; states are decoded.

    Raises Unreadable, or OtherFormat for a file of another version of the format.
    """
    header = decode_header(data, len(data))
    identity = header.identity
    check_name(identity, named)
    if identity.place is not None:
        decode_states(identity, data, _states_of(header))
    else:
        _check_block(header, data)
        if header.carries is not None:
            name = state_hash(identity.parent, identity.tokens)
            state = replace(identity, block_hash=name, place=header.carries)
            decode_embedded(state, data, _states_of(header))
    return Outline(identity, header.carries, header.metadata, header.length)


def layers_of(metadata: Mapping[str, str]) -> str:
    """The layers of the model that wrote a file, in words: ``24 kv, 6 recurrent``."""
    kinds = [kind for kind in metadata.get("layer_kinds", "").split(",") if kind]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _check_block(header: Header, data: memoryview) -> None:
    count = num_tokens(header.identity.tokens)
    own = [
        (name, dtype, shape)
        for name, dtype, shape, _, _ in header.tensors
        if header.carries is None or not name.startswith(STATE_PREFIX)
    ]
    decode(header.identity, own, data)
    for name, _, shape in own:
        if len(shape) != 4 or shape[2] != count:  # (layers, kv_heads, tokens, head_dim)
            raise Unreadable(f"{name} has shape {shape}, and the block {count} tokens")


def _states_of(header: Header) -> list[StateSpec]:
    """The states as the file itself describes them."""
    try:
        states = orjson.loads(header.metadata["states"])
        return [
            StateSpec(name, tuple(state["shape"]), state["dtype"]) for name, state in states.items()
        ]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Unreadable(f"the states are not described: {error!r}") from None
