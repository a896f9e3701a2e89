"""Whatever happens to a checkpoint's file, we read back the right states or a miss."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from omlx.cache import codecs
from omlx.cache.block_file import HostTensor, Identity, Unreadable, encode_header
from omlx.cache.blocks import chain_hash, pack_tokens, root_hash, state_hash
from omlx.cache.checkpoint_file import RAW, decode_states, encode_states, encoded_nbytes
from omlx.cache.checkpoints import Place
from omlx.cache.codecs import CODECS
from omlx.cache.hybrid_cache import StateSpec

ROOT = root_hash("tiny")
TOKENS = pack_tokens([1, 2, 3])
NAME = state_hash(ROOT, TOKENS)
IDENTITY = Identity("tiny", NAME, ROOT, TOKENS, Place.TURN)
SPECS = (
    StateSpec("gdn.0.0", (3, 10), "bfloat16"),
    StateSpec("gdn.0.1", (2, 5, 6), "float32"),
    StateSpec("gdn.2.0", (3, 10), "float32"),
    StateSpec("gdn.2.1", (2, 5, 6), "float32"),
)
FAR = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 2e-2, "rht_int8": 2e-2, "rht_int16": 1e-4}
"""Relative L2 that each codec may be off by."""


def state(spec: StateSpec, seed: int) -> HostTensor:
    drawn = np.random.default_rng(seed).standard_normal(spec.shape).astype(np.float32)
    if spec.dtype == "bfloat16":
        raw = (drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        raw = drawn.tobytes()
    return HostTensor(spec.name, spec.dtype, spec.shape, memoryview(raw))


STATES = tuple(state(spec, seed) for seed, spec in enumerate(SPECS))
Stored = tuple[list[HostTensor], dict[str, str]]


def stored(codec: str) -> Stored:
    return encode_states(codec, IDENTITY, Place.TURN, STATES, SPECS)


def file_of(content: Stored, identity: Identity = IDENTITY) -> bytes:
    tensors, more = content
    header = encode_header(identity, tensors, block_size=3, layer_kinds="r", more=more)
    return header + b"".join(bytes(tensor.data) for tensor in tensors)


def read(
    file: bytes | bytearray, specs: Sequence[StateSpec] = SPECS, identity: Identity = IDENTITY
) -> tuple[HostTensor, ...]:
    return decode_states(identity, memoryview(file), specs)


def values(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


# ── what was written is read ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("codec", CODECS)
def test_every_state_comes_back_within_its_codecs_error(codec: str) -> None:
    back = read(file_of(stored(codec)))

    for tensor, spec, before in zip(back, SPECS, STATES, strict=True):
        assert (tensor.name, tensor.dtype, tensor.shape) == (spec.name, spec.dtype, spec.shape)
        if not spec.is_recurrent:
            assert bytes(tensor.data) == bytes(before.data)
            continue
        off = np.linalg.norm(values(tensor) - values(before)) / np.linalg.norm(values(before))
        assert off <= FAR[codec]


def test_states_that_were_not_encoded_are_the_files_own_bytes() -> None:
    """So their holder sees, by the buffer, that all of them share one, and copies none."""
    file = file_of(stored("fp32"))

    assert all(tensor.data.obj is file for tensor in read(file))


@pytest.mark.parametrize("codec", CODECS)
def test_convolution_tails_stay_raw_and_states_do_not(codec: str) -> None:
    """B26: the codec applies to every recurrent state, whatever its place, and to nothing else."""
    tensors, more = stored(codec)
    states = json.loads(more["states"])

    assert {name: kept["codec"] for name, kept in states.items()} == {
        "gdn.0.0": RAW,
        "gdn.0.1": codec,
        "gdn.2.0": RAW,
        "gdn.2.1": codec,
    }
    assert sum(tensor.nbytes for tensor in tensors) == encoded_nbytes(codec, SPECS)


def test_a_layer_of_one_state_is_encoded_as_well() -> None:
    """B26: no rule asks for the state's number."""
    specs = (StateSpec("gdn.7.0", (4, 8, 8), "float32"),)
    states = tuple(state(spec, 5) for spec in specs)
    tensors, _ = encode_states("int8", IDENTITY, Place.TURN, states, specs)

    assert [tensor.name for tensor in tensors] == ["gdn.7.0.q", "gdn.7.0.scale"]


def test_a_file_is_decoded_by_its_own_metadata() -> None:
    """B16: states of two codecs in one file, neither of them the reader's."""
    one, other = stored("int8"), stored("rht_int16")
    states = json.loads(one[1]["states"])
    states["gdn.2.1"] = json.loads(other[1]["states"])["gdn.2.1"]
    tensors = [t for t in one[0] if not t.name.startswith("gdn.2.1")]
    tensors += [t for t in other[0] if t.name.startswith("gdn.2.1")]

    back = read(file_of((tensors, one[1] | {"states": json.dumps(states), "codec": "none"})))

    assert np.abs(values(back[3]) - values(STATES[3])).max() < 1e-3


