"""A recurrent state comes back within its codec's published error, or not at all."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omlx.cache.codecs import CODECS, Float32, NotFinite, decode, encode

pytestmark = pytest.mark.filterwarnings("error")

NAME = "gdn.3.1"
LOSSY = CODECS[1:]
BY_ROWS = ("int8", "rht_int8", "rht_int16")
QMAX = {"int8": 127, "rht_int8": 127, "rht_int16": 32767}
FLOAT_MAX = float(np.finfo(np.float32).max)
QUANTUM = 2.0**-149
"""The distance between float32 values next to 0."""

GROUPS = {1: [1], 2: [2], 7: [4, 2, 1], 96: [64, 32], 128: [128], 300: [128, 128, 32, 8, 4]}

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
close = st.floats(-4, 4, width=32)
states = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=finite)
)
rows = st.sampled_from([1, 2, 3, 7, 16, 31, 64, 96, 128, 129]).flatmap(
    lambda width: hnp.arrays(np.float32, (2, width), elements=finite | close)
)


def through(codec: str, state: Float32) -> Float32:
    encoded = encode(codec, NAME, state)
    return decode(NAME, encoded.metadata, encoded.tensors)


def row(*values: float) -> Float32:
    return np.array([values], np.float32)


def gaussian(*shape: int) -> Float32:
    return np.random.default_rng(7).standard_normal(shape, dtype=np.float32)


def documented_transform(width: int) -> np.ndarray:
    """H of a whole row, from the words of the module's documentation. Float64, (width, width)."""
    stream = b"".join(
        hashlib.sha256(
            b"omlx/gdn/rht/1" + n.to_bytes(4, "little") + k.to_bytes(4, "little")
        ).digest()
        for n, k in ((width, k) for k in range(width // 256 + 1))
    )
    signs = [-1.0 if stream[i // 8] >> (i % 8) & 1 else 1.0 for i in range(width)]
    h = np.zeros((width, width))
    start = 0
    while start < width:
        n = max(2**k for k in range(8) if 2**k <= width - start)
        for i in range(n):
            for j in range(n):
                h[start + i, start + j] = (-1) ** (i & j).bit_count() * signs[start + j] / n**0.5
        start += n
    return h


# ── what comes back ──────────────────────────────────────────────────────────────────────────────


@given(states)
def test_fp32_comes_back_bit_for_bit(state: Float32) -> None:
    assert through("fp32", state).tobytes() == state.tobytes()


@pytest.mark.parametrize("codec", CODECS)
@given(state=states)
@settings(max_examples=50)
def test_any_finite_state_comes_back_finite_and_in_shape(codec: str, state: Float32) -> None:
    result = through(codec, state)

    assert (result.dtype, result.shape) == (np.float32, state.shape)
    assert np.isfinite(result).all()


@given(rows)
def test_bf16_is_within_2_to_the_minus_8_of_each_value(state: Float32) -> None:
    exact = state.astype(np.float64)

    error = np.abs(through("bf16", state) - exact)

    assert (error <= np.maximum(np.abs(exact) * 2.0**-8, 2.0**-134)).all()


@given(rows)
def test_int8_is_within_half_a_step_of_each_value(state: Float32) -> None:
    largest = np.abs(state).max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # the largest float has no next one
        ulp = np.nan_to_num(np.spacing(largest).astype(np.float64), posinf=np.inf)

    error = np.abs(through("int8", state) - state.astype(np.float64))

    assert (error <= largest.astype(np.float64) / 254 + ulp).all()


@pytest.mark.parametrize("codec", ["rht_int8", "rht_int16"])
@given(state=rows)
def test_the_transform_keeps_each_row_within_its_l2_bound(codec: str, state: Float32) -> None:
    width = state.shape[1]
    exact = state.astype(np.float64)
    peak = np.abs(exact @ documented_transform(width).T).max(axis=1)
    float_error = np.linalg.norm(exact, axis=1) * 2.0**-20 + width * QUANTUM

    error = np.linalg.norm(through(codec, state) - exact, axis=1)

    assert (error <= np.sqrt(width) / 2 * peak / QMAX[codec] + float_error).all()


@pytest.mark.parametrize("codec", ["rht_int8", "rht_int16"])
@pytest.mark.parametrize("width", GROUPS)
def test_the_transform_is_the_documented_one(codec: str, width: int) -> None:
    state = gaussian(4, width)
    sizes = GROUPS[width]

    q, scale = encode(codec, NAME, state).tensors

    assert scale.shape == (4, len(sizes))
    spans = np.frombuffer(scale.data, "<f4").reshape(4, -1).repeat(sizes, axis=1)
    spans = spans * np.sqrt(np.repeat(sizes, sizes))
    wanted = state.astype(np.float64) @ documented_transform(width).T / spans
    found = np.frombuffer(q.data, np.dtype(q.dtype).newbyteorder("<")).reshape(4, width)
    assert np.abs(wanted - found).max() <= 0.5 + QMAX[codec] * 2.0**-20


@pytest.mark.parametrize("width", [64, 100, 128, 256])
@pytest.mark.parametrize(("codec", "limit"), [("rht_int8", 2e-2), ("rht_int16", 1e-4)])
@pytest.mark.parametrize("size", [1e-38, 1e-6, 1.0, 1e37])
def test_gaussian_rows_are_within_the_published_error(
    width: int, codec: str, limit: float, size: float
) -> None:
    state = gaussian(500, width) * np.float32(size)
    exact = state.astype(np.float64)

    error = np.linalg.norm(through(codec, state) - exact, axis=1) / np.linalg.norm(exact, axis=1)

    assert error.max() <= limit


def test_the_transform_spreads_an_outlier() -> None:
    state = gaussian(100, 128)
    state[:, 5] = 1000
    others = np.arange(128) != 5

    plain = through("int8", state)[:, others]
    rotated = through("rht_int8", state)[:, others]

    assert not plain.any(), "the outlier leaves nothing of the others"
    assert np.abs(rotated - state[:, others]).mean() < 1


@pytest.mark.parametrize("codec", CODECS)
def test_a_state_larger_than_a_chunk_comes_back_as_its_rows_do(codec: str) -> None:
    state = gaussian(3, 700, 96)

    whole = through(codec, state)

    for place in [(0, 0), (1, 341), (2, 699)]:
        alone = through(codec, state[place][None])[0]
        np.testing.assert_allclose(whole[place], alone, atol=2e-4 if "16" in codec else 5e-2)


# ── rows that break naive codecs ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [1, 2, 7, 96, 128])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_come_back_as_zeros_beside_other_rows(codec: str, width: int, zero: float) -> None:
    state = gaussian(3, width)
    state[1] = zero

    result = through(codec, state)

    assert not result[1].any()
    assert codec in ("fp32", "bf16") or not np.signbit(result[1]).any()
    assert result[0].any()
    assert result[2].any()


@pytest.mark.parametrize("value", [QUANTUM, 60 * QUANTUM, 150 * QUANTUM, 1e-40, 1e-38, 1e-36])
@pytest.mark.parametrize("width", [1, 8, 128])
@pytest.mark.parametrize("codec", BY_ROWS)
def test_a_tiny_row_neither_vanishes_nor_saturates(codec: str, width: int, value: float) -> None:
    state = np.full((1, width), value, np.float32)
    state[0, 1::2] *= -1

    result = through(codec, state).astype(np.float64)

    bound = np.sqrt(width) * np.abs(state).max() / 127 + width * QUANTUM / 2
    assert np.abs(result - state).max() <= bound
    if value > 2 * width * QUANTUM:
        assert (np.sign(result) == np.sign(state)).all()


@pytest.mark.parametrize("value", [3e38, FLOAT_MAX])
@pytest.mark.parametrize("width", [1, 7, 96, 128, 4096])
@pytest.mark.parametrize("codec", LOSSY)
def test_a_huge_row_stays_finite(codec: str, width: int, value: float) -> None:
    same = np.full((1, width), value, np.float32)
    alternating = same * np.where(np.arange(width) % 2, np.float32(-1), np.float32(1))
    single = np.zeros_like(same)
    single[0, width // 2] = -value
    state = np.concatenate([same, alternating, single])

    result = through(codec, state)

    assert np.isfinite(result).all()
    assert np.abs(result / value - state / value).max() < 0.1
    assert (np.abs(result) <= FLOAT_MAX).all()


@pytest.mark.parametrize("codec", BY_ROWS)
def test_tiny_and_huge_rows_do_not_disturb_their_neighbours(codec: str) -> None:
    state = gaussian(4, 128)
    calm = through(codec, state)
    state[1], state[2] = 1e-40, 3e38

    result = through(codec, state)

    np.testing.assert_array_equal(result[[0, 3]], calm[[0, 3]])


@pytest.mark.parametrize("codec", BY_ROWS)
def test_rows_that_differ_by_a_power_of_two_share_their_integers(codec: str) -> None:
    state = np.round(gaussian(1, 128) * 1000)
    sizes = [2.0**k for k in (-110, -20, 0, 100, 115)]

    q = [bytes(encode(codec, NAME, state * np.float32(size)).tensors[0].data) for size in sizes]

    assert len(set(q)) == 1


def test_alternating_ones_are_exact_in_int8() -> None:
    state = row(*[1, -1] * 64)

    np.testing.assert_array_equal(through("int8", state), state)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),  # halfway: to even, down
        (1 + 3 * 2**-8, 1 + 2**-6),  # halfway: to even, up
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-1 - 2**-8 + 2**-20, -1.0),
        (FLOAT_MAX, 255 * 2.0**120),  # not infinity
        (2.0**-133, 2.0**-133),
        (-0.0, -0.0),
    ],
)
def test_bf16_rounds_to_nearest_even(value: float, stored: float) -> None:
    result = through("bf16", row(value))

    assert result.tobytes() == row(stored).tobytes()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("codec", CODECS)
def test_a_state_that_is_not_finite_is_not_encoded(codec: str, value: float) -> None:
    state = gaussian(600, 128)
    state[599, 127] = value

    with pytest.raises(NotFinite, match=NAME):
        encode(codec, NAME, state)


@pytest.mark.parametrize("codec", CODECS)
def test_a_state_with_any_strides_is_encoded_by_its_values(codec: str) -> None:
    state = gaussian(128, 6, 128)
    turned = state.transpose(1, 2, 0)[::2]

    whole = encode(codec, NAME, np.ascontiguousarray(turned))

    assert encode(codec, NAME, turned) == whole


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3)])
def test_a_state_without_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no rows"):
        encode("int8", NAME, np.zeros(shape, np.float32))


def test_what_no_codec_can_encode_is_refused() -> None:
    with pytest.raises(ValueError, match="fp32, bf16, int8, rht_int8, rht_int16"):
        encode("int4", NAME, row(1))
    with pytest.raises(ValueError, match="float64"):
        encode("int8", NAME, np.zeros((1, 2), np.float64))  # pyright: ignore[reportArgumentType]
