"""The stored form of a state is fixed, and any departure from it is refused, never misread."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from omlx.cache import block_file, block_tensors
from omlx.cache.block_file import HostTensor, Identity
from omlx.cache.blocks import chain_hash, pack_tokens, root_hash
from omlx.cache.codecs import (
    CODECS,
    Encoded,
    Float32,
    Undecodable,
    decode,
    encode,
    encoded_nbytes,
    layout,
)

pytestmark = pytest.mark.filterwarnings("error")

NAME = "gdn.3.1"
BY_ROWS = ("int8", "rht_int8", "rht_int16")
QMAX = {"int8": 127, "rht_int8": 127, "rht_int16": 32767}


def gaussian(*shape: int) -> Float32:
    return np.random.default_rng(7).standard_normal(shape, dtype=np.float32)


# ── the form ─────────────────────────────────────────────────────────────────────────────────────


def golden_state() -> Float32:
    """(2, 3, 100). Whole numbers whose sums are exact, so any machine encodes the same bytes."""
    numbers = np.arange(600, dtype=np.uint64) * 2654435761 % 65536
    return (numbers.astype(np.float32) - 32768).reshape(2, 3, 100)


GOLDEN = {
    "fp32": "63d76bfa5bb45ecc",
    "bf16": "4ea7057a45eaa627",
    "int8": "8b87a04d27f31806",
    "rht_int8": "18c0c0d25b24390e",
    "rht_int16": "2b0f36863b507d7f",
}


@pytest.mark.parametrize("codec", CODECS)
def test_the_format_has_not_changed(codec: str) -> None:
    digest = hashlib.sha256()

    for tensor in encode(codec, NAME, golden_state()).tensors:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape} ".encode())
        digest.update(tensor.data)

    assert digest.hexdigest()[:16] == GOLDEN[codec], "a new format needs a new codec_version"


@pytest.mark.parametrize("shape", [(4, 128, 128), (3, 1), (2, 1, 7), (300,)])
@pytest.mark.parametrize("codec", CODECS)
def test_the_tensors_are_as_the_layout_says(codec: str, shape: tuple[int, ...]) -> None:
    tensors = encode(codec, NAME, gaussian(*shape)).tensors

    assert layout(codec, NAME, shape) == tuple((t.name, t.dtype, t.shape) for t in tensors)
    assert encoded_nbytes(codec, shape) == sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("codec", CODECS)
def test_a_state_survives_a_checkpoint_file(codec: str) -> None:
    state = gaussian(2, 3, 96)
    encoded = encode(codec, NAME, state)
    parent, tokens = root_hash("model"), pack_tokens([1, 2, 3])
    identity = Identity("model", chain_hash(parent, tokens), parent, tokens)
    header = block_file.encode_header(identity, encoded.tensors, block_size=4, layer_kinds="r")
    file = header + b"".join(tensor.data for tensor in encoded.tensors)

    metadata = json.loads(json.dumps(encoded.metadata))
    wanted = layout(metadata["codec"], NAME, metadata["shape"])
    tensors = block_tensors.decode(identity, wanted, memoryview(file))

    result = decode(NAME, metadata, tensors)
    np.testing.assert_array_equal(result, decode(NAME, encoded.metadata, encoded.tensors))


# ── damage ───────────────────────────────────────────────────────────────────────────────────────


def encoded_state(codec: str) -> Encoded:
    return encode(codec, NAME, gaussian(4, 6, 8))


METADATA_DAMAGE = {
    "codec": [None, "", "INT8", "int4", 8, ["int8"], *CODECS],
    "codec_version": [None, "", "0", "2", 1, 1.0],
    "dtype": [None, "", "float16", "float64", "bfloat16", np.float32],
    "shape": [
        *(None, "", 6, [], [4, 6], [4, 6, 8, 1], [6, 4, 8], [4, 8, 6], [24, 8], [4, 6, 7]),
        *([4, 6, 0], [4, -6, -8], [4.0, 6, 8], [4, 6, "8"], [True, 192, 1], (4, 6, 8)),
        *([2**70], [4, 6, 2**60], [0, 6, 8]),
    ],
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("key", "value"), [(k, v) for k in METADATA_DAMAGE for v in METADATA_DAMAGE[k]]
)
def test_changed_metadata_is_undecodable(codec: str, key: str, value: object) -> None:
    encoded = encoded_state(codec)
    if repr(value) == repr(encoded.metadata[key]):
        pytest.skip("not a change")

    with pytest.raises(Undecodable):
        decode(NAME, {**encoded.metadata, key: value}, encoded.tensors)


@pytest.mark.parametrize("codec", CODECS)
def test_metadata_without_a_key_or_with_another_is_undecodable(codec: str) -> None:
    encoded = encoded_state(codec)

    for key in encoded.metadata:
        with pytest.raises(Undecodable):
            decode(NAME, {k: v for k, v in encoded.metadata.items() if k != key}, encoded.tensors)
    with pytest.raises(Undecodable):
        decode(NAME, {**encoded.metadata, "bits": 8}, encoded.tensors)


def test_each_state_is_decoded_by_its_own_metadata() -> None:
    state = gaussian(4, 8)
    files = [encode(codec, NAME, state) for codec in CODECS]

    for file, codec in zip(files, CODECS, strict=True):
        np.testing.assert_allclose(decode(NAME, file.metadata, file.tensors), state, atol=0.05)
        for other in files:
            if other is not file:
                with pytest.raises(Undecodable):
                    decode(NAME, other.metadata, file.tensors)
        assert file.metadata["codec"] == codec


def reshaped(tensor: HostTensor) -> HostTensor:
    return replace(tensor, shape=(tensor.shape[1], tensor.shape[0], tensor.shape[2]))


def retyped(tensor: HostTensor) -> HostTensor:
    other = {"int8": "uint8", "int16": "float16", "bfloat16": "float16", "float32": "int32"}
    return replace(tensor, dtype=other[tensor.dtype])


TENSOR_DAMAGE: dict[str, Callable[[HostTensor], Sequence[HostTensor]]] = {
    "missing": lambda t: [],
    "twice": lambda t: [t, t],
    "of another state": lambda t: [replace(t, name=t.name.replace("gdn.3.1", "gdn.3.0"))],
    "beside an unknown one": lambda t: [t, replace(t, name=f"{t.name}.more")],
    "reshaped": lambda t: [reshaped(t)],
    "flattened": lambda t: [replace(t, shape=(t.shape[0] * t.shape[1], t.shape[2]))],
    "retyped": lambda t: [retyped(t)],
    "short": lambda t: [replace(t, data=t.data[:-1])],
    "long": lambda t: [replace(t, data=memoryview(bytes(t.data) + b"\0"))],
    "strided": lambda t: [replace(t, data=memoryview(bytes(t.data) * 2)[::2])],
}


@pytest.mark.parametrize("damage", TENSOR_DAMAGE)
@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_set_of_tensors_is_undecodable(codec: str, damage: str) -> None:
    encoded = encoded_state(codec)

    for k, tensor in enumerate(encoded.tensors):
        others = [t for i, t in enumerate(encoded.tensors) if i != k]
        with pytest.raises(Undecodable):
            decode(NAME, encoded.metadata, [*others, *TENSOR_DAMAGE[damage](tensor)])


@pytest.mark.parametrize("codec", CODECS)
def test_the_order_of_tensors_does_not_matter(codec: str) -> None:
    encoded = encoded_state(codec)

    result = decode(NAME, encoded.metadata, encoded.tensors[::-1])

    np.testing.assert_array_equal(result, decode(NAME, encoded.metadata, encoded.tensors))


def with_value(encoded: Encoded, k: int, dtype: str, value: float) -> list[HostTensor]:
    """The tensors, the last value of number ``k`` replaced."""
    tensors = list(encoded.tensors)
    array = np.frombuffer(tensors[k].data, dtype).copy()
    array[-1] = value
    tensors[k] = replace(tensors[k], data=array.data.cast("B"))
    return tensors


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -1.0, -0.0, -1e-40, 3e38, 0.0])
@pytest.mark.parametrize("codec", BY_ROWS)
def test_an_impossible_scale_is_undecodable(codec: str, value: float) -> None:
    encoded = encoded_state(codec)

    with pytest.raises(Undecodable):
        decode(NAME, encoded.metadata, with_value(encoded, 1, "<f4", value))


@pytest.mark.parametrize(
    ("codec", "dtype"), [("int8", "i1"), ("rht_int8", "i1"), ("rht_int16", "<i2")]
)
def test_a_value_that_no_encoder_writes_is_undecodable(codec: str, dtype: str) -> None:
    encoded = encoded_state(codec)

    with pytest.raises(Undecodable):
        decode(NAME, encoded.metadata, with_value(encoded, 0, dtype, -QMAX[codec] - 1))


@pytest.mark.parametrize(
    ("codec", "dtype", "value"),
    [
        *(("fp32", "<f4", value) for value in (np.inf, -np.inf, np.nan)),
        *(("bf16", "<u2", bits) for bits in (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF)),
    ],
)
def test_a_stored_value_that_is_not_finite_is_undecodable(
    codec: str, dtype: str, value: float
) -> None:
    encoded = encoded_state(codec)

    with pytest.raises(Undecodable):
        decode(NAME, encoded.metadata, with_value(encoded, 0, dtype, value))