@pytest.mark.parametrize("place", list(Place))
def test_a_file_says_why_it_is_kept(place: Place) -> None:
    identity = replace(IDENTITY, place=place)
    content = encode_states("fp32", identity, place, STATES, SPECS)

    assert content[1]["place"] == place.name
    assert content[1]["position"] == "3"
    assert read(file_of(content, identity), identity=identity)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("codec", CODECS)
def test_a_state_that_is_not_finite_is_not_stored(codec: str, value: float) -> None:
    """B25."""
    array = values(STATES[1]).copy()
    array[1, 2, 3] = value
    bad = replace(STATES[1], data=memoryview(array.tobytes()))

    with pytest.raises(codecs.NotFinite):
        encode_states(codec, IDENTITY, Place.TURN, (STATES[0], bad, STATES[2], STATES[3]), SPECS)


# ── a file that is not what the model needs ──────────────────────────────────────────────────


def _without(name: str) -> Callable[[Stored], Stored]:
    def change(content: Stored) -> Stored:
        return [tensor for tensor in content[0] if tensor.name != name], content[1]

    return change


def _states(change: Callable[[dict[str, Any]], object]) -> Callable[[Stored], Stored]:
    def changed(content: Stored) -> Stored:
        states = json.loads(content[1]["states"])
        change(states)
        return content[0], content[1] | {"states": json.dumps(states)}

    return changed


def _tensor(name: str, **fields: Any) -> Callable[[Stored], Stored]:
    def change(content: Stored) -> Stored:
        return [replace(t, **fields) if t.name == name else t for t in content[0]], content[1]

    return change


def _no_layer(content: Stored) -> Stored:
    """Layer 2 removed everywhere, so that the file agrees with itself."""
    content = _states(lambda states: (states.pop("gdn.2.0"), states.pop("gdn.2.1")))(content)
    return [t for t in content[0] if not t.name.startswith("gdn.2.")], content[1]


def _scale(value: float) -> Callable[[Stored], Stored]:
    def change(content: Stored) -> Stored:
        scale = next(t for t in content[0] if t.name == "gdn.0.1.scale")
        data = bytes(scale.data)[4:] + struct.pack("<f", value)
        return _tensor("gdn.0.1.scale", data=memoryview(data))(content)

    return change


def _no_metadata(content: Stored) -> Stored:
    return content[0], {k: v for k, v in content[1].items() if k != "states"}


def _text(text: str) -> Callable[[Stored], Stored]:
    return lambda content: (content[0], content[1] | {"states": text})


EXTRA = HostTensor("gdn.9.1", "float32", (2,), memoryview(bytes(8)))

DAMAGE: dict[str, Callable[[Stored], Stored]] = {
    "a layer missing": _no_layer,
    "a tensor missing": _without("gdn.0.1.q"),
    "a scale missing": _without("gdn.0.1.scale"),
    "a convolution tail missing": _without("gdn.0.0"),
    "an extra tensor": lambda content: ([*content[0], EXTRA], content[1]),
    "an extra layer": lambda content: _states(
        lambda states: states.update({"gdn.9.1": states["gdn.0.1"]})
    )(([*content[0], EXTRA], content[1])),
    "a tail of another shape": _tensor("gdn.0.0", shape=(10, 3)),
    "a tail of another dtype": _tensor("gdn.0.0", dtype="float16"),
    "values of another shape": _tensor("gdn.0.1.q", shape=(5, 2, 6)),
    "values of another dtype": _tensor("gdn.0.1.q", dtype="uint8"),
    "a state of another shape": _states(lambda s: s["gdn.0.1"].update(shape=[5, 2, 6])),
    "a state of another dtype": _states(lambda s: s["gdn.0.1"].update(dtype="float16")),
    "the codec stripped": _states(lambda s: s["gdn.0.1"].pop("codec")),
    "the shape stripped": _states(lambda s: s["gdn.0.1"].pop("shape")),
    "the version stripped": _states(lambda s: s["gdn.0.1"].pop("codec_version")),
    "another version": _states(lambda s: s["gdn.0.1"].update(codec_version="2")),
    "an unknown codec": _states(lambda s: s["gdn.0.1"].update(codec="int4")),
    "no codec": _states(lambda s: s["gdn.0.1"].update(codec=None)),
    "a list for a codec": _states(lambda s: s["gdn.0.1"].update(codec=["int8"])),
    "another codec": _states(lambda s: s["gdn.0.1"].update(codec="rht_int8")),
    "a state that claims to be raw": _states(lambda s: s["gdn.0.1"].update(codec=RAW)),
    "a tail that claims a codec": _states(lambda s: s["gdn.0.0"].update(codec="int8")),
    "a word for a state": _states(lambda s: s.update({"gdn.0.1": "int8"})),
    "metadata stripped": _no_metadata,
    "metadata that is a list": _text("[]"),
    "metadata that is no JSON": _text("{"),
    "a negative scale": _scale(-1.0),
    "an infinite scale": _scale(np.inf),
    "a scale that is no number": _scale(np.nan),
    "a scale of zero beside values": _scale(0.0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_doubtful_file_is_a_miss(damage: str) -> None:
    """B16, B17: checksums agree in all of these; what is stored does not fit."""
    content = stored("int8")
    assert read(file_of(content))

    with pytest.raises(Unreadable):
        read(file_of(DAMAGE[damage](content)))


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_file_of_another_number_of_layers_is_a_miss(layers: int) -> None:
    """B17: the model has other layers than the file."""
    more = StateSpec("gdn.4.1", (2, 5, 6), "float32")

    with pytest.raises(Unreadable):
        read(file_of(stored("fp32")), specs=(*SPECS, more)[: 2 * layers if layers < 3 else 5])


def test_a_stored_state_that_is_not_finite_is_a_miss() -> None:
    array = values(STATES[1]).copy()
    array[0, 0, 0] = np.nan
    content = _tensor("gdn.0.1", data=memoryview(array.tobytes()))(stored("fp32"))

    with pytest.raises(Unreadable):
        read(file_of(content))


def test_a_stored_tail_that_is_not_finite_is_a_miss() -> None:
    array = values(STATES[2]).copy()
    array[0, 0] = np.inf
    content = _tensor("gdn.2.0", data=memoryview(array.tobytes()))(stored("fp32"))

    with pytest.raises(Unreadable):
        read(file_of(content))


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float16", 0x7C00), ("float16", 0xFE00), ("bfloat16", 0x7F80)]
)
def test_a_stored_tail_of_16_bits_that_is_not_finite_is_a_miss(dtype: str, bits: int) -> None:
    specs = (StateSpec("gdn.0.0", (3, 10), dtype), *SPECS[1:])
    tail = np.zeros((3, 10), np.uint16)
    for last, sound in ((0x7BFF, True), (bits, False)):
        tail[2, 9] = last
        tensor = HostTensor("gdn.0.0", dtype, (3, 10), memoryview(tail.tobytes()))
        file = file_of(encode_states("fp32", IDENTITY, Place.TURN, (tensor, *STATES[1:]), specs))
        if sound:
            assert bytes(read(file, specs)[0].data) == tail.tobytes()
        else:
            with pytest.raises(Unreadable, match="not finite"):
                read(file, specs)


@pytest.mark.parametrize(
    "wanted",
    [
        replace(IDENTITY, place=Place.LAST),
        replace(IDENTITY, place=None),
        replace(IDENTITY, namespace="other"),
        replace(IDENTITY, tokens=pack_tokens([1, 2, 4])),
        replace(IDENTITY, parent=root_hash("other")),
        replace(IDENTITY, block_hash=chain_hash(ROOT, TOKENS)),
    ],
    ids=["place", "block", "namespace", "tokens", "parent", "name"],
)
def test_another_checkpoints_file_is_a_miss(wanted: Identity) -> None:
    with pytest.raises(Unreadable):
        read(file_of(stored("fp32")), identity=wanted)


def test_a_name_that_is_not_the_hash_of_its_tokens_is_a_miss() -> None:
    """As a whole file under the name of the block that ends there."""
    liar = replace(IDENTITY, block_hash=chain_hash(ROOT, TOKENS))

    with pytest.raises(Unreadable):
        read(file_of(stored("fp32"), liar), identity=liar)


# ── damage anywhere ──────────────────────────────────────────────────────────────────────────


FILES = {codec: file_of(stored(codec)) for codec in CODECS}
READ = {codec: [bytes(t.data) for t in read(file)] for codec, file in FILES.items()}


@given(st.sampled_from(CODECS), st.data())
def test_a_flipped_bit_never_gives_a_wrong_state(codec: str, data: st.DataObject) -> None:
    file = bytearray(FILES[codec])
    bit = data.draw(st.integers(0, 8 * len(file) - 1), "bit")
    file[bit // 8] ^= 1 << bit % 8

    try:
        back = read(file)
    except Unreadable:
        return
    assert [bytes(tensor.data) for tensor in back] == READ[codec]


@given(st.sampled_from(CODECS), st.data())
def test_a_flipped_bit_in_a_tensor_is_always_a_miss(codec: str, data: st.DataObject) -> None:
    file = bytearray(FILES[codec])
    (length,) = struct.unpack_from("<Q", file)
    bit = data.draw(st.integers(8 * (8 + length), 8 * len(file) - 1), "bit")
    file[bit // 8] ^= 1 << bit % 8

    with pytest.raises(Unreadable):
        read(file)


@given(st.sampled_from(CODECS), st.data())
def test_a_torn_write_is_a_miss(codec: str, data: st.DataObject) -> None:
    whole = FILES[codec]
    kept = data.draw(st.integers(0, len(whole) - 1), "bytes that reached the disk")

    with pytest.raises(Unreadable):
        read(whole[:kept])
